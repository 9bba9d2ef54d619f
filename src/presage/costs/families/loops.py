"""The loops of PyTorch's element-wise and reducing kernels: what dimensions are left once neighbours are joined.

A kernel that cannot treat its tensors as one long row finds every element's place by a division for each loop. Loops go
from the fastest to the slowest: of a reduction first those it reduces over, in the input's order of memory, then those
it keeps, in the order of the result, which is contiguous whatever the input was; of element-wise ops in the order of
the first tensor that tells two dimensions apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cmp_to_key
from math import ceil
from typing import NamedTuple

from presage.costs.call import Shape
from presage.costs.families.common import power
from presage.costs.rates import REFERENCE_SMS


class Loop(NamedTuple):
    """One dimension: its size, and each tensor's stride in elements (0 where an element repeats)."""

    size: int
    strides: tuple[int, ...]


def joined(loops: Iterable[Loop]) -> list[Loop]:
    """Loops, the fastest first, with neighbours joined where memory allows in every tensor."""
    out: list[Loop] = []
    for loop in loops:
        last = out[-1] if out else None
        if last and all(last.size * a == b for a, b in zip(last.strides, loop.strides, strict=True)):
            out[-1] = Loop(last.size * loop.size, last.strides)
        elif loop.size > 1:
            out.append(loop)
    return out


def padded_strides(t: Shape, dims: int) -> tuple[int, ...]:
    """Strides of a tensor broadcast to so many dimensions."""
    strides = t.strides if len(t.strides) == len(t.sizes) else _contiguous(t.sizes)
    own = [0 if n == 1 else s for n, s in zip(t.sizes, strides, strict=True)]
    return (*(0,) * (dims - len(own)), *own)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    out, step = [], 1
    for n in reversed(sizes):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def elementwise_loops(sizes: Sequence[int], shapes: Sequence[Shape]) -> list[Loop]:
    """The loops of an element-wise kernel over `sizes`; the result lies in the loops' own order."""
    strides = [padded_strides(t, len(sizes)) for t in shapes]
    dims = [Loop(n, tuple(s[i] for s in strides)) for i, n in enumerate(sizes) if n > 1]
    last_first = dims[::-1]
    return joined(sorted(last_first, key=cmp_to_key(_slower)))


def _slower(one: Loop, other: Loop) -> int:
    for a, b in zip(one.strides, other.strides, strict=True):
        if a and b and a != b:
            return -1 if a < b else 1
    return 0


class ReduceLoops(NamedTuple):
    """The loops of a reduction over one tensor, and how its thread blocks share them out."""

    over: list[Loop]
    kept: list[Loop]
    fastest: bool  # whether neighbours in memory are reduced
    wide: int  # threads along the fastest loops
    high: int
    added: int  # threads of a block that add up to one element
    vector: int  # numbers that a thread reads at once
    blocks: int
    splits: int  # blocks that share an element

    @property
    def stride(self) -> int:
        """Elements from what a thread reads to what its neighbour does."""
        first = (self.over if self.fastest else self.kept) or self.kept or self.over
        return abs(first[0].strides[0]) if first else 1


THREADS, ROUND, SPLIT_AT = 512, 16, 256  # of a block; numbers a thread should have before a block, and blocks, share


def reduce_loops(x: Shape, dims: Sequence[int]) -> ReduceLoops:
    """How PyTorch's reduction kernel (ATen/native/cuda/Reduce.cuh) divides its work on the reference GPU."""
    strides = padded_strides(x, len(x.sizes))
    over = sorted((Loop(x.sizes[i], (strides[i],)) for i in set(dims)), key=lambda loop: loop.strides[0])
    left = [i for i in range(len(x.sizes)) if i not in dims]
    result = dict(zip(left, _contiguous([x.sizes[i] for i in left]), strict=True))
    kept = [Loop(x.sizes[i], (strides[i], result[i])) for i in reversed(left)]
    return _shared(joined(over), joined(kept))


def _shared(over: list[Loop], kept: list[Loop]) -> ReduceLoops:
    inner, outer = _size(over), _size(kept)
    fastest = not kept or (bool(over) and over[0].strides[0] < kept[0].strides[0])
    first = over if fastest else kept
    dense = bool(first) and first[0].strides[0] == 1
    if fastest:
        vector = 4 if dense and inner > 128 and len(over) + len(kept) == 1 else 1
    else:
        vector = next((v for v in (4, 2) if dense and kept[0].size % v == 0), 1)
    near, far = (inner // vector, outer) if fastest else (max(1, outer // vector), inner)
    most = THREADS // (1 if fastest else vector)
    wide = min(power(near), most, 32)
    high = min(power(far), most // wide)
    wide = min(power(near), most // high)
    each = inner / (wide if fastest else 1)
    down = each >= high * ROUND or each >= SPLIT_AT
    added = (wide if fastest else 1) * (high if down else 1)
    made = (vector if not fastest else 1) * wide * high // added
    blocks, each = ceil(outer / max(1, made)), inner / added
    room = REFERENCE_SMS * (2048 // max(32, wide * high))
    splits = (
        max(min(room // blocks, ceil(each / ROUND)), ceil(each / SPLIT_AT))
        if each >= SPLIT_AT and blocks <= room
        else 1
    )
    return ReduceLoops(over, kept, fastest, wide, high, added, vector, blocks, max(1, splits))


def _size(loops: list[Loop]) -> int:
    out = 1
    for loop in loops:
        out *= loop.size
    return out
