"""Convolutions: forward, data gradient, weight gradient; any layout, groups, dilation, transposed.

A backward op that needs both gradients is the sum of two calls, one for each. Law: the FLOPs of the implicit product at
the rate of its type (depthwise: of plain arithmetic), or the bytes of the three tensors, whichever is longer.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import Family, Law, alignment, ln
from presage.costs.rates import Rates

__all__ = ["BACKWARD", "FAMILY", "gradients"]

FORWARD, TRANSPOSED = ("aten::cudnn_convolution", "aten::_conv_depthwise2d", "aten::conv_depthwise3d"), (
    "aten::cudnn_convolution_transpose",
)
BACKWARD = "aten::convolution_backward"
KINDS = {"bfloat16": 0.0, "float16": 1.0, "tf32": 2.0, "float32": 3.0}


class Conv(NamedTuple):
    what: int  # 0 forward, 1 data gradient, 2 weight gradient
    n: int
    i: int
    o: int
    spatial: tuple[int, ...]  # of the larger side
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: float
    padding: float
    dilation: float
    groups: int
    transposed: bool
    kind: str
    width: int
    channels_last: bool
    native: bool


def conv(call: Call) -> Conv:
    backward = call.name == BACKWARD
    x, w = (call.tensors[1], call.tensors[2]) if backward else (call.tensors[0], call.tensors[1])
    transposed, groups, (stride, padding, dilation) = _settings(call)
    spatial, kernel = x.sizes[2:], w.sizes[2:]
    if backward:
        out = call.tensors[0].sizes[2:]
    else:
        out = _output(spatial, kernel, stride, padding, dilation, transposed)
    i, o = x.sizes[1], (w.sizes[1] * groups if transposed else w.sizes[0])
    mask = call.numbers(10) if backward else ()
    what = 0 if not backward else (1 if mask and mask[0] else 2)
    kind = "tf32" if x.dtype == "float32" and call.tf32 else x.dtype
    return Conv(what, x.sizes[0], i, o, spatial, out, kernel, stride, padding, dilation, groups, transposed, kind, x.width,
                _channels_last(x), "depthwise" in call.name)  # fmt: skip


def _settings(call: Call) -> tuple[bool, int, tuple[float, float, float]]:
    """Transposed or not, groups, and the first of strides, paddings and dilations, wherever the op has them."""
    first = lambda place: (call.numbers(place) or (0.0,))[0]  # noqa: E731
    if call.name == BACKWARD:
        return bool(call.number(7)), int(call.number(9, 1)), (first(4), first(5), first(6))
    if call.name == "aten::_conv_depthwise2d" or call.name == "aten::conv_depthwise3d":
        return False, call.tensors[0].sizes[1], (first(4), first(5), first(6))
    if call.name in TRANSPOSED:
        return True, int(call.number(6, 1)), (first(4), first(2), first(5))
    return False, int(call.number(5, 1)), (first(3), first(2), first(4))


def _output(
    spatial: tuple[int, ...], kernel: tuple[int, ...], stride: float, padding: float, dilation: float, transposed: bool
) -> tuple[int, ...]:
    pairs = list(zip(spatial, kernel, strict=False))
    if transposed:
        return tuple(int((s - 1) * stride - 2 * padding + dilation * (k - 1) + 1) for s, k in pairs)
    return tuple(int((s + 2 * padding * (k > 1 or s > 1) - dilation * (k - 1) - 1) // max(stride, 1) + 1) for s, k in pairs)


def _channels_last(x: Shape) -> bool:
    return len(x.strides) > 2 and x.strides[1] == 1 and x.sizes[1] > 1


def law(call: Call, rates: Rates) -> Law:
    c = conv(call)
    points = prod(c.spatial if c.transposed else c.out)
    flops = 2.0 * c.n * points * c.o * (c.i // c.groups) * prod(c.kernel)
    moved = c.width * (c.n * (c.i * prod(c.spatial) + c.o * prod(c.out)) + c.o * c.i // c.groups * prod(c.kernel))
    rate = rates.rate("float32" if c.groups == c.i and c.i > 1 else call.tensors[0].dtype, c.kind == "tf32") * 0.7
    return Law(2 * rates.floor + max(flops / rate, moved / rates.bandwidth), flops, moved)


def features(call: Call, law: Law) -> list[float]:
    c = conv(call)
    points, size = prod(c.out), prod(c.spatial)
    m, n, k = (
        (c.n * points, c.o // c.groups, c.i // c.groups * prod(c.kernel)),
        (c.n * size, c.i // c.groups, c.o // c.groups * prod(c.kernel)),
        (c.o // c.groups, c.i // c.groups * prod(c.kernel), c.n * points),
    )[c.what]
    waves = ceil(m / 128) * ceil(n / 128) * c.groups / 132
    return [
        KINDS.get(c.kind, 4.0), float(c.what), float(c.channels_last), float(c.transposed), float(c.native),
        float(len(c.kernel)), ln(c.n), ln(c.i), ln(c.o), ln(size), ln(points), float(c.kernel[-1]), float(c.kernel[0]),
        c.stride, c.padding, c.dilation, ln(c.groups), ln(c.i / c.groups), ln(c.o / c.groups),
        float(alignment(c.i // c.groups, 32)), float(alignment(c.o // c.groups, 32)), float(alignment(c.n, 32)),
        float(c.spatial[-1]), float(c.out[-1]), float(alignment(c.out[-1], 8)), ln(m), ln(n), ln(k), ln(waves),
        waves / ceil(waves), ln(law.flops), ln(law.bytes), ln(law.flops / max(law.bytes, 1)), ln(law.seconds),
        float(c.groups == c.i), ln(c.o / c.i),
    ]  # fmt: skip


def gradients(call: Call) -> list[Call]:
    """A backward op as its parts: the data gradient and the weight gradient, where it needs them."""
    mask = call.numbers(10)
    if call.name != BACKWARD or len(mask) < 2:
        return [call]
    ways = [w for w, wanted in (((True, False, False), mask[0]), ((False, True, False), mask[1])) if wanted]
    return [Call(call.name, (*call.inputs[:10], way), call.tf32, call.facts) for way in ways]


FAMILY = Family("conv", frozenset((*FORWARD, *TRANSPOSED, BACKWARD)), law, features, rounds=1200, leaves=47)
