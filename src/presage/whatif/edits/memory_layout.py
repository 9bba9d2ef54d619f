"""Layouts of tensors: strides of the usual ones, and where a view lies after its storage was laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from presage.graph.graph import Tensor

__all__ = [
    "Layout",
    "channels_last",
    "contiguous",
    "dense",
    "is_channels_last",
    "is_dense",
    "moved",
    "permuted",
    "viewed",
]


class Layout(NamedTuple):
    strides: tuple[int, ...]
    offset: int


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    return permuted(shape, range(len(shape)))


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a picture whose channels, the second dimension, lie next to each other."""
    return permuted(shape, (0, *range(2, len(shape)), 1))


def permuted(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Dense strides with the dimensions in this order, from the widest stride to the narrowest."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def is_dense(t: Tensor) -> bool:
    """No holes and no element twice."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.strides, t.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense(t: Tensor) -> tuple[int, ...]:
    """The strides of a copy that keeps the order of the dimensions, as `empty_like` does."""
    if is_dense(t):
        return t.strides
    if any(s == 0 and n > 1 for s, n in zip(t.strides, t.shape, strict=True)):
        return contiguous(t.shape)
    return permuted(t.shape, sorted(range(len(t.shape)), key=lambda d: (-t.strides[d], d)))


def is_channels_last(t: Tensor) -> bool:
    """PyTorch's test: strides in the order of channels-last, sizes of 1 notwithstanding."""
    if len(t.shape) not in (4, 5) or len(t.strides) != len(t.shape) or t.strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(t.shape) - 1, 1, -1), 0):
        if t.shape[d] == 0 or t.strides[d] < least or (d == 0 and least == t.strides[1]):
            return False
        least = t.strides[d] * max(t.shape[d], 1)
    return True


def moved(t: Tensor, old: Tensor, new: Tensor) -> Layout | None:
    """Where a view of `old`'s storage lies when `old` lies as `new` does; None where no view can."""
    if (old.strides, old.offset) == (new.strides, new.offset):
        return Layout(t.strides, t.offset)
    triples = zip(old.strides, old.shape, new.strides, strict=True)
    dims = sorted(((s, n, r) for s, n, r in triples if n > 1 and s > 0), reverse=True)
    offset = _offset(t.offset - old.offset, dims)
    steps = [_step(n, s, dims) for n, s in zip(t.shape, t.strides, strict=True)]
    if offset is None or any(s is None for s in steps):
        return None
    return Layout(tuple(s for s in steps if s is not None), offset + new.offset)


def _offset(left: int, dims: Sequence[tuple[int, int, int]]) -> int | None:
    out = 0
    for old, _, new in dims:
        out += left // old * new
        left %= old
    return out if left == 0 else None


def _step(size: int, stride: int, dims: Sequence[tuple[int, int, int]]) -> int | None:
    """The new stride of one dimension of a view, which may be part of one of the storage's or several in one."""
    if size <= 1 or stride == 0:
        return stride
    place = next((i for i, (old, _, _) in enumerate(dims) if old <= stride), None)
    if place is None or stride % dims[place][0]:
        return None
    step, (old, room, new) = stride // dims[place][0], dims[place]
    while step * (size - 1) >= room:  # goes on in the next wider dimension, which must lie behind this one
        place -= 1
        if place < 0 or dims[place][0] != old * room or dims[place][2] != new * room:
            return None
        room *= dims[place][1]
    return step * new


def viewed(t: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view of another shape, as `Tensor.view` finds them; None where only a copy has it."""
    if t.elements == 0:
        return contiguous(shape)
    strides, chunk, place = [0] * len(shape), 1, len(shape) - 1
    base = t.strides[-1] if t.strides else 1
    for d in range(len(t.shape) - 1, -1, -1):
        chunk *= t.shape[d]
        ends = d == 0 or (t.shape[d - 1] != 1 and t.strides[d - 1] != chunk * base)
        if not ends:
            continue
        size = 1
        while place >= 0 and (size < chunk or shape[place] == 1):
            strides[place] = size * base
            size *= shape[place]
            place -= 1
        if size != chunk:
            return None
        base, chunk = t.strides[d - 1] if d else 1, 1
    return tuple(strides) if place == -1 else None
