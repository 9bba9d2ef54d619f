"""Where the search starts: whole tables by predicted cost, the longest first; those too large for a rank cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_bound import marginal
from presage.embeddings.sharding_heuristics import greedy
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, TablePlacement
from presage.embeddings.sharding_prices import ShardArrays, ShardCosts
from presage.errors import PresageError

__all__ = ["initial_plans"]

Array = npt.NDArray[Any]
GIB = 1024.0**3


def initial_plans(prices: ShardCosts, *, whole: bool = False) -> list[ShardingPlan]:
    """Plans that fit: whole tables, and with those held by all ranks that this makes cheaper on the whole."""
    ways: list[int | str] = [1 for _ in prices.problem.tables] if whole else _needed(prices)
    both = [ways, ways if whole else _replicated(prices, ways)]
    made = [_greedy_plan(prices, w, widest) for w in both[: 1 + (both[0] != both[1])] for widest in (0, 32, 64, 128)]
    found = [plan for plan in dict.fromkeys(made) if plan is not None]
    if not found and not whole:
        smaller = [
            ROW if w == 1 and prices.problem.tables[t].rows >= prices.problem.ranks else w for t, w in enumerate(ways)
        ]
        last = _greedy_plan(prices, smaller)
        found = [last] if last is not None else []
    if not found:
        raise PresageError(_memory_error(prices))
    return found


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
    """The parts by what they add to a rank, the costliest first; by memory where that does not fit.

    Kernels go by the widest table of a rank: where `widest` is told, tables up to it have ranks of their own.
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
    """Ranks of parts, with some of the ranks for the narrow ones: as many as their share of the cost."""
    if not narrow.any() or narrow.all():
        return None if narrow.all() else greedy(by, memory, n, limit)
    some = min(max(1, round(n * float(by[narrow].sum() / by.sum()))), n - 1)
    if some < 1:
        return None
    first, rest = greedy(by[narrow], memory[narrow], some, limit), greedy(by[~narrow], memory[~narrow], n - some, limit)
    if first is None or rest is None:
        return None
    out = np.zeros(len(by), int)
    out[narrow], out[~narrow] = first, rest + some
    return out


def _plan(n: int, ways: list[int | str], of: dict[int, list[int]]) -> ShardingPlan:
    placed = []
    for t, w in enumerate(ways):
        kind = str(w) if isinstance(w, str) else TABLE if w == 1 else COLUMN
        placed.append(TablePlacement(kind, tuple(of.get(t, ()))))
    return ShardingPlan(n, tuple(placed))


def _memory_error(prices: ShardCosts) -> str:
    """By how much the tables do not fit, and what would."""
    p = prices.problem
    need = sum(prices.part(t).memory for t in range(len(p.tables)))
    have = p.limit * p.ranks
    each = need / p.ranks + prices.received
    ranks = int(np.ceil(need / max(p.limit - prices.received, 1.0)))
    return (
        f"{len(p.tables)} tables need {need / GIB:.4g} GiB with their buffers, and {p.ranks} ranks have "
        f"{have / GIB:.4g} GiB: give each at least {each / GIB:.4g} GiB (--memory), or about {ranks} ranks or more"
    )
