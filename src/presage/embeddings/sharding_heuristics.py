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
from presage.embeddings.sharding_cost import ShardArrays, ShardCosts, marginal
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, TablePlacement
from presage.errors import PresageError

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
    """The cost a greedy sharder assigns to each table."""
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


# ---- Where the search starts: whole tables by predicted cost, the longest first; those too large for a rank cut.

GIB = 1024.0**3


def initial_plans(prices: ShardCosts, *, whole: bool = False) -> list[ShardingPlan]:
    """Plans that fit: whole tables, and with those held by all ranks that this makes cheaper on the whole."""
    ways: list[int | str] = [1 for _ in prices.problem.tables] if whole else _needed(prices)
    both = [ways, ways if whole else _replicated(prices, ways)]
    both = both[: 1 + (both[0] != both[1])]
    candidates = [_greedy_plan(prices, w, widest) for w in both for widest in (0, 32, 64, 128)]
    plans = [plan for plan in dict.fromkeys(candidates) if plan is not None]
    if not plans and not whole:
        smaller = [
            ROW if w == 1 and prices.problem.tables[t].rows >= prices.problem.ranks else w for t, w in enumerate(ways)
        ]
        last = _greedy_plan(prices, smaller)
        plans = [last] if last is not None else []
    if not plans:
        raise PresageError(_memory_error(prices))
    return plans


def _needed(prices: ShardCosts) -> list[int | str]:
    """Into how many columns each table must be cut to fit a rank at all; by rows where that is not enough."""
    free = prices.problem.limit - prices.received
    out: list[int | str] = []
    for t in range(len(prices.problem.tables)):
        cuts = [c for c in (1, *prices.cuts(t)) if prices.part(t, c).memory <= free]
        out.append(cuts[0] if cuts else ROW)
    return out


def _replicated(prices: ShardCosts, ways: list[int | str]) -> list[int | str]:
    """Small tables on all ranks, where an even share of their lookups and bytes costs more than their gradients."""
    n, problem = prices.problem.ranks, prices.problem
    if n == 1:
        return ways
    whole = ShardArrays.of(range(len(problem.tables)), [prices.part(t) for t in range(len(problem.tables))])
    forward, backward = marginal(whole, prices, ranks=n)
    sent = float(whole.output.sum()) / n
    out_rate = float(prices.exchange(sent)) / sent
    even = (forward + backward + whole.output * 2 * out_rate + whole.indices * out_rate) / n
    weights = np.array([float(t.weight_bytes) for t in problem.tables])
    rate = float(prices.collectives.seconds("all_reduce", 64e6, prices.group)) / 64e6
    cheap = [t for t in np.flatnonzero(weights * rate < even).tolist() if ways[t] == 1]
    if not cheap:
        return ways
    held = ShardArrays.of(cheap, [prices.everywhere(t, DATA) for t in cheap])
    more = np.add(*marginal(held, prices))
    keep = {t for t, m, w in zip(cheap, more, weights[cheap] * rate, strict=True) if m + w < even[t]}
    return [DATA if t in keep else w for t, w in enumerate(ways)]


def _greedy_plan(prices: ShardCosts, ways: list[int | str], widest: int = 0) -> ShardingPlan | None:
    """Greedy plan of shards by marginal cost, most expensive first; by memory where that does not fit.

    The kernel depends on the widest table of a rank: with `widest`, tables up to it get ranks of their own.
    """
    tables = [t for t, w in enumerate(ways) if isinstance(w, int) for _ in range(w)]
    parts = ShardArrays.of(tables, [prices.part(t, ways[t]) for t in tables])  # type: ignore[arg-type]
    common = prices.common([t for t, w in enumerate(ways) if w == ROW], [t for t, w in enumerate(ways) if w == DATA])
    limit, n = prices.problem.limit - common.memory, prices.problem.ranks
    if not tables:
        return _plan(n, ways, {}) if limit >= 0 else None
    forward, backward = marginal(parts, prices, ranks=n)
    sent = max(float(parts.output.sum()) / n, 1.0)
    rate = float(prices.exchange(sent)) / sent
    worth = forward + backward + (2 * parts.output + parts.indices) * rate
    dims = np.array([prices.problem.tables[t].columns_part(ways[t]).dim for t in tables])  # type: ignore[arg-type]
    for by in (worth, worth + parts.memory * worth.sum() / parts.memory.sum(), parts.memory):
        ranks = _separate_ranks(by, parts.memory, n, limit, dims <= widest)
        if ranks is not None:
            of: dict[int, list[int]] = {}
            for t, r in zip(tables, ranks.tolist(), strict=True):
                of.setdefault(t, []).append(r)
            return _plan(n, ways, of)
    return None


def _separate_ranks(by: Array, memory: Array, n: int, limit: float, narrow: Array) -> Array | None:
    """Ranks of shards, with a share of the ranks, by cost, reserved for the narrow ones."""
    if not narrow.any() or narrow.all():
        return None if narrow.all() else greedy(by, memory, n, limit)
    count = min(max(1, round(n * float(by[narrow].sum() / by.sum()))), n - 1)
    if count < 1:
        return None
    first = greedy(by[narrow], memory[narrow], count, limit)
    rest = greedy(by[~narrow], memory[~narrow], n - count, limit)
    if first is None or rest is None:
        return None
    out = np.zeros(len(by), int)
    out[narrow], out[~narrow] = first, rest + count
    return out


def _plan(n: int, ways: list[int | str], of: dict[int, list[int]]) -> ShardingPlan:
    placed = []
    for t, w in enumerate(ways):
        kind = str(w) if isinstance(w, str) else TABLE if w == 1 else COLUMN
        placed.append(TablePlacement(kind, tuple(of.get(t, ()))))
    return ShardingPlan(n, tuple(placed))


def _memory_error(prices: ShardCosts) -> str:
    """The error text: how much memory is missing, and what would fit."""
    p = prices.problem
    need = sum(prices.part(t).memory for t in range(len(p.tables)))
    have = p.limit * p.ranks
    each = need / p.ranks + prices.received
    ranks = int(np.ceil(need / max(p.limit - prices.received, 1.0)))
    return (
        f"{len(p.tables)} tables need {need / GIB:.4g} GiB with their buffers, and {p.ranks} ranks have "
        f"{have / GIB:.4g} GiB: give each at least {each / GIB:.4g} GiB (--memory), or about {ranks} ranks or more"
    )
