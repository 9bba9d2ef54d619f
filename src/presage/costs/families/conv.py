"""Convolutions: forward, data gradient, weight gradient; any layout, groups, dilation, transposed.

A backward op that needs both gradients is the sum of two calls, one for each (`gradients`).

Law: cuDNN runs a convolution as a matrix product in tiles, `sms` of them at a time, so the time is that of whole waves
of the best of a few tile shapes, weight gradients with their long inner loop split; or that of moving the three
tensors, whichever is longer. Half precision and TF32 in planar order add the time of changing the layout there and
back. PyTorch's own depthwise kernels have a law of their own (`native_time`).

Features: sizes, how they divide by tiles and powers of two, layout, type of number, and what each shape of tile and
each other law would take, as a share of the whole. Sweep: 2,800 draws of 1-D to 3-D, 1-512 images, 3-2048 channels,
kernels 1-32, three ways each.

Error on held-out draws (H200): 14% (geometric mean), nine of ten under 62%; forward 12%, data gradient 14%, weight
gradient 17%; PyTorch's depthwise kernels 6%, groups that are not depthwise 35%; beyond the fitted sizes 16%. Much of
what is left is cuDNN's choice among dozens of kernels, which the law does not know: told the kernel, trees do 11%.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, alignment, ln
from presage.costs.families.conv_shape import BACKWARD, DEPTHWISE, FORWARD, TRANSPOSED, Conv, conv
from presage.costs.rates import REFERENCE_SMS, Rates

__all__ = ["BACKWARD", "FAMILY", "gradients", "law"]

KINDS = {"bfloat16": 0.0, "float16": 1.0, "tf32": 2.0, "float32": 3.0}
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32),
         (32, 64), (32, 32))  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
STEP = 32  # products a step of the inner loop adds up
STEP_SECONDS, TILE_SECONDS = 8e-8, 7e-7  # the least time of a step, and what starting and ending a tile takes
CACHE_BANDWIDTH = 1e13  # bytes a second from the L2 to all SMs
CONVERTING = 0.62  # of the bandwidth, by kernels that change the layout
LAUNCHED = 3e-6


class Product(NamedTuple):
    """The matrix product that a convolution is, for each of its groups: [m, inner * taps] x [inner * taps, n]."""

    m: int
    n: int
    taps: int
    inner: int
    outer: int  # n in so many pieces that no tile spans (the taps of a weight gradient)


def product(c: Conv) -> Product:
    large, small = c.n * prod(c.large), c.n * prod(c.small)
    i, o = c.c // c.groups, c.k // c.groups
    if c.role == 2:
        return Product(o, i, 1, small, c.taps)
    return Product(small, o, c.taps, i, 1) if c.role == 0 else Product(large, i, c.taps, o, 1)


def tile_times(c: Conv, rates: Rates) -> list[float]:
    """Seconds with each shape of tile: whole waves of tiles, each as many steps as its slowest part allows."""
    p = product(c)
    rate = rates.convolved("float32" if c.kind in ("tf32", "float32") else c.kind, c.kind == "tf32") / rates.sms
    steps = max(1, ceil(p.taps * ceil(p.inner / STEP) / (prod(c.stride) if c.role == 1 else 1)))
    out = []
    for a, b in TILES:
        tiles = ceil(p.m / a) * ceil(p.n / b) * p.outer * c.groups
        loads = (a + b) * STEP * c.width * rates.sms / CACHE_BANDWIDTH
        step = max(2.0 * a * b * STEP / rate, loads, STEP_SECONDS)
        out.append(min(_split(c, rates, tiles, steps, step)))
    return out


def _split(c: Conv, rates: Rates, tiles: int, steps: int, step: float) -> Iterator[float]:
    """Seconds with the inner loop in so many parts; only weight gradients split it, and add the parts up in float32."""
    for parts in SPLITS if c.role == 2 else (1,):
        if parts == 1 or parts <= steps:
            adding = 0.0 if parts == 1 else 8.0 * parts * c.sides[2] / c.width / rates.bandwidth
            yield ceil(tiles * parts / rates.sms) * (ceil(steps / parts) * step + TILE_SECONDS) + adding


def native_time(c: Conv) -> float:
    """PyTorch's depthwise kernels: a thread a number, or for weights a block a weight with a warp for each image."""
    if c.role < 2:
        places = c.n * c.k * prod(c.small) if c.role == 0 else c.n * c.c * prod(c.large)
        return places * (8e-12 + 0.55e-12 * c.taps)
    rows, weights = ceil(prod(c.small) / 32), c.k * c.taps
    serial = ceil(c.n / 8) * rows * ceil(weights / (REFERENCE_SMS * 8)) * 1.3e-7
    return max(weights * c.n * (rows * 5e-11 + 3e-11), serial)


