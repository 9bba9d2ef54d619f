"""What no placing of the same parts can beat, and what one table adds to a rank.

A table adds least to a group that already has much: what groups share (the start of a kernel, its longest chain of
reads) is paid. So the sum of what tables add at least, over the ranks, and what the first table of a group costs beyond
that, is a bound of the slowest rank; so is the costliest table alone. The learned part of the embedding model could
break this by a little: it never did for random placements (a test), and no bound is above the plan's own time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_cost import RankLoads, phase_seconds, rank_loads, shards_of
from presage.embeddings.sharding_plan import ShardingPlan
from presage.embeddings.sharding_prices import ShardArrays, ShardCosts

__all__ = ["lower_bound", "marginal"]

Array = npt.NDArray[Any]


def marginal(parts: ShardArrays, prices: ShardCosts, ranks: float = 1.0) -> tuple[Array, Array]:
    """Seconds that each part adds to the forward and the backward of a rank with an even share of all parts.

    With one rank it is the group of all. Kernels go by the widest table of their group: of the groups of all tables
    up to a width, those that could hold the part count, and the least of them is taken.
    """
    dims = np.array([prices.problem.tables[t].dim for t in parts.table], float)
    widths = [w for w in (32, 64, 128, np.inf) if (dims <= w).any()]
    found = []
    for of in (prices.model.forward_of, prices.model.backward_of):
        least = np.full(len(dims), np.inf)
        for w in widths:
            some = dims <= w
            total = parts.terms[some].sum(axis=0) / ranks
            more = of(total + parts.terms[some]) - of(total)
            least[some] = np.minimum(least[some], more)
        found.append(np.maximum(least, 0.0))
    return found[0], found[1]


def lower_bound(plan: ShardingPlan, prices: ShardCosts) -> float:
    """Seconds that the parts of a plan take at least, wherever they are."""
    parts, ranks, common = shards_of(plan, prices)
    load = rank_loads(parts, ranks, common, prices)
    if not len(ranks):
        return sum(phase_seconds(load, common, prices).values())
    n = prices.problem.ranks
    added = [np.minimum(a, b) for a, b in zip(marginal(parts, prices), marginal(parts, prices, n), strict=True)]
    alone = prices.model.forward_of(parts.terms), prices.model.backward_of(parts.terms)
    spread = []
    for least, single, extra in zip(added, alone, (common.forward, common.backward), strict=True):
        first = max(0.0, float((single - least).min()))
        spread.append(max(float(least.sum()) / n + first, float(single.max())) + extra)
    for sizes, extra in ((parts.indices, common.indices), (parts.output, 0.0)):
        spread.append(max(float(sizes.sum()) / n, float(sizes.max())) + extra)
    one = [np.array([v]) for v in spread]
    ideal = RankLoads(one[0], one[1], one[2], one[3], load.memory)
    return min(sum(phase_seconds(x, common, prices).values()) for x in (ideal, load))
