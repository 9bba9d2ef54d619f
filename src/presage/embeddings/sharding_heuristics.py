"""Sharders that go by a simple cost of each table, as the research compares them: whole tables only.

Greedy ones take tables by their cost, the costliest first, each to the rank with the least so far that has memory left
(of equals, the one with the least memory used). Whose name does not say what it does is read so: `naive` round-robin,
`naive_chunk` blocks of neighbours, `norm_lookup_greedy` lookups and width, each over its mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings import Table
from presage.embeddings.sharding_plan import ShardingPlan
from presage.embeddings.sharding_prices import ShardCosts

__all__ = ["HEURISTICS", "greedy", "heuristic_plan", "table_costs"]

Array = npt.NDArray[Any]


def _norm_lookup(tables: tuple[Table, ...]) -> Array:
    dim, pooling = (np.array([getattr(t, n) for t in tables], float) for n in ("dim", "pooling"))
    return np.asarray(dim / dim.mean() + pooling / max(pooling.mean(), 1e-9))


COSTS: dict[str, Callable[[tuple[Table, ...]], Array]] = {
    "size_greedy": lambda ts: np.array([float(t.rows) * t.dim for t in ts]),
    "lookup_greedy": lambda ts: np.array([t.dim * t.pooling for t in ts]),
    "norm_lookup_greedy": _norm_lookup,
    "size_lookup_greedy": lambda ts: np.array([t.dim * t.pooling * np.log10(max(t.rows, 2)) for t in ts]),
    "dim_greedy": lambda ts: np.array([float(t.dim) for t in ts]),
}
HEURISTICS = ("naive", "naive_chunk", "random", *COSTS)


def table_costs(name: str, tables: tuple[Table, ...]) -> Array:
    """What a greedy sharder takes each table to cost."""
    return COSTS[name](tables)


def heuristic_plan(name: str, prices: ShardCosts, seed: int = 0) -> ShardingPlan | None:
    """A named sharder's plan; None where it finds no rank with memory left."""
    n, count = prices.problem.ranks, len(prices.problem.tables)
    if name == "naive":
        return ShardingPlan.table_wise(n, [i % n for i in range(count)])
    if name == "naive_chunk":
        return ShardingPlan.table_wise(n, [i * n // count for i in range(count)])
    if name == "random":
        return ShardingPlan.table_wise(n, np.random.default_rng(seed).integers(0, n, count).tolist())
    memory = np.array([prices.part(t).memory for t in range(count)])
    ranks = greedy(table_costs(name, prices.problem.tables), memory, n, prices.problem.limit - prices.received)
    return None if ranks is None else ShardingPlan.table_wise(n, ranks.tolist())


def greedy(costs: Array, memory: Array, ranks: int, limit: float) -> Array | None:
    """The costliest first, each to the rank with the least so far; None where one fits nowhere."""
    load, used, out = np.zeros(ranks), np.zeros(ranks), np.zeros(len(costs), int)
    for i in np.argsort(-costs, kind="stable").tolist():
        room = used + memory[i] <= limit
        if not room.any():
            return None
        order = np.lexsort((used, np.where(room, load, np.inf)))
        out[i] = order[0]
        load[order[0]] += costs[i]
        used[order[0]] += memory[i]
    return out