def converted(c: Conv) -> tuple[int, float]:
    """How many tensors cuDNN must bring into channels-last order or back, and their bytes: all where they are not so,
    but not weights of a single tap, nor anything for plain float32."""
    if c.channels_last or c.native or c.kind not in ("bfloat16", "float16", "tf32"):
        return 0, 0.0
    large, small, weights = c.sides
    needed = [s for s, places in ((large, prod(c.large)), (small, prod(c.small)), (weights, c.taps)) if places > 1]
    return len(needed), sum(needed)


def one_by_one(c: Conv, rates: Rates) -> float:
    """Groups after each other, each with its own launches: what cuDNN does with all but depthwise ones."""
    one = c._replace(c=c.c // c.groups, k=c.k // c.groups, groups=1)
    return c.groups * (min(tile_times(one, rates)) + LAUNCHED)


class Parts(NamedTuple):
    tiles: list[float]
    native: float
    moving: float
    converting: float
    main: float


def parts(c: Conv, rates: Rates) -> Parts:
    tiles, native, moving = tile_times(c, rates), native_time(c), sum(c.sides) / rates.bandwidth
    number, size = converted(c)
    converting = number * 1.2e-6 + 2 * size / (rates.bandwidth * CONVERTING)
    if c.native:
        main = max(native, moving)
    elif c.depthwise:
        main = max(c.flops / rates.convolved("float32") * 8, moving)
    else:
        main = max(min(tiles), moving)
    return Parts(tiles, native, moving, converting, main)


def law(call: Call, rates: Rates) -> Law:
    c = conv(call)
    p = parts(c, rates)
    return Law(LAUNCHED + p.converting + p.main, c.flops, sum(c.sides))


# Features need no GPU's own rates, only a fixed scale: round numbers of an H200.
SCALE = Rates(4.2e12, {"bf16": 7.9e14, "fp16": 7.9e14, "tf32": 4e14, "fp32": 5.3e13, "fp64": 2.7e13}, REFERENCE_SMS)


def features(call: Call, law: Law) -> list[float]:
    c = conv(call)
    p, g = parts(c, SCALE), product(c)
    whole = LAUNCHED + p.converting + p.main
    large, small, weights = c.sides
    i, o = c.c // c.groups, c.k // c.groups
    return [
        *_shape_features(c), ln(g.m), ln(g.n), ln(g.inner * g.taps), ln(g.m * g.n * g.outer * c.groups), ln(c.flops),
        ln(large), ln(small), ln(weights), ln(large / small), ln(c.flops / (large + small + weights)), ln(whole),
        ln(p.main / whole), ln(p.moving / whole), ln(p.converting / whole + 1e-6), ln(p.native / whole),
        ln(one_by_one(c, SCALE) / whole), ln(c.flops / SCALE.rate("float32") / whole), ln(law.seconds / whole),
        *(ln(t / whole) for t in p.tiles),
        ceil(g.m / 128) * 128 / g.m, ceil(g.n / 128) * 128 / g.n, ceil(g.n / 64) * 64 / g.n, ceil(i / 64) * 64 / i,
        ceil(o / 64) * 64 / o,
    ]  # fmt: skip


def _shape_features(c: Conv) -> list[float]:
    i, o, large, small = c.c // c.groups, c.k // c.groups, prod(c.large), prod(c.small)
    return [
        KINDS.get(c.kind, 4.0), float(c.role), float(c.channels_last), float(c.transposed), float(c.native),
        float(sum(n > 1 for n in c.large)), ln(c.n), ln(c.c), ln(c.k), ln(i), ln(o), ln(c.groups), float(c.depthwise),
        ln(large), ln(small), float(c.large[-1]), float(c.small[-1]), float(c.kernel[-1]), float(c.taps),
        float(c.stride[-1]), float(prod(c.stride)), float(c.padding[-1]), float(c.dilation[-1]), float(alignment(i)),
        float(alignment(o)), float(alignment(small, 32)), float(alignment(large, 32)), float(alignment(c.n, 32)),
        ln(c.k / c.c),
    ]  # fmt: skip


def gradients(call: Call) -> list[Call]:
    """A backward op as its parts: the data gradient and the weight gradient, where it needs them."""
    mask = call.numbers(10)
    if call.name != BACKWARD or len(mask) < 2:
        return [call]
    ways = [w for w, wanted in (((True, False, False), mask[0]), ((False, True, False), mask[1])) if wanted]
    return [Call(call.name, (*call.inputs[:10], way), call.tf32, call.facts) for way in ways]


OPS = frozenset((FORWARD, TRANSPOSED, BACKWARD, *DEPTHWISE))
FAMILY = Family("conv", OPS, law, features, rounds=1500, leaves=47, computes=True, parts=gradients)
