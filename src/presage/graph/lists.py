"""Lists of tensors that one kernel of CUDA's takes, as foreach ops ask it."""

from __future__ import annotations

from collections.abc import Sequence

from presage.graph.graph import Tensor


def fits_one_foreach_kernel(columns: Sequence[Sequence[Tensor]], any_dtype: bool = False) -> bool:
    """Whether one kernel works on these lists; else there is one op for each tensor.

    It asks for one dtype and no holes, and that tensors at the same place of several lists have the same sizes and
    strides (those of dimensions of size 1 aside). Single numbers beside tensors, as a capturable optimizer has its step
    sizes, are not taken.
    """
    first = columns[0]
    dtypes = {t.dtype for column in columns for t in column}
    alike = all(
        len(column) == len(first) and all(_laid_out_alike(t, f) for t, f in zip(column, first, strict=True))
        for column in columns
    )
    return alike and (any_dtype or len(dtypes) == 1) and all(is_dense(t) for t in first)


def _laid_out_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and all(
        n == 1 or x == y for n, x, y in zip(a.shape, a.strides, b.strides, strict=False)
    )  # fmt: skip


def is_dense(t: Tensor) -> bool:
    """Without holes or overlaps, in whatever order its dimensions lie."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.strides, strict=False) if n != 1):
        if stride != expected:
            return t.elements == 0
        expected *= size
    return len(t.shape) == len(t.strides)
