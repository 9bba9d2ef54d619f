"""Scaled dot-product attention: cuDNN, flash and memory-efficient kernels, both ways.

Law: a thread block takes a block of queries (backward: of keys) of one head and loops over the tiles of the other side,
up to the diagonal under a causal mask. Blocks run in waves over the SMs. The time is a sum of few parts, each with a
weight of its own for every kind of kernel: starting, waves, the tiles of the fullest SM and those of the longest block
(by padded head width, and more with dropout or a bias), and the bytes of queries and keys, which small kernels before
and after the backward one move again.

Closed form (`attention_seconds`), for thousands of plans a second: blocks of 128 rows loop over tiles of 128, up to the
diagonal under a causal mask and over the window where there is one; under a mask the longest blocks leave a tail. Its
parameters are fitted by GPU, style (flash1, flash2, flash3 and cuDNN's) and direction (data/chips).

Sweep: 3,000 draws.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, log
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, fitted_numbers, ln
from presage.costs.rates import REFERENCE_SMS, Rates
from presage.files.decoding import convert_record

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
    return convert_record(fitted_numbers("attention"), dict[str, AttentionKernel])


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


# ---- closed form

ROWS = 128  # of a block, and of the tiles it walks over
BACKWARD = 2.5  # times the FLOPs of the forward pass: five products for two
STYLES = ("flash1", "flash2", "flash3")
# What the edges of a window cost each block, in tiles, of FlashAttention-3's and cuDNN's kernels: windows of 128 tokens
# on H200 (aiconfigurator's tables, heads of 64 and 128); H100 and B200 are left out.
EDGE = {"flash3": 0.8}
LOCAL, LOCAL_POWER = 0.55, 2.2  # see window_slowdown


class AttentionShape(NamedTuple):
    """One launch of fused attention. Under a causal mask the queries are the last of the keys."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    causal: bool = True
    window: int = 0  # keys a query sees at most; 0: all
    backward: bool = False
    documents: tuple[int, ...] = ()  # lengths of what each row is packed of: a query sees its own alone; empty: one

    @property
    def windowed(self) -> bool:
        """Whether the window hides any key."""
        return 0 < self.window < self.keys

    @property
    def flops(self) -> float:
        """FLOPs of the visible scores: half of all under a causal mask."""
        if self.documents:
            each = self._replace(documents=())
            return sum(each._replace(queries=n, keys=n).flops for n in self.documents)
        seen = self.keys * (0.5 if self.causal else 1.0)
        seen = min(seen, self.window) if self.window else seen
        return (
            2.0 * self.batch * self.heads * self.queries * seen * (self.dim + self.value_dim)
            * (BACKWARD if self.backward else 1.0)
        )  # fmt: skip


class TileCounts(NamedTuple):
    """Per head: thread blocks, tiles of all blocks, tiles of the longest block."""

    blocks: int
    tiles: float
    longest: float


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Fitted parameters of one attention style and direction on one GPU."""

    widths: tuple[float, ...]  # of heads, in order
    reach: tuple[float, ...]  # of the peak, at these widths
    block: float  # seconds that a block costs besides its tiles
    tail: float  # of the longest walk that is left over under a mask
    smooth: float  # of the last wave's idle SMs, the part that is made use of without a mask
    moved: float  # of the bytes' time, the part that nothing hides
    launch: float  # seconds


def peak_share(kernel: AttentionParameters, width: float) -> float:
    """The share of the peak for heads of some width, between those fitted."""
    w, r = kernel.widths, kernel.reach
    if width <= w[0]:
        return r[0] * width / w[0]  # narrower heads are padded
    if width >= w[-1]:
        return r[-1]
    i = bisect_left(w, width)
    part = log(width / w[i - 1]) / log(w[i] / w[i - 1])
    return r[i - 1] + part * (r[i] - r[i - 1])


def tile_counts(queries: int, keys: int, causal: bool, window: int) -> TileCounts:
    """Tiles that the thread blocks of one head loop over."""
    blocks, across = ceil(queries / ROWS), ceil(keys / ROWS)
    longest = min(across, ceil(window / ROWS) + 2) if window else across  # the window's edges cut tiles at both ends
    if not causal:
        both = min(across, 2 * longest - 1) if window else across
        return TileCounts(blocks, float(blocks * both), float(both))
    full = min(blocks, across - longest)  # blocks that see as much as any; each one before them sees a tile less
    rest = blocks - full
    last = max(1, longest - rest + 1)
    return TileCounts(blocks, full * longest + rest * (longest + last) / 2, float(longest))


@lru_cache(4096)
def shape_tiles(queries: int, keys: int, causal: bool, window: int, documents: tuple[int, ...]) -> TileCounts:
    """Tiles of one row: those of its documents, each by itself, in one launch."""
    if not documents:
        return tile_counts(queries, keys, causal, window)
    each = [tile_counts(n, n, causal, window if window < n else 0) for n in documents]
    return TileCounts(sum(t.blocks for t in each), sum(t.tiles for t in each), max(t.longest for t in each))


def window_slowdown(style: str, s: AttentionShape) -> float:
    """Times as long as a tile takes under a window. FlashAttention-2's forward kernel masks every tile then, which
    costs narrow heads most (H200, 42 windows of 64 to 4,096 tokens)."""
    if not s.windowed or style != "flash2" or s.backward:
        return 1.0
    return 1.0 + LOCAL * float((64.0 / max(s.dim, 32)) ** LOCAL_POWER)


def attention_seconds(
    s: AttentionShape, tile: float, nbytes: float, sms: int, bandwidth: float, k: AttentionParameters, edge: float = 0.0
) -> float:
    """Seconds, where a tile takes `tile` seconds on an SM; `edge`: tiles that the edges of a window cost a block."""
    heads, counted = s.batch * s.heads, shape_tiles(s.queries, s.keys, s.causal, s.window, s.documents)
    blocks, tiles, longest = counted
    if edge and s.windowed:  # tiles that the window's edges cut are masked, and few tiles fill no pipeline
        tiles, longest = tiles + edge * blocks, longest + edge
    waves = heads * blocks / sms
    work = heads * (tiles * tile + blocks * k.block) / sms
    if s.causal:
        tail = k.tail * longest * tile * min(1.0, waves)
        work = min(work + tail, waves * (longest * tile + k.block))  # without a mask it could not be quicker
    elif waves > 1.0:
        work *= 1.0 + (1.0 - k.smooth) * (ceil(waves) / waves - 1.0)
    return k.launch + max(longest * tile + k.block, work) + k.moved * nbytes / bandwidth
