"""Cut: memory of which each rank of a group holds one part, and what that makes of the tensors in it.

Memory is cut in periods: of every `period` bytes, a rank keeps the first `period / ranks`. A weight of queries, keys
and values, [3 x 16 heads x 64, 1024], cut by heads is memory of period 16 x 64 x 1024. Its transpose, a chunk of it and
every other view are in the same memory, so that one number says what becomes of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from presage.graph.graph import Tensor


class CannotSplit(Exception):
    """Why something cannot be cut, in words for the user."""


class UnevenSplit(CannotSplit):
    """The ranks would not all have the same."""

    def __init__(self, what: str, ranks: int) -> None:
        super().__init__(f"{what} cannot be shared out evenly among {ranks} ranks")


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The dimension of a tensor that is cut, and the elements along it after which the cut repeats."""

    dim: int
    period: int


def period_of(t: Tensor, cut: Cut) -> int:
    """Bytes of its memory after which the cut repeats."""
    return cut.period * t.strides[cut.dim] * t.itemsize


def find_cut(t: Tensor, period: int, ranks: int) -> Cut:
    """Which dimension of a tensor is cut, in memory that is cut in such periods."""
    around, uneven = divmod(period, t.itemsize * ranks)
    if uneven:
        raise UnevenSplit(_shape_text(t), ranks)
    around *= ranks
    found, inside = _dims(t, around, ranks)
    if t.offset % around + inside >= t.strides[found]:
        raise CannotSplit(f"{_shape_text(t)} does not lie within one part")
    return Cut(found, around // t.strides[found])


def _dims(t: Tensor, period: int, ranks: int) -> tuple[int, int]:
    """The dimension that is cut, and how far those inside a part reach."""
    found, inside = -1, 0
    for dim, (size, stride) in enumerate(zip(t.shape, t.strides, strict=True)):
        if size == 1 or stride % period == 0:
            continue
        if size * stride % period == 0:
            if found >= 0 or period % stride or (period // ranks) % stride:
                raise UnevenSplit(f"{t.shape[dim]} of {_shape_text(t)}", ranks)
            found = dim
        elif size * stride < period:
            inside += (size - 1) * stride
        else:
            raise CannotSplit(f"{_shape_text(t)} crosses the parts of several ranks")
    if found < 0:
        raise CannotSplit(f"{_shape_text(t)}, a view of what it gives, would be one rank's alone")
    return found, inside


def cut_tensor(t: Tensor, cut: Cut, ranks: int, period: int = 0) -> Tensor:
    """What a rank holds of a tensor; `period` is that of its memory in bytes, 0 where that stays whole."""
    shape = tuple(n // ranks if d == cut.dim else n for d, n in enumerate(t.shape))
    if not period:
        return replace(t, shape=shape)
    around = period // t.itemsize
    strides = tuple(s // ranks if s and s % around == 0 else s for s in t.strides)
    offset = t.offset // around * (around // ranks) + t.offset % around
    return replace(t, shape=shape, strides=strides, offset=offset)


def cut_bytes(nbytes: int, period: int, ranks: int) -> int:
    """The memory a rank needs; its last row may end early."""
    missing = -nbytes % period
    if missing * ranks >= period:
        raise CannotSplit(f"memory of {nbytes} bytes has an odd end")
    return (nbytes + missing) // ranks - missing


def _shape_text(t: Tensor) -> str:
    return f"[{' x '.join(map(str, t.shape))}]"
