"""Convolutions: forward, data gradient, weight gradient; any layout, groups, dilation, transposed.

A backward op that needs both gradients is the sum of two calls, one for each (`gradients`).

Law: cuDNN runs a convolution as a matrix product in tiles, `sms` of them at a time, so the time is that of whole waves
of the best of a few tile shapes, weight gradients with their long inner loop split; or that of moving the three
tensors, whichever is longer. Half precision and TF32 in planar order add the time of changing the layout there and
back. PyTorch's own depthwise kernels have a law of their own (`native_time`).

Groups that are not depthwise run in one of four ways, by what cuDNN finds: kernels that know groups, channels padded
and joined first, direct kernels, or each group by itself over eight streams (`side_by_side`).

Features: all sizes, how they divide by tiles and powers of two, layout, type of number, waves of some tiles, and what
each shape of tile and each other law would take, as a share of the whole. Sweeps: 6,700 draws with every parameter by
itself, 35,800 as nets have them (1-D to 3-D, grouped, dilated, factorised), 10,000 of groups of all widths, 45,300 of
layers that libraries have, 36,800 of sequences, volumes and generators, 8,900 of first and last layers, three ways
each. Last come the engine that cuDNN takes, its settings and what the law makes of the tile that they name, where it
was asked (`presage.costs.cudnn`): these calls have trees of their own.

Convolutions are uneven: cuDNN takes engines of 3 and of 60 TFLOP/s for neighbouring sizes, and now and then another
than it tells (Fourier transforms, which it does not list without a GPU), so they are fitted twice
(`KernelFamily.uneven`).

A transposed convolution is a plain one run backwards: its forward is the data gradient of the plain one from its large
side to its small side, and its data gradient is the plain one's forward. `role` is what the kernel does after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, log1p, nan, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, ln
from presage.costs.rates import REFERENCE_SMS, Rates

KINDS = {"bfloat16": 0.0, "float16": 1.0, "tf32": 2.0, "float32": 3.0}
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32),
         (32, 64), (32, 32))  # fmt: skip
WAVE_TILES = ((128, 128), (128, 64), (64, 64), (256, 128))
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
STEP = 32  # products a step of the inner loop adds up
STEP_SECONDS, TILE_SECONDS = 8e-8, 7e-7  # the least time of a step, and what starting and ending a tile takes
CACHE_BANDWIDTH = 1e13  # bytes a second from the L2 to all SMs
CONVERTING = 0.62  # of the bandwidth, by kernels that change the layout
LAUNCHED = 3e-6
STREAMS, BESIDE = 8, 0.3  # of groups one by one, and how much of each further stream's work runs beside the first


class ConvGemm(NamedTuple):
    """The matrix product that a convolution is, for each of its groups: [m, inner * taps] x [inner * taps, n]."""

    m: int
    n: int
    taps: int
    inner: int
    outer: int  # n in so many pieces that no tile spans (the taps of a weight gradient)


def product(c: Conv) -> ConvGemm:
    large, small = c.n * prod(c.large), c.n * prod(c.small)
    i, o = c.c // c.groups, c.k // c.groups
    if c.role == 2:
        return ConvGemm(o, i, 1, small, c.taps)
    return ConvGemm(small, o, c.taps, i, 1) if c.role == 0 else ConvGemm(large, i, c.taps, o, 1)


def tile_times(c: Conv, rates: Rates) -> list[float]:
    """Seconds with each shape of tile: whole waves of tiles, each as many steps as its slowest part allows."""
    p = product(c)
    steps = max(1, ceil(p.taps * ceil(p.inner / STEP) / (prod(c.stride) if c.role == 1 else 1)))
    out = []
    for a, b in TILES:
        tiles = ceil(p.m / a) * ceil(p.n / b) * p.outer * c.groups
        out.append(min(_split(c, rates, tiles, steps, step_seconds(c, rates, a, b))))
    return out


def step_seconds(c: Conv, rates: Rates, a: int, b: int) -> float:
    """What a step of the inner loop takes on a tile of a x b: its FLOPs or its loads, and not less than any step."""
    rate = rates.convolved("float32" if c.kind in ("tf32", "float32") else c.kind, c.kind == "tf32") / rates.sms
    return max(2.0 * a * b * STEP / rate, (a + b) * STEP * c.width * rates.sms / CACHE_BANDWIDTH, STEP_SECONDS)


def _split(c: Conv, rates: Rates, tiles: int, steps: int, step: float) -> Iterator[float]:
    """Seconds by number of split-K parts; only weight gradients split, and add the parts in float32."""
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
        *(ln(t / whole) for t in p.tiles), *_waves(c, g), float(g.m % 128), float(g.inner * g.taps % 64),
        ceil(g.m / 128) * 128 / g.m, ceil(g.n / 128) * 128 / g.n, ceil(g.n / 64) * 64 / g.n, ceil(i / 64) * 64 / i,
        ceil(o / 64) * 64 / o, *engine_features(call.facts), *tile_features(c, whole, call.facts),
    ]  # fmt: skip


# Facts of a call: the engine that cuDNN takes, the bytes of its workspace, its settings by their number in cuDNN.
ENGINE, WORKSPACE, OWN = "engine", "workspace", -2.0  # PyTorch's own kernels are none of cuDNN's engines
KNOBS = tuple(f"knob{n}" for n in (2, 12, 13, 14, 15, 17, 18, 23, 25, 27, 28, 22, 5, 0, 6))


def engine_features(facts: Mapping[str, float]) -> list[float]:
    """Whether cuDNN was asked, and what it told."""
    known = facts.get
    told = [known(ENGINE, nan), log1p(known(WORKSPACE, nan)), *(known(k, nan) for k in KNOBS)]
    return [float(ENGINE in facts), *told]


# The tile that an engine's setting 2 stands for, by the names of the kernels timed; of others no name tells it.
TILE, SPLITTING, CLUSTER = "knob2", ("knob0", "knob12", "knob17"), ("knob27", "knob28")
TOLD_TILES = {0: (128, 128), 1: (128, 64), 2: (128, 32), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256),
              7: (64, 128), 8: (64, 32), 9: (64, 256), 12: (32, 32), 16: (256, 32), 18: (64, 192), 19: (128, 192),
              20: (256, 96)}  # fmt: skip
COMMON_TILE = (64, 64)
WIDEST = 8  # tiles in a cluster; what is above is no number of tiles
TILE_FEATURES = 20


def tile_features(c: Conv, whole: float, facts: Mapping[str, float]) -> list[float]:
    """How the product divides by the tile that cuDNN told, either way round, and what that makes of the law: waves and
    how full they are, seconds as a share of the whole, rows and columns that are not padding. Of 64 x 64 where it told
    none that is known."""
    if facts.get(ENGINE, OWN) == OWN:
        return [nan] * TILE_FEATURES
    g, tile = product(c), TOLD_TILES.get(int(facts.get(TILE, -1)), COMMON_TILE)
    m, n = g.m, g.n * g.outer
    split = max(1.0, *(facts.get(k, 1.0) for k in SPLITTING))
    inner = g.taps * g.inner / split
    steps = max(1.0, g.taps * ceil(g.inner / STEP) / (prod(c.stride) if c.role == 1 else 1)) / split
    out = [ln(tile[0] * tile[1]), ln(split), ln(steps), ln(g.n / tile[1])]
    for a, b in (tile, tile[::-1]):
        waves = ceil(m / a) * ceil(n / b) * c.groups * split / SCALE.sms
        seconds = ceil(waves) * (ceil(steps) * step_seconds(c, SCALE, a, b) + TILE_SECONDS)
        out += [ln(waves), ceil(waves) / waves, ln(seconds / whole), _filled(m, a), _filled(n, b)]
    adding = 8.0 * split * c.sides[(1, 0, 2)[c.role]] / c.width
    out += [ln(nbytes / SCALE.bandwidth / whole + 1e-6) for nbytes in (facts.get(WORKSPACE, 0.0), adding)]
    for size, side, setting in zip((m, n), tile, CLUSTER, strict=True):
        tiles = facts.get(setting, 1.0)
        out.append(_filled(size, side * tiles) if tiles <= WIDEST else nan)
    return [*out, _filled(prod(c.large if c.role == 1 else c.small), tile[0]), _filled(inner, 64)]


def _filled(size: float, side: float) -> float:
    """The share of tiles of this side that is not padding."""
    return size / (ceil(size / side) * side)


def _waves(c: Conv, g: ConvGemm) -> list[float]:
    """How many waves some shapes of tile take, and how full the last one leaves them."""
    waves = [ceil(g.m / a) * ceil(g.n / b) * g.outer * c.groups / REFERENCE_SMS for a, b in WAVE_TILES]
    return [*waves, *(ceil(w) / w for w in waves)]


AT_TOLD = 86  # its place among the features


def _shape_features(c: Conv) -> list[float]:
    i, o, large, small = c.c // c.groups, c.k // c.groups, prod(c.large), prod(c.small)
    return [
        KINDS.get(c.kind, 4.0), float(c.role), float(c.channels_last), float(c.transposed), float(c.native),
        float(sum(n > 1 for n in c.large)), ln(c.n), ln(c.c), ln(c.k), ln(i), ln(o), ln(c.groups), float(c.depthwise),
        ln(large), ln(small), float(c.taps), float(prod(c.stride)), float(alignment(i)), float(alignment(o)),
        float(alignment(small, 32)), float(alignment(large, 32)), float(alignment(c.n, 32)), ln(c.k / c.c),
        *map(float, (*c.large, *c.small, *c.kernel, *c.stride, *c.padding, *c.dilation)),
    ]  # fmt: skip


def side_by_side(call: Call, launches: float) -> float:
    """How many kernels run concurrently: where each group has its own launches cuDNN spreads them over eight streams,
    and small ones fill the GPU together. Six ops in traces of two models ran 1.2 to 4.2 at once."""
    c = conv(call)
    if c.groups == 1 or c.depthwise or launches < c.groups:
        return 1.0
    g = product(c)
    room = REFERENCE_SMS / (ceil(g.m / 128) * ceil(g.n / 64) * g.outer)
    return 1.0 + BESIDE * (min(STREAMS, max(1.0, room)) - 1.0)


def gradients(call: Call) -> list[Call]:
    """The parts of a backward op: data gradient and weight gradient, those it computes."""
    mask = call.numbers(10)
    if call.name != BACKWARD or len(mask) < 2:
        return [call]
    ways = [w for w, wanted in (((True, False, False), mask[0]), ((False, True, False), mask[1])) if wanted]
    return [Call(call.name, (*call.inputs[:10], way), call.tf32, call.facts) for way in ways]


# ---- What a convolution is, in one form for all ops that do one: forward, gradients, transposed, depthwise, 1-D to

BACKWARD, FORWARD, TRANSPOSED = (
    "aten::convolution_backward",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
)
DEPTHWISE = ("aten::_conv_depthwise2d", "aten::conv_depthwise3d")
# Where an op has its strides, paddings, dilations.
PLACES = {BACKWARD: (4, 5, 6), FORWARD: (3, 2, 4), TRANSPOSED: (4, 2, 5), **dict.fromkeys(DEPTHWISE, (4, 5, 6))}

Three = tuple[int, int, int]


class Conv(NamedTuple):
    """A plain convolution from `large` to `small` (depth, height, width; 1 for absent dimensions)."""

    role: int  # 0 forward, 1 data gradient, 2 weight gradient
    n: int
    c: int  # channels of the large side
    k: int  # channels of the small side
    large: Three
    small: Three
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    groups: int
    transposed: bool
    kind: str  # type of number: bfloat16, float16, tf32, float32, ...
    width: int  # bytes of a number
    channels_last: bool
    native: bool  # done by PyTorch's own depthwise kernels, not by cuDNN

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.c

    @property
    def flops(self) -> float:
        return 2.0 * self.n * prod(self.small) * self.k * (self.c // self.groups) * self.taps

    @property
    def sides(self) -> tuple[float, float, float]:
        """Bytes of the large side, the small side, the weights."""
        large, small = self.n * self.c * prod(self.large), self.n * self.k * prod(self.small)
        return self.width * large, self.width * small, self.width * self.k * (self.c / self.groups) * self.taps


def conv(call: Call) -> Conv:
    backward = call.name == BACKWARD
    x, w = call.tensors[1:3] if backward else call.tensors[:2]
    transposed = call.name == TRANSPOSED or (backward and bool(call.number(7)))
    groups = max(1, _groups(call, x))
    near, kernel = _three(x.sizes[2:], 1), _three(w.sizes[2:], 1)
    stride, padding, dilation = _settings(call, near, kernel)
    far = _three(call.tensors[0].sizes[2:], 1) if backward else _output(call, near, kernel, transposed)
    i, o = x.sizes[1], (w.sizes[1] * groups if transposed else w.sizes[0])
    mask = call.numbers(10) if backward else ()
    way = 0 if not backward else (1 if mask and mask[0] else 2)
    c, k, large, small = (o, i, far, near) if transposed else (i, o, near, far)
    kind = "tf32" if x.dtype == "float32" and call.tf32 else x.dtype
    last = _channels_last(x) or _channels_last(w)
    plain = not last and not transposed and 1 < groups == i and kind != "float16"
    native = call.name in DEPTHWISE or (backward and plain)
    role = 1 - way if transposed and way < 2 else way
    return Conv(role, x.sizes[0], c, k, large, small, kernel, stride, padding, dilation, groups, transposed, kind,
                x.width, last, native)  # fmt: skip


def _groups(call: Call, x: Shape) -> int:
    if call.name in DEPTHWISE:
        return x.sizes[1]
    return int(call.number({BACKWARD: 9, TRANSPOSED: 6}.get(call.name, 5), 1))


def _three(sizes: tuple[float, ...], fill: int) -> Three:
    d, h, w = ((fill,) * 3 + tuple(int(s) for s in sizes))[-3:]
    return d, h, w


def _settings(call: Call, near: Three, kernel: Three) -> tuple[Three, Three, Three]:
    """Strides, paddings, dilations. A 1-D convolution may come as a 2-D one of height 1: that height has none."""
    out = []
    for place, least in zip(PLACES.get(call.name, PLACES[FORWARD]), (1, 0, 1), strict=True):
        numbers = call.numbers(place) or (least,)
        spread = _three(numbers * 3 if len(numbers) == 1 else numbers, least)
        flat = [n == 1 and k == 1 for n, k in zip(near, kernel, strict=True)]
        out.append(_three(tuple(least if f else max(least, s) for f, s in zip(flat, spread, strict=True)), least))
    return out[0], out[1], out[2]


def _output(call: Call, near: Three, kernel: Three, transposed: bool) -> Three:
    settings = tuple(zip(*_settings(call, near, kernel), strict=True))
    if not transposed:
        sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, (s, p, d) in zip(near, kernel, settings, strict=True)]
    else:
        numbers = call.numbers(3) or (0,)
        extra = _three(numbers * 3 if len(numbers) == 1 else numbers, 0)
        pairs = zip(near, kernel, settings, extra, strict=True)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e * (n > 1 or k > 1) for n, k, (s, p, d), e in pairs]
    return _three(tuple(max(1, n) for n in sizes), 1)


def _channels_last(t: Shape) -> bool:
    """Whether cuDNN gets it in channels-last order. PyTorch makes 1-D inputs contiguous first, however they lie."""
    return len(t.strides) > 3 and t.sizes[1] > 1 and t.strides[1] == 1 and not t.is_contiguous


OPS = frozenset((FORWARD, TRANSPOSED, BACKWARD, *DEPTHWISE))
FAMILY = KernelFamily("conv", OPS, law, features, rounds=1200, leaves=255, rate=0.12, least=4, uneven=True,
                      computes=True, parts=gradients, at_once=side_by_side, told=AT_TOLD)  # fmt: skip
