"""Pooling, forward and backward, 2-D and 3-D.

These are PyTorch's own kernels, each with a law of its own: a launch, and so many picoseconds for every byte, number
and window (`terms`; their coefficients, by op and layout, are in data/kernel_laws.toml). Most are far from bandwidth:
adaptive pooling has a thread for each window. A 3-D pool counts as the 2-D one over as many places.

Features: op, layout, sizes of both sides, window, and each term's share.

Sweep: 550 draws of 1-512 images, 4-2048 channels, 4-256 places a side, windows of 2 and 3, and 2,200 of 1-D to 3-D
pools with windows of 2 to 5, and 2,270 of adaptive and 3-D pools. Held out: geomean 8.6%, p90 45%; 3-D and adaptive
pools are the worst.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, fitted_numbers, ln
from presage.costs.rates import REFERENCE_SMS, Rates

POOLS = ("max_pool2d_with_indices", "avg_pool2d", "adaptive_max_pool2d", "_adaptive_avg_pool2d")
OPS = codes([op + way for op in POOLS for way in ("", "_backward")])
ALIKE = {
    "aten::max_pool3d_with_indices": "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices_backward": "aten::max_pool2d_with_indices_backward",
    "aten::_adaptive_avg_pool3d": "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool3d_backward": "aten::_adaptive_avg_pool2d_backward",
    "aten::avg_pool3d": "aten::avg_pool2d", "aten::avg_pool3d_backward": "aten::avg_pool2d_backward",
    "aten::adaptive_max_pool3d": "aten::adaptive_max_pool2d",
    "aten::adaptive_max_pool3d_backward": "aten::adaptive_max_pool2d_backward",
}  # fmt: skip
Sides = tuple[int, int, int]
PICO, MICRO = 1e-12, 1e-6
BLOCKS, THREADS = REFERENCE_SMS * 8, REFERENCE_SMS * 1024  # at once
CACHED = 4e7  # bytes that stay in the L2


class PoolCall(NamedTuple):
    """Planes of `near` places (the forward's input) and `far` ones (its output), by depth, height and width."""

    name: str  # of the 2-D op
    backward: bool
    deep: bool  # a 3-D op
    planes: int
    channels: int
    near_sides: Sides
    far_sides: Sides
    windows: Sides  # near places a far one looks at
    overlaps: Sides  # far places that look at a near one
    width: int
    channels_last: bool
    layouts: int  # of the tensors given: bits, channels last
    stride: int

    @property
    def near(self) -> int:
        return prod(self.near_sides)

    @property
    def far(self) -> int:
        return prod(self.far_sides)

    @property
    def window(self) -> int:
        return prod(self.windows)

    @property
    def overlap(self) -> int:
        return prod(self.overlaps)

    @property
    def divides(self) -> bool:
        """Whether adaptive windows are all of one size."""
        return all(n % f == 0 for n, f in zip(self.near_sides, self.far_sides, strict=True))

    @property
    def gathers(self) -> bool:
        """Whether a backward has a thread for each near place, which reads; else one for each far one, which adds."""
        if not self.deep:
            return "adaptive" not in self.name or (self.channels_last and "avg" in self.name)
        return "max" not in self.name and (self.divides if "adaptive" in self.name else self.overlap == 1)

    @property
    def work(self) -> tuple[int, int]:
        """Elements computed, and places read for each."""
        if self.backward:
            return self.planes * self.near, self.overlap
        return self.planes * self.far, self.window

    @property
    def moved(self) -> float:
        indices = 8 * ("max" in self.name)
        return float(self.planes * (self.width * (self.near + self.far) + indices * self.far))


def pool(call: Call) -> PoolCall:
    name, backward, deep = ALIKE.get(call.name, call.name), call.name.endswith("backward"), "3d" in call.name
    dims, first = 3 if deep else 2, call.tensors[0]
    near = (call.tensors[1] if backward else first).sizes[-dims:]
    far = first.sizes[-dims:] if backward else _far(call, near)
    windows, overlaps, stride = _window(call, near, far, backward)
    layouts = [_is_last(t) for t in call.tensors[: 1 + backward]]
    lead = first.sizes[:-dims]
    given = sum(1 << i for i, last in enumerate(layouts) if last)
    return PoolCall(name, backward, deep, prod(lead), lead[-1] if lead else 1, _three(near), _three(far),
                    _three(windows), _three(overlaps), first.width, layouts[0], given, stride)  # fmt: skip


def _three(sides: tuple[int, ...]) -> Sides:
    depth, height, width = (1, 1, 1, *sides)[-3:]
    return depth, height, width


def _is_last(t: Shape) -> bool:
    return len(t.strides) > 2 and t.sizes[1] > 1 and t.strides[1] == 1 and not t.is_contiguous


def _far(call: Call, near: tuple[int, ...]) -> tuple[int, ...]:
    """The output's sizes: given, or by window, stride and padding."""
    if "adaptive" in call.name:
        return tuple(int(n) for n in call.numbers(1))
    size, stride, padding = (_spread(call.numbers(p), len(near)) for p in (1, 2, 3))
    steps = zip(near, size, stride or size, padding or (0,) * len(near), strict=True)
    return tuple(max(1, int((n + 2 * p - k) // max(1, s) + 1)) for n, k, s, p in steps)


def _spread(numbers: tuple[float, ...], dims: int) -> tuple[float, ...]:
    return numbers * dims if len(numbers) == 1 else numbers[:dims]


def _window(
    call: Call, near: tuple[int, ...], far: tuple[int, ...], backward: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Input places per output element, output elements per input place, by dimension; the last stride."""
    place = 2 if backward else 1
    if "adaptive" in call.name:
        pairs = list(zip(near, far, strict=True))
        ways = tuple(ceil(n / max(1, f)) for n, f in pairs), tuple(ceil(f / max(1, n)) for n, f in pairs)
        return *ways, ways[0][-1]
    size, stride = (tuple(int(n) for n in _spread(call.numbers(p), len(near))) for p in (place, place + 1))
    stride = stride or size
    return size, tuple(ceil(k / max(1, s)) for k, s in zip(size, stride, strict=True)), stride[-1]


def terms(p: PoolCall) -> tuple[float, ...]:
    """Terms of a kernel's time, in seconds: a launch, bytes at 4 TB/s, a picosecond for each element computed, each
    place read for it and each output element; serial windows; serial planes."""
    numbers, places = p.work
    windows = ceil(p.planes / BLOCKS) * p.window * 1e-8
    planes = p.planes * max(1.0, p.far / THREADS) * (1e-7 if p.moved < CACHED else 1.9e-7)
    far = p.planes * p.far
    return (MICRO, p.moved / 4e12, numbers * PICO, numbers * places * PICO, far * PICO, windows, planes)


def kernel_time(p: PoolCall) -> float:
    """Seconds: the terms by their fitted coefficients."""
    fitted = fitted_numbers("pool")
    coefficients = fitted["terms"][p.name]["channels_last" if p.channels_last else "planar"]
    half = fitted["atomic_half"].get(p.name, 1.0) if p.width == 2 and not p.channels_last else 1.0
    return float(half * sum(c * t for c, t in zip(coefficients, terms(p), strict=True)))


def law(call: Call, rates: Rates) -> Law:
    p = pool(call)
    return Law(max(rates.floor, kernel_time(p)), 0.0, p.moved)


class Tiles(NamedTuple):
    """How a kernel of blocks of 32 x 8 threads covers a side."""

    blocks: int
    busy: float  # share of the threads that have a place
    steps: int  # places one after the other in a thread, times what it reads for each


def tiles(p: PoolCall) -> Tiles:
    """Adaptive pools stride over a plane with one block or a few; 3-D ones without adapting have a block a tile."""
    side = p.near_sides if p.backward and p.gathers else p.far_sides
    reads = p.overlap if p.backward and p.gathers else p.window if "max" not in p.name or not p.backward else 1
    high, wide = ceil(side[1] / 8), ceil(side[2] / 32)
    busy, planes = side[1] * side[2] / (high * 8 * wide * 32), p.planes * side[0]
    if "adaptive" not in p.name:
        return Tiles(planes * high * wide, busy, reads)
    rows = min(high, max(1, 16 // (planes if p.deep else p.channels)))
    return Tiles(planes * rows, busy, ceil(high / rows) * wide * reads)


def features(call: Call, law: Law) -> list[float]:
    p = pool(call)
    numbers, places = p.work
    t = tiles(p)
    waves = t.blocks / BLOCKS
    return [
        OPS[p.name], float(p.width), float(p.channels_last), ln(p.planes), ln(p.near), ln(p.far), ln(p.near_sides[2]),
        float(p.window), float(p.overlap), ln(p.far / p.near), ln(numbers), ln(numbers * places), ln(law.seconds),
        ln(p.moved), ln(p.channels), float(alignment(p.channels, 32)), float(alignment(p.near, 16)),
        ln(p.planes / p.channels), ln(places), float(p.deep), *(ln(t / law.seconds) for t in terms(p)),
        *(float(n) for n in (*p.near_sides, *p.far_sides, *p.windows)), float(p.overlaps[2]), float(p.stride),
        float(p.layouts), float(p.divides), float(p.gathers), ln(t.blocks), t.busy, ln(t.steps), waves / ceil(waves),
        ln(ceil(waves)), ln(ceil(waves) * t.steps * 1e-8 / law.seconds), ln(t.blocks * t.steps * 1e-11 / law.seconds),
        ceil(p.near / 256) * 256 / p.near, ln(p.planes * ceil(p.near / 256)),
        *(float(alignment(side[2], 16)) for side in (p.near_sides, p.far_sides)),
    ]  # fmt: skip


FAMILY = KernelFamily("pool", frozenset((*OPS, *ALIKE)), law, features, rounds=600, leaves=63, rate=0.08, bound=0.3)
