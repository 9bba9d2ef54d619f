"""Copies and casts from any layout to any other, fills, concatenation.

Law: bytes read and written over the bandwidth. Features: both layouts, the length of runs that are contiguous in both,
the widths; for concatenation the number of pieces and the length of a piece's run.
"""

from __future__ import annotations

from math import prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, codes, flat, ln, moved_law, plain_features
from presage.costs.rates import Rates

LAST = (0, 2, 3, 1)  # dimensions of a channels-last image, the slowest first
CODES = codes(("copy_", "fill_", "zero_", "cat", "roll", "clone", "repeat", "stack"))
KINDS = {"float32": 0.0, "bfloat16": 1.0, "float16": 2.0, "bool": 3.0, "int64": 4.0, "float64": 5.0, "int32": 6.0}
FILLS = ("aten::fill_", "aten::zero_")


def law(call: Call, rates: Rates) -> Law:
    moved = float(sum(t.distinct for t in call.tensors))
    if call.name in FILLS:
        return moved_law(0.0, float(call.tensors[0].distinct), rates)
    if call.name == "aten::copy_":
        return moved_law(moved - call.tensors[0].distinct, float(call.tensors[0].nbytes), rates)
    return moved_law(moved, moved, rates)


def features(call: Call, law: Law) -> list[float]:
    joins = call.name == "aten::cat"
    given = call.sized if joins else flat(call.sized[:2])
    first, second = (*given, None, None)[:2]
    if joins and first is not None:
        dim = int(call.number(1)) % max(1, len(first.sizes))
        run = prod(first.sizes[dim:])
        joined = [float(dim), ln(run), ln(prod(first.sizes[:dim])), ln(max(t.elements for t in given))]
    else:
        joined = [0.0, *_runs(first, second)]
    code = CODES.get(call.name, -1.0)
    return [*plain_features(call, law, code, 2, 0, given), ln(len(given)), *joined, *_regime(first, second)]


def _regime(target: Shape | None, source: Shape | None) -> list[float]:
    """Types of both, and which kernel: 0 a plain copy, 1 a cast of one long row, 2 strided, 3 strided with a cast."""
    if target is None or source is None:
        return [KINDS.get(target.dtype, 7.0) if target else -1.0, -1.0, -1.0]
    same = target.sizes == source.sizes and target.strides == source.strides and target.is_dense
    same = same or (target.is_contiguous and source.is_contiguous)
    cast = target.dtype != source.dtype
    return [KINDS.get(target.dtype, 7.0), KINDS.get(source.dtype, 7.0), float(cast) + (0.0 if same else 2.0)]


def strided(call: Call) -> list[Call]:
    """Concatenation of pieces that are not contiguous runs a strided copy; of channels-last ones one with their
    dimensions in that order."""
    if call.name != "aten::cat" or all(t.is_contiguous for t in call.tensors):
        return [call]
    if all(_channels_last(t) for t in call.tensors):
        pieces = tuple(contiguous(tuple(t.sizes[k] for k in LAST), t.dtype) for t in call.tensors)
        return [Call(call.name, (pieces, LAST.index(int(call.number(1)) % 4)))]
    rough = max(call.tensors, key=lambda t: (not t.is_contiguous, t.elements))
    times = max(1, sum(t.elements for t in call.tensors) // max(1, rough.elements))
    source = Shape((times, *rough.sizes), (2 * rough.elements, *rough.strides), rough.dtype)
    return [Call("aten::copy_", (contiguous(source.sizes, rough.dtype), source))]


def _channels_last(t: Shape) -> bool:
    if len(t.sizes) != 4 or len(t.strides) != 4:
        return False
    sizes, strides = (tuple(x[k] for k in LAST) for x in (t.sizes, t.strides))
    return Shape(sizes, strides, t.dtype).is_contiguous


def contiguous(sizes: tuple[int, ...], dtype: str) -> Shape:
    strides = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return Shape(sizes, strides, dtype)


def _runs(target: Shape | None, source: Shape | None) -> list[float]:
    """The run contiguous in both, and the source's stride and size along the target's fastest dimension."""
    if target is None or source is None or len(target.strides) != len(source.strides) or target.sizes != source.sizes:
        return [0.0, 0.0, 0.0]
    dims = sorted((t, n, s) for t, n, s in zip(target.strides, target.sizes, source.strides, strict=True) if n > 1)
    run, expected = 1, 1
    for t, n, s in dims:
        if t != expected or s != expected:
            break
        run, expected = run * n, expected * n
    return [ln(run), ln(dims[0][2] if dims else 1), ln(dims[0][1] if dims else 1)]


FAMILY = KernelFamily("copy", frozenset(CODES), law, features, rounds=900, leaves=47, parts=strided)
