"""Matrix products, y[m, n] = x[m, k] w[k, n].

The output is cut into tiles, an SM works on one at a time, so the time is that of whole waves of the best of some tile
shapes; a kernel that keeps its SMs busy between waves hides part of the last one (`smooth`). Few tiles with a long
inner dimension are split along it. Moving the matrices hides behind the arithmetic (`overlap`, a norm's exponent),
all but a part of the stores. Rows that do not start at multiples of 16 bytes keep tensor cores from full rate.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WIDTHS", "Tile", "Tiling", "aligned", "law", "tiles"]

Tile = tuple[int, int, float, float]  # rows, columns, seconds by element of the inner dimension, seconds besides
WIDTHS = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
LARGE = 128.0 * 256.0  # elements of a tile that reaches the full rate
STEP = 64  # elements of the inner dimension that are taken at once
SPLITS, SPLIT_AT = 16.0, 256.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """Products of one type of number on one GPU, as fitted."""

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


def tiles(t: Tiling, rate: float) -> tuple[Tile, ...]:
    """The menu with its times, where an SM does `rate` FLOPs a second at most."""
    out = []
    for rows, columns in t.menu:
        share = t.reach / (1 + t.small * max(0.0, 1 / rows + 1 / columns - 1 / 128 - 1 / 256))
        out.append((rows, columns, 2.0 * rows * columns / (rate * share), t.fixed * rows * columns / LARGE))
    return tuple(out)


def law(
    m: int, n: int, k: int, batch: int, slow: float, moved: float, stored: float, menu: tuple[Tile, ...], sms: int,
    bandwidth: float, fill: float, smooth: float, overlap: float, store: float, split: float, launch: float,
) -> float:  # fmt: skip
    """Seconds. Numbers only, so that fitting can compile it; `slow` times the arithmetic, `moved` bytes in all."""
    inner = (-(-k // STEP) * STEP + fill) * slow
    best = 1e30
    for rows, columns, step, fixed in menu:
        count = batch * -(-m // rows) * -(-n // columns)
        took = inner * step + fixed
        if count > sms:
            whole = -(-count // sms)
            took *= whole - smooth * (whole - count / sms)
        elif k > SPLIT_AT:
            ways = sms / count if sms < count * SPLITS else SPLITS
            if ways > k / SPLIT_AT:
                ways = k / SPLIT_AT
            parts = inner * step / ways + fixed + split + 4.0 * ways * batch * m * n / bandwidth
            if parts < took:
                took = parts
        if took < best:
            best = took
    memory = moved / bandwidth
    if memory > best:
        memory, best = best, memory
    seconds: float = best * (1.0 + (memory / best) ** overlap) ** (1.0 / overlap)
    return launch + seconds + store * stored / bandwidth


def aligned(m: int, n: int, k: int, left: bool, right: bool, width: float, shares: tuple[float, float, float]) -> float:
    """How much longer the arithmetic takes on tensor cores for rows that start at odd places."""
    odd = (m if left else k) | (k if right else n) | n
    at = (odd & -odd) * width
    if at >= 16.0:
        return 1.0
    return 1.0 / shares[2 if at >= 8.0 else 1 if at >= 4.0 else 0]
