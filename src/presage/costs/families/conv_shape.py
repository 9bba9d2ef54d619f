"""What a convolution is, in one form for all ops that do one: forward, gradients, transposed, depthwise, 1-D to 3-D.

A transposed convolution is a plain one run backwards: its forward is the data gradient of the plain one from its large
side to its small side, and its data gradient is the plain one's forward. `role` is what the kernel does after that.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from presage.costs.call import Call, Shape

__all__ = ["BACKWARD", "DEPTHWISE", "FORWARD", "TRANSPOSED", "Conv", "conv"]

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
    """A plain convolution from `large` to `small` (depth, height, width; 1 where there is none)."""

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
        found = call.numbers(place) or (least,)
        spread = _three(found * 3 if len(found) == 1 else found, least)
        flat = [n == 1 and k == 1 for n, k in zip(near, kernel, strict=True)]
        out.append(_three(tuple(least if f else max(least, s) for f, s in zip(flat, spread, strict=True)), least))
    return out[0], out[1], out[2]


def _output(call: Call, near: Three, kernel: Three, transposed: bool) -> Three:
    settings = tuple(zip(*_settings(call, near, kernel), strict=True))
    if not transposed:
        sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, (s, p, d) in zip(near, kernel, settings, strict=True)]
    else:
        found = call.numbers(3) or (0,)
        extra = _three(found * 3 if len(found) == 1 else found, 0)
        pairs = zip(near, kernel, settings, extra, strict=True)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e * (n > 1 or k > 1) for n, k, (s, p, d), e in pairs]
    return _three(tuple(max(1, n) for n in sizes), 1)


def _channels_last(t: Shape) -> bool:
    return len(t.strides) > 2 and t.sizes[1] > 1 and t.strides[1] == 1 and not t.is_contiguous
