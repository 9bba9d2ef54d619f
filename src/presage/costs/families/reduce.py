"""Reductions over some dimensions.

PyTorch's kernel (ATen/native/cuda/Reduce.cuh) gives each result to a thread, a row of threads, a block or several
blocks, and runs through what it keeps in the order of its result. Law: that launch (`work`). Seconds are a fixed part
and the root of the sum of squares of four that overlap (`parts`): memory, caches, instructions and latency. A warp that
reads apart touches a sector of 32 bytes for every number, and where more than the L2 holds is read before the next
number of a sector is, memory delivers 64 bytes for each (`fetched`). Weights are fitted by path and width
(data/kernel_laws.toml), without the sweep `large` and the draws that are held out.

Features: how much is kept and how much reduced, which of both is the fastest in memory, how the kernel's blocks share
the work, and each part's share of the law.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2, prod, sqrt
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, fitted_numbers, ln, plain_features
from presage.costs.families.loops import Loop, ReduceLoops, padded_strides, reduce_loops
from presage.costs.rates import REFERENCE, REFERENCE_SMS, Rates

CODES = codes(
    "sum mean amax argmax linalg_vector_norm var any max prod all min amin argmin std norm logsumexp var_mean"
)
ALIKE = {"aten::amin": "aten::amax", "aten::argmin": "aten::argmax", "aten::min": "aten::max", "aten::all": "aten::any",
         "aten::std": "aten::var", "aten::norm": "aten::linalg_vector_norm",
         "aten::logsumexp": "aten::sum"}  # fmt: skip
OPS = frozenset(CODES)
PLACE = {"aten::linalg_vector_norm": 2, "aten::norm": 2}  # of the dimensions among the inputs, where it is not 1
WARP, RESIDENT, UNROLLED = 32, 2048, 4  # threads of a warp, of an SM at most; reads that a thread has under way
SECTOR, BURST, LINE = 32, 64, 128  # bytes that a cache, memory and a warp's read deliver at once
CACHED, NEAR = 4e7, 5e4  # bytes that stay in the L2, and near a block
LARGEST = 2**31 - 1  # bytes between places of a launch; larger tensors are cut in halves


def reduced(call: Call) -> tuple[int, ...]:
    """The dimensions reduced over: all, where none are named."""
    x = call.tensors[0]
    named = call.numbers(PLACE.get(call.name, 1))
    dims = tuple(int(d) % len(x.sizes) for d in named) if x.sizes else ()
    return dims or tuple(range(len(x.sizes)))


def segments(call: Call) -> list[tuple[bool, int]]:
    """The input's dimensions in memory order, fastest first: (is reduced, size) of each stretch."""
    x, dims = call.tensors[0], reduced(call)
    order = sorted((s, i, n) for i, (n, s) in enumerate(zip(x.sizes, x.strides, strict=False)) if n > 1)
    out: list[tuple[bool, int]] = []
    for _, i, n in order:
        if out and out[-1][0] == (i in dims):
            out[-1] = (out[-1][0], out[-1][1] * n)
        else:
            out.append((i in dims, n))
    return out


class ReduceWork(NamedTuple):
    """What a launch of the kernel does, and how many there are."""

    launches: int
    shared: ReduceLoops
    width: int  # bytes of a number
    nbytes: float  # of a launch's input
    kept: int
    inner: int
    missed: float  # bytes from memory, and
    passed: float  # from the L2, besides those of the input
    lines: float  # that a warp touches in a read

    @property
    def path(self) -> str:
        """Whether neighbours are reduced or kept, and read several at once."""
        return ("over" if self.shared.fastest else "kept") + (" wide" if self.shared.vector > 1 else "")

    @property
    def blocks(self) -> int:
        return max(1, self.shared.blocks * self.shared.splits)

    @property
    def threads(self) -> int:
        return self.shared.wide * self.shared.high

    @property
    def reads(self) -> float:
        """Reads of a thread, one after the other."""
        vector = self.shared.vector if self.shared.fastest else 1
        return max(1.0, self.inner / (self.shared.added * self.shared.splits * vector))

    @property
    def used(self) -> float:
        """The share of threads that have something to read."""
        room = self.blocks * self.threads * self.reads * self.shared.vector
        return max(min(1.0, self.inner * self.kept / room), min(1.0, WARP / self.threads))

    def waves(self, sms: int) -> float:
        """How often the blocks that run at once would cover it."""
        return max(1.0, self.blocks / (sms * _at_once(self.threads)))


