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

from presage.costs.call import Call
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
PICO, MICRO = 1e-12, 1e-6
BLOCKS, THREADS = REFERENCE_SMS * 8, REFERENCE_SMS * 1024  # at once
CACHED = 4e7  # bytes that stay in the L2


class PoolCall(NamedTuple):
    """Planes of `near` places (the forward's input) and `far` ones (its output)."""

    name: str  # of the 2-D op
    backward: bool
    planes: int
    near: int
    far: int
    row: int  # length of the near side's rows
    window: int  # near places a far one looks at
    overlap: int  # far places that look at a near one
    width: int
    channels: int
    channels_last: bool
    indices: bool

    @property
    def work(self) -> tuple[int, int]:
        """Elements computed, and places read for each."""
        if self.backward:
            return self.planes * self.near, self.overlap
        return self.planes * self.far, self.window

    @property
    def moved(self) -> float:
        return float(self.planes * (self.width * (self.near + self.far) + 8 * self.indices * self.far))


def pool(call: Call) -> PoolCall:
    name, backward = ALIKE.get(call.name, call.name), call.name.endswith("backward")
    first = call.tensors[0]
    lead = 2 if len(first.sizes) > 3 else 1
    far = first.sizes[lead:]
    if not backward:
        near = far
        far = _far(call, near)
    else:
        near = call.tensors[1].sizes[lead:]
    window, overlap = _window(call, near, far, backward)
    last = len(first.strides) > 2 and first.sizes[1] > 1 and first.strides[1] == 1 and not first.is_contiguous
    planes, channels = prod(first.sizes[:lead]), first.sizes[lead - 1]
    return PoolCall(name, backward, planes, prod(near), prod(far), near[-1], window, overlap, first.width, channels,
                last, "max" in name)  # fmt: skip


def _far(call: Call, near: tuple[int, ...]) -> tuple[int, ...]:
    """The output's sizes: given, or by window, stride and padding."""
    if "adaptive" in call.name:
        return tuple(int(n) for n in call.numbers(1))
    size, stride, padding = (_spread(call.numbers(p), len(near)) for p in (1, 2, 3))
    steps = zip(near, size, stride or size, padding or (0,) * len(near), strict=True)
    return tuple(max(1, int((n + 2 * p - k) // max(1, s) + 1)) for n, k, s, p in steps)


def _spread(numbers: tuple[float, ...], dims: int) -> tuple[float, ...]:
    return numbers * dims if len(numbers) == 1 else numbers[:dims]


def _window(call: Call, near: tuple[int, ...], far: tuple[int, ...], backward: bool) -> tuple[int, int]:
    """Input places per output element, and output elements per input place."""
    place = 2 if backward else 1
    if "adaptive" in call.name:
        pairs = list(zip(near, far, strict=False))
        return prod(ceil(n / max(1, f)) for n, f in pairs), prod(ceil(f / max(1, n)) for n, f in pairs)
    size, stride = _spread(call.numbers(place), len(near)), _spread(call.numbers(place + 1), len(near))
    per = prod(ceil(k / max(1, s)) for k, s in zip(size, stride or size, strict=False))
    return int(prod(size)), per


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


def features(call: Call, law: Law) -> list[float]:
    p = pool(call)
    numbers, places = p.work
    return [
        OPS[p.name], float(p.width), float(p.channels_last), ln(p.planes), ln(p.near), ln(p.far), ln(p.row),
        float(p.window), float(p.overlap), ln(p.far / p.near), ln(numbers), ln(numbers * places), ln(law.seconds),
        ln(p.moved), ln(p.channels), float(alignment(p.channels, 32)), float(alignment(p.near, 16)),
        ln(p.planes / p.channels), ln(places), float("3d" in call.name), *(ln(t / law.seconds) for t in terms(p)),
    ]  # fmt: skip


FAMILY = KernelFamily("pool", frozenset((*OPS, *ALIKE)), law, features, rounds=600, leaves=63, rate=0.08, bound=0.3)
