"""Law of fused attention, forward and backward.

A thread block takes 128 rows of one head and walks over tiles of 128 on the other side, up to the diagonal under a
causal mask and over the window where there is one. Blocks are spread over the SMs; under a mask the longest ones
leave a tail. Each block costs a start, each byte of queries, keys, values and gradients its time. What is left is the
share of the tensor cores' peak, by the width of a head and by style: flash1, flash2, flash3 (cuDNN's kernels too).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple

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
        """FLOPs of the scores that queries see: half of them under a causal mask."""
        seen = self.keys * (0.5 if self.causal else 1.0)
        seen = min(seen, self.window) if self.window else seen
        return (
            2.0 * self.batch * self.heads * self.queries * seen * (self.dim + self.value_dim)
            * (BACKWARD if self.backward else 1.0)
        )  # fmt: skip


class Walk(NamedTuple):
    """Thread blocks of one head, tiles of all of them, tiles of the longest."""

    blocks: int
    tiles: float
    longest: float


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """One style in one direction on one GPU, as fitted."""

    widths: tuple[float, ...]  # of heads, in order
    reach: tuple[float, ...]  # of the peak, at these widths
    block: float  # seconds that a block costs besides its tiles
    tail: float  # of the longest walk that is left over under a mask
    smooth: float  # of the last wave's idle SMs, the part that is made use of without a mask
    moved: float  # of the bytes' time, the part that nothing hides
    launch: float  # seconds


def share(kernel: AttentionParameters, width: float) -> float:
    """Of the peak, for heads of a width between those known."""
    w, r = kernel.widths, kernel.reach
    if width <= w[0]:
        return r[0] * width / w[0]  # narrower heads are padded
    if width >= w[-1]:
        return r[-1]
    i = bisect_left(w, width)
    part = log(width / w[i - 1]) / log(w[i] / w[i - 1])
    return r[i - 1] + part * (r[i] - r[i - 1])


def walks(queries: int, keys: int, causal: bool, window: int) -> Walk:
    """How the blocks of one head walk over tiles."""
    blocks, across = ceil(queries / ROWS), ceil(keys / ROWS)
    longest = min(across, ceil(window / ROWS) + 2) if window else across  # the window's edges cut tiles at both ends
    if not causal:
        both = min(across, 2 * longest - 1) if window else across
        return Walk(blocks, float(blocks * both), float(both))
    full = min(blocks, across - longest)  # blocks that see as much as any; each one before them sees a tile less
    rest = blocks - full
    last = max(1, longest - rest + 1)
    return Walk(blocks, full * longest + rest * (longest + last) / 2, float(longest))


def law(s: AttentionShape, tile: float, nbytes: float, sms: int, bandwidth: float, k: AttentionParameters) -> float:
    """Seconds, where a tile takes `tile` seconds on an SM."""
    heads, (blocks, tiles, longest) = s.batch * s.heads, walks(s.queries, s.keys, s.causal, s.window)
    waves = heads * blocks / sms
    work = heads * (tiles * tile + blocks * k.block) / sms
    if s.causal:
        tail = k.tail * longest * tile * min(1.0, waves)
        work = min(work + tail, waves * (longest * tile + k.block))  # without a mask it could not be quicker
    elif waves > 1.0:
        work *= 1.0 + (1.0 - k.smooth) * (ceil(waves) / waves - 1.0)
    return k.launch + max(longest * tile + k.block, work) + k.moved * nbytes / bandwidth
