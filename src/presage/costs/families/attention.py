"""Scaled dot-product attention: cuDNN, flash and memory-efficient kernels, both ways.

Law: 4 b h s t d FLOPs forward (half of them where a causal mask lets kernels skip), 2.5 times as many backward.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, alignment, ln
from presage.costs.rates import Rates

__all__ = ["FAMILY"]

OPS = tuple(
    f"aten::_{kind}_attention_{way}" for kind in ("cudnn", "flash", "efficient") for way in ("forward", "backward")
)
KINDS = {"bfloat16": 0.0, "float16": 1.0, "float32": 2.0}
# Where dropout, the causal flag and the bias stand among the inputs.
PLACES = {
    "aten::_cudnn_attention_forward": (9, 10, 3),
    "aten::_cudnn_attention_backward": (13, 14, 8),
    "aten::_flash_attention_forward": (7, 8, None),
    "aten::_flash_attention_backward": (10, 11, None),
    "aten::_efficient_attention_forward": (8, 9, 3),
    "aten::_efficient_attention_backward": (11, 14, 4),
}


class Attention(NamedTuple):
    b: int
    h: int
    s: int
    t: int
    d: int
    dv: int
    causal: bool
    dropout: bool
    bias: bool
    backward: bool
    interleaved: bool


def attention(call: Call) -> Attention:
    backward = call.name.endswith("backward")
    q, k, v = call.tensors[1:4] if backward else call.tensors[:3]
    swapped = "cudnn" not in call.name  # flash and efficient kernels have [batch, sequence, heads, width]
    b, h, s, d = q.sizes if not swapped else (q.sizes[0], q.sizes[2], q.sizes[1], q.sizes[3])
    t = k.sizes[1] if swapped else k.sizes[2]
    dropout, causal, bias = PLACES[call.name]
    rows = q.strides[1 if swapped else 2] if len(q.strides) == 4 else d
    return Attention(
        b, h, s, t, d, v.sizes[-1], call.number(causal) > 0, call.number(dropout) > 0,
        bias is not None and call.shape(bias) is not None, backward, rows != d,
    )  # fmt: skip


def law(call: Call, rates: Rates) -> Law:
    a, q = attention(call), call.tensors[0]
    flops = 2.0 * a.b * a.h * a.s * a.t * (a.d + a.dv) * (2.5 if a.backward else 1.0)
    moved = q.width * a.b * a.h * (a.s + a.t) * (a.d + a.dv) * (2 if a.backward else 1)
    rate = rates.rate(q.dtype, tf32=True) * (0.3 if q.dtype == "float32" else 0.6)
    return Law(3 * rates.floor + max(flops * (0.6 if a.causal else 1) / rate, moved / rates.bandwidth), flops, moved)


def features(call: Call, law: Law) -> list[float]:
    a, q = attention(call), call.tensors[0]
    blocks = a.b * a.h * ceil(a.s / 128) / 132
    return [
        float(OPS.index(call.name)), KINDS.get(q.dtype, 3.0), ln(a.b), ln(a.h), ln(a.b * a.h), ln(a.s), ln(a.t),
        float(a.d), float(a.dv), float(a.causal), float(a.dropout), float(a.bias), float(a.interleaved),
        float(alignment(a.s, 128)), float(alignment(a.t, 128)), ln(blocks), blocks / ceil(blocks),
        a.b * a.h / 132 / ceil(a.b * a.h / 132), ln(law.flops), ln(law.bytes), ln(law.seconds), ln(a.s / a.t),
    ]  # fmt: skip


FAMILY = Family("attention", frozenset(OPS), law, features, rounds=800, leaves=31)
