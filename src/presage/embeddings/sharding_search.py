"""The search for the best plan: seeds by predicted cost and by the named heuristics, local search, other cuts, kicks.

The same problem and seed give the same plan, unless the time runs out before the rounds do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_cost import ShardCosts, ShardingCost, lower_bound, sharding_cost
from presage.embeddings.sharding_heuristics import HEURISTICS, heuristic_plan, initial_plans
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, ShardingProblem, TablePlacement
from presage.embeddings.sharding_state import FEW, ShardingState

Array = npt.NDArray[Any]
Tell = Callable[[float, float], None]
ROUNDS, KICKS, SEEDS = 2000, 40, 3
LARGE = 20_000  # tables x ranks from which one seed and fewer kicks have to do


@dataclass(frozen=True)
class AlternativePlan:
    """Another plan, and what its step takes; no plan where none fits."""

    name: str
    plan: ShardingPlan | None
    cost: ShardingCost | None


@dataclass(frozen=True)
class ShardingResult:
    """The best plan, the others, and what no placing of the same parts can beat."""

    plan: ShardingPlan
    cost: ShardingCost
    alternatives: tuple[AlternativePlan, ...]
    bound: float  # seconds
    seconds: float  # that the search took
    complete: bool  # whether it ended by itself

    @property
    def gap(self) -> float:
        return self.cost.seconds / self.bound - 1.0


def search(
    problem: ShardingProblem,
    *,
    seconds: float = 20.0,
    rounds: int = ROUNDS,
    kicks: int = KICKS,
    seed: int = 0,
    whole: bool = False,
    tell: Tell = lambda _done, _best: None,
    prices: ShardCosts | None = None,
) -> ShardingResult:
    """The best plan found, and those of the named heuristics; `whole`: table-wise plans only.

    `tell` is called with the share done and the best step time.
    """
    start = time.monotonic()
    rng, prices = np.random.default_rng(seed), prices or ShardCosts(problem)
    others = [_alternative(name, prices, seed) for name in HEURISTICS]
    begun = initial_plans(prices, whole=whole) + [
        a.plan for a in others if a.plan is not None and a.cost is not None and not a.cost.over
    ]
    begun.sort(key=lambda plan: sharding_cost(plan, prices).seconds)
    best = _Best(prices, begun[0], tell, start, seconds)
    large = len(problem.tables) * problem.ranks > LARGE
    kicks = kicks // 4 if large else kicks
    for k, plan in enumerate(begun[: 1 if large else SEEDS]):
        budget = Budget(rounds, best.late)
        best.take(improve(plan, prices, budget, rng), 0.1 + 0.1 * k)
    if not whole:
        _cuts(best, rounds, rng)
    _kick(best, kicks, rounds, rng)
    tell(1.0, best.cost.seconds)
    bound = lower_bound(best.plan, prices)
    return ShardingResult(best.plan, best.cost, tuple(others), bound, time.monotonic() - start, not best.late())


class _Best:
    """The best plan so far, and the time limit."""

    def __init__(self, prices: ShardCosts, plan: ShardingPlan, tell: Tell, start: float, seconds: float) -> None:
        self.prices, self.plan, self.cost = prices, plan, sharding_cost(plan, prices)
        self.tell, self.until, self.done = tell, start + seconds, 0.0

    def late(self) -> bool:
        return time.monotonic() > self.until

    def take(self, plan: ShardingPlan, done: float) -> bool:
        cost = sharding_cost(plan, self.prices)
        better = not cost.over and (cost.seconds < self.cost.seconds or self.cost.over > 0)
        if better:
            self.plan, self.cost = plan, cost
        self.done = max(self.done, done)
        self.tell(self.done, self.cost.seconds)
        return better


def _cuts(best: _Best, rounds: int, rng: np.random.Generator) -> None:
    """Try other shardings of tables as long as that helps, with a short local search after each."""
    budget = Budget(rounds, best.late)
    while not best.late() and (plan := recut_table(best.plan, best.prices, budget)) is not None:
        best.take(plan, 0.3 + 0.4 * min(1.0, budget.used / rounds))
        best.take(improve(plan, best.prices, Budget(60, best.late), rng, first=1), 0.3)


def _kick(best: _Best, kicks: int, rounds: int, rng: np.random.Generator) -> None:
    """Iterated local search: random perturbations, each followed by local search, until they stop helping."""
    since = 0
    for k in range(kicks):
        if best.late() or since > kicks // 3 + 1:
            break
        plan = perturb(best.plan, best.prices, rng)
        improved = improve(plan, best.prices, Budget(rounds // 20, best.late), rng, first=1)
        since = 0 if best.take(improved, 0.7 + 0.3 * k / kicks) else since + 1


def _alternative(name: str, prices: ShardCosts, seed: int) -> AlternativePlan:
    plan = heuristic_plan(name, prices, seed)
    return AlternativePlan(name, plan, None if plan is None else sharding_cost(plan, prices))


# ---- Local search: moves and swaps of parts from the ranks that set the pace, then other cuts of their tables.

POWERS = (8, 32, 128)
ENOUGH = 1e-7  # of the step, the least gain that counts
PROMISING = 12  # tables of the critical ranks that are cut anew, the costliest first


@dataclass
class Budget:
    """Limit of a local search: rounds, and a time."""

    rounds: int
    over: Callable[[], bool]
    used: int = 0

    def spend(self) -> bool:
        """Use one round; False if none is left."""
        self.used += 1
        return self.used <= self.rounds and not self.over()


def improve(
    plan: ShardingPlan, prices: ShardCosts, budget: Budget, rng: np.random.Generator, first: int = 0
) -> ShardingPlan:
    """The best that moves and swaps lead to from a plan."""
    here = ShardingState(plan, prices)
    best, least = here.rank.copy(), here.seconds() if here.fits() else np.inf
    for power in POWERS[first:]:
        here.power = power
        here.weigh()
        while budget.spend() and _better_move(here, rng):
            now = here.seconds()
            if now < least and here.fits():
                best, least = here.rank.copy(), now
    here.rank = best
    return here.to_plan()


def _better_move(here: ShardingState, rng: np.random.Generator) -> bool:
    """Apply one improving change: moves first, as they are cheaper to evaluate than swaps."""
    soft = here.soft()
    below = soft * (1 - ENOUGH)
    for look in (here.moves, lambda r: here.swaps(r, rng)):
        changes = sorted((c for r in here.critical() for c in look(r)), key=lambda c: c.soft)
        if any(c.soft < below and here.try_change(c, below) for c in changes[:FEW]):
            return True
    return False


def recut_table(plan: ShardingPlan, prices: ShardCosts, budget: Budget) -> ShardingPlan | None:
    """The plan with one table of a critical rank cut in a better way, or None."""
    here = ShardingState(plan, prices)
    here.power = POWERS[1]
    here.weigh()
    best, least = None, here.seconds() * (1 - 1e-4)
    for table in _promising(here, plan):
        for placed in _ways(here, table):
            if not budget.spend():
                return best
            seconds = here.seconds_with(table, placed)
            if seconds < least:
                tables = [*plan.tables[:table], placed, *plan.tables[table + 1 :]]
                best, least = replace(plan, tables=tuple(tables)), seconds
    return best


def _promising(here: ShardingState, plan: ShardingPlan) -> list[int]:
    """Tables on the critical ranks, and those on all ranks; the costliest first."""
    critical = [i for r in here.critical() for i in np.flatnonzero(here.rank == r).tolist()]
    weight = here.parts.terms @ (1 / np.maximum(here.parts.terms.sum(axis=0), 1e-300)) if len(here.rank) else []
    tables = dict.fromkeys(int(here.parts.table[i]) for i in sorted(critical, key=lambda i: -weight[i]))
    everywhere = [t for t, p in enumerate(plan.tables) if p.sharding in (ROW, DATA)]
    return [*tables][:PROMISING] + everywhere[:PROMISING]


def _ways(here: ShardingState, table: int) -> Iterator[TablePlacement]:
    """The other ways to hold a table."""
    now = here.plan.tables[table]
    for cut in (1, *here.prices.cuts(table)):
        if now.sharding not in (TABLE, COLUMN) or cut != len(now.ranks):
            ranks = here.least_loaded(table, cut)
            yield TablePlacement(TABLE if cut == 1 else COLUMN, tuple(ranks))
    for kind in (ROW, DATA):
        if now.sharding != kind and here.n > 1 and not (kind == DATA and _too_large(here, table)):
            yield TablePlacement(kind)


def _too_large(here: ShardingState, table: int) -> bool:
    """To be held by all: its gradients alone would take more than the step."""
    prices = here.prices
    seconds = prices.collectives.seconds("all_reduce", float(prices.problem.tables[table].weight_bytes), prices.group)
    return bool(seconds > here.seconds())


def perturb(plan: ShardingPlan, prices: ShardCosts, rng: np.random.Generator) -> ShardingPlan:
    """Swap a few shards of critical ranks with random others."""
    here = ShardingState(plan, prices)
    for _ in range(1 + int(rng.integers(0, 3))):
        r = int(rng.choice(here.critical()))
        own = np.flatnonzero(here.rank == r)
        room = np.flatnonzero(here.rank != r)
        if not len(own) or not len(room):
            return plan
        i, j = int(rng.choice(own)), int(rng.choice(room))
        here.rank[i], here.rank[j] = here.rank[j], here.rank[i]
        here.refresh([r, int(here.rank[i])])
    return here.to_plan() if here.fits() else plan
