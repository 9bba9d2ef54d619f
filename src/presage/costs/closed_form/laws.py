"""Closed-form laws of GEMMs and of fused attention.

A GEMM, y[m, n] = x[m, k] w[k, n]: the output is cut into tiles, an SM works on one at a time, so the time is that of
whole waves of the best of some tile shapes; a kernel that keeps its SMs busy between waves hides part of the last one
(`smooth`). Few tiles with a long inner dimension are split along it. Moving the matrices hides behind the arithmetic
(`overlap`, a norm's exponent), all but a part of the stores. Rows that do not start at multiples of 16 bytes keep
tensor cores from full rate.

Fused attention: a thread block takes 128 rows of one head and loops over tiles of 128 on the other side, up to the
diagonal under a causal mask and over the window where there is one. Blocks are spread over the SMs; under a mask the
longest ones leave a tail. Each block costs a start, each byte of queries, keys, values and gradients its time. What is
left is the share of the tensor cores' peak, by the width of a head and by style: flash1, flash2, flash3 (cuDNN's too).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple

Tile = tuple[int, int, float, float]  # rows, columns, seconds by element of the inner dimension, seconds besides
WIDTHS = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
LARGE = 128.0 * 256.0  # elements of a tile that reaches the full rate
STEP = 64  # elements of the inner dimension that are taken at once
SPLITS, SPLIT_AT = 16.0, 256.0


class GemmShape(NamedTuple):
    """One launch of GEMMs of equal sizes, and the layout of their operands."""

    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1  # of a grouped GEMM: one expert each
    lhs_m_major: bool = False  # x has m contiguous, as in a weight gradient
    rhs_k_major: bool = False  # w has k contiguous, as a linear layer keeps its weights

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups * self.batch


@dataclass(frozen=True, slots=True)
class GemmParameters:
    """Fitted parameters of GEMMs of one dtype on one GPU."""

    menu: tuple[tuple[int, int], ...]  # tiles there are
    reach: float  # of the peak, in large tiles
    small: float  # how much smaller tiles lose
    fixed: float  # seconds of a large tile besides its arithmetic
    fill: float  # elements of the inner dimension that a tile's start costs
    smooth: float  # of the last wave's idle SMs, the part that is made use of
    overlap: float
    bandwidth: float  # of the peak
    store: float  # of the stores' time, the part that nothing hides
    split: float  # seconds that splitting costs
    launch: float  # seconds of the shortest kernel
    unaligned: tuple[float, float, float]  # of the rate, where rows start at multiples of 2, 4, 8 bytes
    turned: float = 1.0  # times the arithmetic, where the left matrix lies across: some tensor cores want it turned


class TileTimes(NamedTuple):
    """Inputs of the GEMM law for one dtype on one GPU, in seconds; fitting compiles the law with it."""

    menu: tuple[Tile, ...]
    sms: int
    bandwidth: float  # bytes/s
    fill: float  # these as in GemmParameters
    smooth: float
    overlap: float
    store: float
    split: float
    launch: float


def tile_times(t: GemmParameters, rate: float) -> tuple[Tile, ...]:
    """The menu with its times, where an SM does `rate` FLOPs a second at most."""
    out = []
    for rows, columns in t.menu:
        share = t.reach / (1 + t.small * max(0.0, 1 / rows + 1 / columns - 1 / 128 - 1 / 256))
        out.append((rows, columns, 2.0 * rows * columns / (rate * share), t.fixed * rows * columns / LARGE))
    return tuple(out)


def gemm_seconds(m: int, n: int, k: int, batch: int, slow: float, moved: float, stored: float, t: TileTimes) -> float:
    """Seconds, with the arithmetic `slow` times slower; `moved` are all bytes, `stored` those of the result."""
    inner = (-(-k // STEP) * STEP + t.fill) * slow
    best = 1e30
    for rows, columns, step, fixed in t.menu:
        count = batch * -(-m // rows) * -(-n // columns)
        seconds = inner * step + fixed
        if count > t.sms:
            whole = -(-count // t.sms)
            seconds *= whole - t.smooth * (whole - count / t.sms)
        elif k > SPLIT_AT:
            ways = t.sms / count if t.sms < count * SPLITS else SPLITS
            if ways > k / SPLIT_AT:
                ways = k / SPLIT_AT
            parts = inner * step / ways + fixed + t.split + 4.0 * ways * batch * m * n / t.bandwidth
            if parts < seconds:
                seconds = parts
        if seconds < best:
            best = seconds
    memory = moved / t.bandwidth
    if memory > best:
        memory, best = best, memory
    both: float = best * (1.0 + (memory / best) ** t.overlap) ** (1.0 / t.overlap)
    return t.launch + both + t.store * stored / t.bandwidth


def alignment_factor(s: GemmShape, width: float, shares: tuple[float, float, float]) -> float:
    """How much longer the arithmetic takes on tensor cores for rows that start at odd addresses."""
    odd = (s.m if s.lhs_m_major else s.k) | (s.k if s.rhs_k_major else s.n) | s.n
    at = (odd & -odd) * width
    if at >= 16.0:
        return 1.0
    return 1.0 / shares[2 if at >= 8.0 else 1 if at >= 4.0 else 0]


# ---- fused attention

ROWS = 128  # of a block, and of the tiles it walks over
BACKWARD = 2.5  # times the FLOPs of the forward pass: five products for two
STYLES = ("flash1", "flash2", "flash3")


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

    @property
    def flops(self) -> float:
        """FLOPs of the visible scores: half of all under a causal mask."""
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


def attention_seconds(
    s: AttentionShape, tile: float, nbytes: float, sms: int, bandwidth: float, k: AttentionParameters
) -> float:
    """Seconds, where a tile takes `tile` seconds on an SM."""
    heads, (blocks, tiles, longest) = s.batch * s.heads, tile_counts(s.queries, s.keys, s.causal, s.window)
    waves = heads * blocks / sms
    work = heads * (tiles * tile + blocks * k.block) / sms
    if s.causal:
        tail = k.tail * longest * tile * min(1.0, waves)
        work = min(work + tail, waves * (longest * tile + k.block))  # without a mask it could not be quicker
    elif waves > 1.0:
        work *= 1.0 + (1.0 - k.smooth) * (ceil(waves) / waves - 1.0)
    return k.launch + max(longest * tile + k.block, work) + k.moved * nbytes / bandwidth
