"""Grouped matrix products: `torch._grouped_mm`, one product for each expert in a launch.

Law: the tiles of all groups in whole waves, each group's rows rounded up to a tile (half a tile each on
average), or the bytes of weights and tokens. A weight gradient's groups share out the inner dimension instead. How
uneven groups are is not in the shapes: it is in the scatter of the measurements (groups from even to log-normal with a
standard deviation of 1).

Sweep: 1,200 draws in bfloat16 of 4-256 experts, 64-65,536 tokens, sides of 256-7168.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, ln
from presage.costs.rates import REFERENCE_SMS, Rates

TILES = ((128, 256), (128, 128), (64, 128))
STEP, TILE_COST, START = (
    64,
    1.5e-6,
    4e-6,
)  # elements of the inner dimension at once; seconds of a tile, of the kernels before


class GroupedGemm(NamedTuple):
    """`groups` products [m, k] x [k, n] with `m` (of a weight gradient `k`) the mean of all groups."""

    groups: int
    m: float
    n: int
    k: float
    weight: bool

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k


def grouped(call: Call) -> GroupedGemm:
    x, w = call.tensors[:2]
    groups = call.tensors[2].elements if len(call.tensors) > 2 else x.sizes[0]
    if len(x.sizes) == 2 and len(w.sizes) == 2:
        return GroupedGemm(groups, x.sizes[0], w.sizes[1], x.sizes[1] / max(1, groups), True)
    rows = x.sizes[0] / max(1, groups) if len(x.sizes) == 2 else x.sizes[1]
    return GroupedGemm(groups, rows, w.sizes[-1], x.sizes[-1], False)


def tiles(g: GroupedGemm, rows: int, columns: int) -> float:
    """Tiles of all groups."""
    down = ceil(g.m / rows) if g.weight else max(1.0, g.m / rows + 0.5)
    return g.groups * down * ceil(g.n / columns)


def moved(g: GroupedGemm, width: int) -> float:
    return width * g.groups * (g.m * g.k + g.k * g.n + g.m * g.n)


def law(call: Call, rates: Rates) -> Law:
    g, x = grouped(call), call.tensors[0]
    rate = rates.rate(x.dtype) / rates.sms
    inner = ceil((g.k + (STEP / 2 if g.weight else 0)) / STEP) * STEP
    arithmetic = min(ceil(tiles(g, a, b) / rates.sms) * (2.0 * a * b * inner / rate + TILE_COST) for a, b in TILES)
    nbytes = moved(g, x.width)
    return Law(rates.floor + START + max(arithmetic, nbytes / rates.bandwidth), g.flops, nbytes, 2.0)


def features(call: Call, law: Law) -> list[float]:
    g = grouped(call)
    out = [float(g.weight), ln(g.groups), ln(g.m), ln(g.n), ln(g.k), ln(g.m * g.groups), ln(law.flops), ln(law.bytes)]
    out += [ln(law.seconds), ln(law.flops / law.seconds), ln(law.bytes / law.seconds)]
    for a, b in TILES:
        waves = tiles(g, a, b) / REFERENCE_SMS
        out += [waves / ceil(waves), ln(ceil(waves))]
    return out


FAMILY = KernelFamily("grouped", frozenset({"aten::_grouped_mm"}), law, features, rounds=300, leaves=15, computes=True)
