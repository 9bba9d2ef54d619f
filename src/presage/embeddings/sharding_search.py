"""The search for the best plan: seeds by predicted cost and by the named heuristics, local search, other cuts, kicks.

The same problem and seed give the same plan, unless the time runs out before the rounds do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.local_search import Budget, improve, perturb, recut_table
from presage.embeddings.sharding_bound import lower_bound
from presage.embeddings.sharding_cost import ShardingCost, sharding_cost
from presage.embeddings.sharding_heuristics import HEURISTICS, heuristic_plan
from presage.embeddings.sharding_plan import ShardingPlan
from presage.embeddings.sharding_prices import ShardCosts
from presage.embeddings.sharding_problem import ShardingProblem
from presage.embeddings.sharding_seeds import initial_plans

__all__ = ["AlternativePlan", "ShardingResult", "search"]

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
    """The best plan found, beside those of the named heuristics; `whole`: of those that cut no table and copy none.

    `tell` gets the share done and the best step.
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
    """The best so far."""

    def __init__(self, prices: ShardCosts, plan: ShardingPlan, tell: Tell, start: float, seconds: float) -> None:
        self.prices, self.plan, self.cost = prices, plan, sharding_cost(plan, prices)
        self.tell, self.until, self.done = tell, start + seconds, 0.0

    def late(self) -> bool:
        return time.monotonic() > self.until

    def take(self, plan: ShardingPlan, done: float) -> bool:
        found = sharding_cost(plan, self.prices)
        better = not found.over and (found.seconds < self.cost.seconds or self.cost.over > 0)
        if better:
            self.plan, self.cost = plan, found
        self.done = max(self.done, done)
        self.tell(self.done, self.cost.seconds)
        return better


def _cuts(best: _Best, rounds: int, rng: np.random.Generator) -> None:
    """Tables cut in other ways, as long as that helps, with a short local search after each."""
    budget = Budget(rounds, best.late)
    while not best.late() and (plan := recut_table(best.plan, best.prices, budget)) is not None:
        best.take(plan, 0.3 + 0.4 * min(1.0, budget.used / rounds))
        best.take(improve(plan, best.prices, Budget(60, best.late), rng, first=1), 0.3)


def _kick(best: _Best, kicks: int, rounds: int, rng: np.random.Generator) -> None:
    """Parts thrown elsewhere at random, and what local search makes of it; until that has not helped for long."""
    since = 0
    for k in range(kicks):
        if best.late() or since > kicks // 3 + 1:
            break
        plan = perturb(best.plan, best.prices, rng)
        found = improve(plan, best.prices, Budget(rounds // 20, best.late), rng, first=1)
        since = 0 if best.take(found, 0.7 + 0.3 * k / kicks) else since + 1


def _alternative(name: str, prices: ShardCosts, seed: int) -> AlternativePlan:
    plan = heuristic_plan(name, prices, seed)
    return AlternativePlan(name, plan, None if plan is None else sharding_cost(plan, prices))
