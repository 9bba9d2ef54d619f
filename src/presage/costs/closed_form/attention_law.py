"""Fused attention, forward and backward.

A thread block takes 128 rows of one head and walks over tiles of 128 on the other side, up to the diagonal under a
causal mask and over the window where there is one. Blocks are spread over the SMs; under a mask the longest ones
leave a tail. Each block costs a start, each byte of queries, keys, values and gradients its time. What is left is the
share of the tensor cores' peak, by the width of a head and by style: flash1, flash2, flash3 (cuDNN's kernels too).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log

__all__ = ["BACKWARD", "STYLES", "Kernel", "law", "share", "walks"]

ROWS = 128  # of a block, and of the tiles it walks over
BACKWARD = 2.5  # times the FLOPs of the forward pass: five products for two
STYLES = ("flash1", "flash2", "flash3")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One style in one direction on one GPU, as fitted."""

    widths: tuple[float, ...]  # of heads, in order
    reach: tuple[float, ...]  # of the peak, at these widths
    block: float  # seconds that a block costs besides its tiles
    tail: float  # of the longest walk that is left over under a mask
    smooth: float  # of the last wave's idle SMs, the part that is made use of without a mask
    moved: float  # of the bytes' time, the part that nothing hides
    launch: float  # seconds


def share(kernel: Kernel, width: float) -> float:
    """Of the peak, for heads of a width between those known."""
    w, r = kernel.widths, kernel.reach
    if width <= w[0]:
        return r[0] * width / w[0]  # narrower heads are padded
    if width >= w[-1]:
        return r[-1]
    i = bisect_left(w, width)
    part = log(width / w[i - 1]) / log(w[i] / w[i - 1])
    return r[i - 1] + part * (r[i] - r[i - 1])


def walks(queries: int, keys: int, causal: bool, window: int) -> tuple[int, float, float]:
    """Of one head: blocks, tiles of all of them, tiles of the longest."""
    blocks, across = ceil(queries / ROWS), ceil(keys / ROWS)
    longest = min(across, ceil(window / ROWS) + 2) if window else across  # the window's edges cut tiles at both ends
    if not causal:
        both = min(across, 2 * longest - 1) if window else across
        return blocks, float(blocks * both), float(both)
    full = min(blocks, across - longest)  # blocks that see as much as any; each one before them sees a tile less
    rest = blocks - full
    last = max(1, longest - rest + 1)
    return blocks, full * longest + rest * (longest + last) / 2, float(longest)


def law(
    heads: int, blocks: int, tiles: float, longest: float, causal: bool, tile: float, nbytes: float, sms: int,
    bandwidth: float, k: Kernel,
) -> float:  # fmt: skip
    """Seconds, where a tile takes `tile` on an SM."""
    waves = heads * blocks / sms
    work = heads * (tiles * tile + blocks * k.block) / sms
    if causal:
        tail = k.tail * longest * tile * min(1.0, waves)
        work = min(work + tail, waves * (longest * tile + k.block))  # without a mask it could not be quicker
    elif waves > 1.0:
        work *= 1.0 + (1.0 - k.smooth) * (ceil(waves) / waves - 1.0)
    return k.launch + max(longest * tile + k.block, work) + k.moved * nbytes / bandwidth
