"""Scaled dot-product attention: cuDNN, flash and memory-efficient kernels, both ways.

Law: a thread block takes a block of queries (backward: of keys) of one head and loops over the tiles of the other side,
up to the diagonal under a causal mask. Blocks run in waves over the SMs. The time is a sum of few parts, each with a
weight of its own for every kind of kernel: starting, waves, the tiles of the fullest SM and those of the longest block
(by padded head width, and more with dropout or a bias), and the bytes of queries and keys, which small kernels before
and after the backward one move again.

Sweep: 700 draws. Held out: geomean 3.5%, p90 18% (cuDNN 2% and 10%, memory-efficient 6.5% and 25%, flash 6% and 20%);
largest shapes 3.2%.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

import msgspec

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, fitted_numbers, ln
from presage.costs.rates import REFERENCE_SMS, Rates

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


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel's tiling, and the fitted weights of the parts of its time (data/kernel_laws.toml)."""

    block_rows: int  # rows of queries (backward: of keys) of a thread block
    tile_rows: int  # rows of the tiles it loops over
    blocks_per_sm: int
    widths: tuple[int, ...]  # that heads are padded to
    weights: tuple[float, ...]


class AttentionCall(NamedTuple):
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


def attention(call: Call) -> AttentionCall:
    backward = call.name.endswith("backward")
    q, k, v = call.tensors[1:4] if backward else call.tensors[:3]
    swapped = "cudnn" not in call.name  # flash and efficient kernels have [batch, sequence, heads, width]
    b, h, s, d = q.sizes if not swapped else (q.sizes[0], q.sizes[2], q.sizes[1], q.sizes[3])
    t = k.sizes[1] if swapped else k.sizes[2]
    dropout, causal, bias = PLACES[call.name]
    rows = q.strides[1 if swapped else 2] if len(q.strides) == 4 else d
    return AttentionCall(
        b, h, s, t, d, v.sizes[-1], call.number(causal) > 0, call.number(dropout) > 0,
        bias is not None and call.shape(bias) is not None, backward, rows != d,
    )  # fmt: skip


@cache
def _kernels() -> dict[str, AttentionKernel]:
    return msgspec.convert(fitted_numbers("attention"), dict[str, AttentionKernel])


def kernel(call: Call) -> AttentionKernel:
    wide = call.tensors[0].dtype == "float32" and "efficient" in call.name
    return _kernels()[call.name + (" fp32" if wide else "")]


@lru_cache(maxsize=4096)
def tiles(own: int, other: int, own_rows: int, other_rows: int, causal: bool) -> tuple[int, int, int]:
    """Per head: thread blocks, tiles of all blocks, tiles of the longest block."""
    blocks, across = max(1, ceil(own_rows / own)), max(1, ceil(other_rows / other))
    if not causal:
        return blocks, blocks * across, across
    walks = [min(across, ceil((i + 1) * own / other)) for i in range(blocks)]
    return blocks, sum(walks), max(walks)


def parts(call: Call, rates: Rates, kind: AttentionKernel) -> list[float]:
    """The parts of the time in seconds, before their weights."""
    a, q = attention(call), call.tensors[0]
    own, other = (a.t, a.s) if a.backward else (a.s, a.t)
    blocks, total, longest = tiles(kind.block_rows, kind.tile_rows, own, other, a.causal)
    heads, slots = a.b * a.h, rates.sms * kind.blocks_per_sm
    waves = ceil(heads * blocks / slots)
    width = next((w for w in kind.widths if w >= max(a.d, a.dv)), max(a.d, a.dv)) / 64
    one = (
        4.0 * kind.block_rows * kind.tile_rows * 64 * rates.sms / rates.rate(q.dtype)
    )  # seconds of one tile of width 64
    full = max(longest, heads * total / slots) if a.causal else waves * longest
    even = max(longest, heads * total / slots)
    side = q.width * heads * (a.d + a.dv) / rates.bandwidth
    return [
        rates.floor, waves * rates.floor, one * full, one * full * width, one * even * width, one * longest,
        one * longest * width, one * full * a.dropout, one * full * a.bias, side * a.s, side * a.t,
        rates.floor * waves * width, one * blocks * ceil(heads / rates.sms),
    ]  # fmt: skip


def law(call: Call, rates: Rates) -> Law:
    a, kind, q = attention(call), kernel(call), call.tensors[0]
    seconds = sum(w * part for w, part in zip(kind.weights, parts(call, rates, kind), strict=True))
    flops = 2.0 * a.b * a.h * a.s * a.t * (a.d + a.dv) * (2.5 if a.backward else 1.0)
    moved = q.width * a.b * a.h * (a.s + a.t) * (a.d + a.dv) * (2 if a.backward else 1)
    return Law(seconds, flops, moved)


def features(call: Call, law: Law) -> list[float]:
    a, q = attention(call), call.tensors[0]
    kind = kernel(call)
    own, other = (a.t, a.s) if a.backward else (a.s, a.t)
    blocks, total, longest = tiles(kind.block_rows, kind.tile_rows, own, other, a.causal)
    waves = a.b * a.h * blocks / (REFERENCE_SMS * kind.blocks_per_sm)
    return [
        float(OPS.index(call.name)), KINDS.get(q.dtype, 3.0), float(a.d), float(a.causal), float(a.dropout),
        float(a.bias), float(a.interleaved), float(alignment(a.s, 128)), float(alignment(a.t, 128)), ln(waves),
        waves / ceil(waves), ln(a.b * a.h), ln(longest),
        ln(longest / max(longest, a.b * a.h * total / REFERENCE_SMS / kind.blocks_per_sm)), ln(law.seconds),
        ln(law.flops / law.seconds), ln(law.bytes / law.seconds),
        own / kind.block_rows / ceil(own / kind.block_rows), other / kind.tile_rows / ceil(other / kind.tile_rows),
        ln(min(a.s, 512)), ln(min(a.t, 512)), ln(a.s / a.t),
    ]  # fmt: skip


FAMILY = KernelFamily("attention", frozenset(OPS), law, features, rounds=800, leaves=15, computes=True)