def _at_once(threads: int) -> int:
    """Blocks of so many threads on an SM."""
    return min(32, RESIDENT // max(WARP, threads))


Pieces = list[tuple[float, float]]  # sizes and strides of what is run through, the first the fastest


def cut(loops: list[Loop], places: float) -> tuple[Pieces, Pieces]:
    """The first so many places of the loops, and the rest."""
    first, rest, left = [], [], max(1.0, places)
    for n, (stride, *_) in loops:
        n = max(1, n)
        part = min(n, left)
        first.append((part, float(stride)))
        rest.append((n / part, stride * part))
        left = max(1.0, left / n)
    return first, rest


def units(pieces: Pieces, width: int, unit: int) -> float:
    """Sectors, or lines, that all places of the pieces lie in."""
    run, apart = float(width), 1.0
    for n, stride in sorted(pieces, key=lambda piece: piece[1]):
        if stride * width <= max(run, unit - 1):
            run += (n - 1) * stride * width
        else:
            apart *= n
    return apart * max(1.0, run / unit)


def fetched(pieces: Pieces, width: int, unit: int, cache: float) -> float:
    """Bytes read to run through the pieces in their order: units that lie in several places of a piece are read again
    for each where what was read between them is more than the cache holds."""
    read = before = 1.0
    for i in range(len(pieces)):
        now, again = units(pieces[: i + 1], width, unit), read * pieces[i][0]
        full = (before * unit / cache) ** 4
        lost = full / (1 + full)
        read = read * now / before * (1 - lost) + again * lost
        before = now
    return read * unit


@lru_cache(4096)
def work(x: Shape, dims: tuple[int, ...]) -> ReduceWork:
    launches, part = _halved(x)
    r = reduce_loops(part, dims)
    inner, kept = (max(1, prod(loop.size for loop in loops)) for loops in (r.over, r.kept))
    threads, nbytes = r.wide * r.high, max(1.0, x.distinct / launches)
    resident = r.blocks * r.splits <= REFERENCE_SMS * _at_once(threads)
    in_step = UNROLLED * r.added * r.splits if resident else inner / r.splits
    over, later = cut(r.over, in_step)
    missed = fetched([*over, *cut(r.kept, kept)[0], *later], x.width, BURST, CACHED)
    made = threads // r.added * (1 if r.fastest else r.vector)
    (over, later), (near, far) = cut(r.over, UNROLLED * r.added), cut(r.kept, made)
    passed = fetched([*over, *near, *later, *far], x.width, SECTOR, NEAR)
    lanes = min(WARP, r.wide), WARP // min(WARP, r.wide)
    down = r.added > (r.wide if r.fastest else 1)  # whether a block's rows add up to one result
    along = (lanes[0] if r.fastest else 1) * (lanes[1] if down else 1)
    vectors = (r.vector, 1) if r.fastest else (1, r.vector)
    touched = [*cut(r.over, along * vectors[0])[0], *cut(r.kept, WARP / along * vectors[1])[0]]
    return ReduceWork(launches, r, x.width, nbytes, kept, inner, max(0.0, missed - nbytes), max(0.0, passed - nbytes),
                      units(touched, x.width, LINE))  # fmt: skip


def _halved(x: Shape) -> tuple[int, Shape]:
    """Launches, and what each reduces: a launch counts bytes in 32 bits."""
    sizes, strides, launches = list(x.sizes), padded_strides(x, len(x.sizes)), 1
    while sum((n - 1) * abs(s) for n, s in zip(sizes, strides, strict=True)) * x.width >= LARGEST:
        widest = max(range(len(sizes)), key=lambda i: (sizes[i] - 1) * abs(strides[i]))
        sizes[widest], launches = ceil(sizes[widest] / 2), 2 * launches
    return launches, Shape(tuple(sizes), strides, x.dtype)


def parts(w: ReduceWork, rates: Rates) -> tuple[list[float], ...]:
    """Seconds before their weights. Fixed: the launch, clearing the counters of blocks that share a result, and adding
    up what they leave. Memory: bytes, those that the L2 does not hold, those read again, results. Caches: bytes, lines.
    Instructions: reads, loops of their places, warps, loops of the results' places, steps of adding up. Latency: loops
    of a result's place, reads under way together, loops of theirs, steps of adding up, for each wave."""
    r, each, us = w.shared, 1e-9 * REFERENCE_SMS, 1e-6
    full = (w.nbytes / CACHED) ** 3
    uneven = ceil(w.blocks / rates.sms) / w.blocks
    warps = w.blocks * ceil(w.threads / WARP) * uneven * each / REFERENCE_SMS
    reads, steps, waves = warps * w.used * w.reads, log2(max(1, r.added)), w.waves(rates.sms) * us
    loops = len(r.over) if len(r.over) > 1 else 0
    chain = waves * ceil(w.reads / UNROLLED)
    last = r.splits / (w.threads if r.fastest else r.high) if r.splits > 1 else 0.0
    moved = (w.nbytes, w.nbytes * full / (1 + full), w.missed * (1 + w.lines / WARP) / 2, w.kept * w.width)
    return (
        [rates.floor, us * (r.splits > 1), us * last],
        [n / rates.bandwidth for n in moved],
        [w.passed / rates.bandwidth, reads * w.lines],
        [reads, reads * loops, warps, warps * len(r.kept), warps * steps],
        [waves * len(r.kept), chain, chain * loops, waves * steps],
    )


def weighted(w: ReduceWork, rates: Rates) -> list[list[float]]:
    """The parts with the weights of the kernel's path."""
    weights = iter(fitted_numbers("reduce")["weights"][f"{w.path} {2 if w.width == 2 else 4}"])
    return [[next(weights) * part for part in group] for group in parts(w, rates)]


def law(call: Call, rates: Rates) -> Law:
    x = call.tensors[0]
    w = work(x, reduced(call))
    fixed, *others = (sum(group) for group in weighted(w, rates))
    seconds = w.launches * (fixed + sqrt(sum(s * s for s in others)))
    moved = float(x.distinct + w.launches * w.kept * x.width)
    return Law(max(0.5 * rates.floor, seconds), 0.0, moved, float(w.launches * (1 + (w.shared.splits > 1))))


def features(call: Call, law: Law) -> list[float]:
    pieces, w = segments(call), work(call.tensors[0], reduced(call))
    r, groups = w.shared, [sum(group) for group in weighted(w, REFERENCE)]
    kept, over = (prod(n for which, n in pieces if which is wanted) for wanted in (False, True))
    first, second, third, fourth = (*(n for _, n in pieces), 1, 1, 1, 1)[:4]
    blocks = kept / REFERENCE_SMS
    return [
        *plain_features(call, law, CODES.get(ALIKE.get(call.name, call.name), -1.0), 1), ln(kept), ln(over),
        float(bool(pieces) and pieces[0][0]), ln(first), ln(second), ln(third), ln(fourth), float(len(pieces)),
        float(first % 32), blocks / ceil(blocks), float(alignment(first, 16)), float(len(r.over)), float(len(r.kept)),
        float(r.fastest), ln(r.wide), ln(r.high), ln(r.added), float(r.vector), ln(r.blocks), ln(r.splits),
        float(min(r.stride, 64)), ln(over / r.added / r.splits), ln(r.blocks * r.splits),
        ln((r.over[0] if r.over else r.kept[0]).size if r.over or r.kept else 1), ln(law.seconds * kept),
        ln(w.waves(REFERENCE_SMS)), ln(w.reads), w.lines, ln(w.missed / w.nbytes + 1), ln(w.passed / w.nbytes + 1),
        *(ln(group / sum(groups) + 1e-6) for group in groups),
    ]  # fmt: skip


FAMILY = KernelFamily("reduce", OPS, law, features, rounds=1000, leaves=47)
