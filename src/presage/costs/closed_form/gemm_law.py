"""Law of GEMMs, y[m, n] = x[m, k] w[k, n].

The output is cut into tiles, an SM works on one at a time, so the time is that of whole waves of the best of some tile
shapes; a kernel that keeps its SMs busy between waves hides part of the last one (`smooth`). Few tiles with a long
inner dimension are split along it. Moving the matrices hides behind the arithmetic (`overlap`, a norm's exponent),
all but a part of the stores. Rows that do not start at multiples of 16 bytes keep tensor cores from full rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Tile = tuple[int, int, float, float]  # rows, columns, seconds by element of the inner dimension, seconds besides
WIDTHS = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
LARGE = 128.0 * 256.0  # elements of a tile that reaches the full rate
STEP = 64  # elements of the inner dimension that are taken at once
SPLITS, SPLIT_AT = 16.0, 256.0


class GemmShape(NamedTuple):
    """One launch of GEMMs of the same sizes, and how their operands lie in memory."""

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
    """GEMMs of one type of number on one GPU, as fitted."""

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
    """What the law needs of one type of number on one GPU; times in seconds. Fitting compiles the law with it."""

    menu: tuple[Tile, ...]
    sms: int
    bandwidth: float  # bytes/s
    fill: float  # these as in GemmParameters
    smooth: float
    overlap: float
    store: float
    split: float
    launch: float


def tiles(t: GemmParameters, rate: float) -> tuple[Tile, ...]:
    """The menu with its times, where an SM does `rate` FLOPs a second at most."""
    out = []
    for rows, columns in t.menu:
        share = t.reach / (1 + t.small * max(0.0, 1 / rows + 1 / columns - 1 / 128 - 1 / 256))
        out.append((rows, columns, 2.0 * rows * columns / (rate * share), t.fixed * rows * columns / LARGE))
    return tuple(out)


def law(m: int, n: int, k: int, batch: int, slow: float, moved: float, stored: float, t: TileTimes) -> float:
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
