"""Local search: moves and swaps of parts from the ranks that set the pace, then other cuts of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, TablePlacement
from presage.embeddings.sharding_prices import ShardCosts
from presage.embeddings.sharding_state import FEW, ShardingState

__all__ = ["Budget", "improve", "perturb", "recut_table"]

POWERS = (8, 32, 128)
ENOUGH = 1e-7  # of the step, the least gain that counts
PROMISING = 12  # tables of the critical ranks that are cut anew, the costliest first


@dataclass
class Budget:
    """How many changes the search may look for, and until when."""

    rounds: int
    over: Callable[[], bool]
    used: int = 0

    def spend(self) -> bool:
        """Whether there is one more."""
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
    """One better change: moves first, for they are quick to look through."""
    soft = here.soft()
    below = soft * (1 - ENOUGH)
    for look in (here.moves, lambda r: here.swaps(r, rng)):
        found = sorted((c for r in here.critical() for c in look(r)), key=lambda c: c.soft)
        if any(c.soft < below and here.try_change(c, below) for c in found[:FEW]):
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
            took = here.seconds_with(table, placed)
            if took < least:
                tables = [*plan.tables[:table], placed, *plan.tables[table + 1 :]]
                best, least = replace(plan, tables=tuple(tables)), took
    return best


def _promising(here: ShardingState, plan: ShardingPlan) -> list[int]:
    """Tables on the critical ranks, and those on all ranks; the costliest first."""
    mine = [i for r in here.critical() for i in np.flatnonzero(here.rank == r).tolist()]
    weight = here.parts.terms @ (1 / np.maximum(here.parts.terms.sum(axis=0), 1e-300)) if len(here.rank) else []
    tables = dict.fromkeys(int(here.parts.table[i]) for i in sorted(mine, key=lambda i: -weight[i]))
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
    took = prices.collectives.seconds("all_reduce", float(prices.problem.tables[table].weight_bytes), prices.group)
    return bool(took > here.seconds())


def perturb(plan: ShardingPlan, prices: ShardCosts, rng: np.random.Generator) -> ShardingPlan:
    """A few parts of the critical ranks thrown elsewhere."""
    here = ShardingState(plan, prices)
    for _ in range(1 + int(rng.integers(0, 3))):
        r = int(rng.choice(here.critical()))
        mine = np.flatnonzero(here.rank == r)
        room = np.flatnonzero(here.rank != r)
        if not len(mine) or not len(room):
            return plan
        i, j = int(rng.choice(mine)), int(rng.choice(room))
        here.rank[i], here.rank[j] = here.rank[j], here.rank[i]
        here.refresh([r, int(here.rank[i])])
    return here.to_plan() if here.fits() else plan
