"""The predicted time of a plan, phase by phase and rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan
from presage.embeddings.sharding_prices import Shard, ShardArrays, ShardCosts, SharedTableCosts

__all__ = ["PHASES", "RankLoads", "ShardingCost", "phase_seconds", "rank_loads", "sharding_cost", "shards_of"]

Array = npt.NDArray[Any]
PHASES = ("input", "lookup", "output", "gradient", "update", "replicas")


@dataclass(frozen=True, eq=False)
class RankLoads:
    """What each rank has to do: seconds, bytes of indices in, bytes of pooled rows out, memory."""

    forward: Array
    backward: Array
    indices: Array
    output: Array
    memory: Array


@dataclass(frozen=True)
class ShardingCost:
    """Seconds of a step's embeddings."""

    phases: dict[str, float]
    load: RankLoads
    over: float  # bytes of the fullest rank beyond its memory, or 0

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def imbalance(self) -> float:
        """Seconds that the mean rank waits for the slowest in lookups and updates."""
        return sum(float(x.max() - x.mean()) for x in (self.load.forward, self.load.backward))


def shards_of(plan: ShardingPlan, prices: ShardCosts) -> tuple[ShardArrays, Array, SharedTableCosts]:
    """The parts that have one rank, their ranks, and what all ranks share."""
    tables: list[int] = []
    found: list[Shard] = []
    ranks: list[int] = []
    for t, placed in enumerate(plan.tables):
        if placed.sharding in (TABLE, COLUMN):
            cut = len(placed.ranks)
            tables += [t] * cut
            found += [prices.part(t, cut)] * cut
            ranks += placed.ranks
    by_rows, held = ([t for t, p in enumerate(plan.tables) if p.sharding == kind] for kind in (ROW, DATA))
    width = len(prices.part(0).terms)
    return ShardArrays.of(tables, found, width), np.array(ranks, int), prices.common(by_rows, held)


def rank_loads(parts: ShardArrays, ranks: Array, common: SharedTableCosts, prices: ShardCosts) -> RankLoads:
    n = prices.problem.ranks

    def summed(values: Array, extra: float) -> Array:
        return np.bincount(ranks, values, minlength=n) + extra

    if len(ranks):
        total = np.zeros((n, parts.terms.shape[1]))
        np.add.at(total, ranks, parts.terms)
        forward, backward = prices.model.forward_of(total), prices.model.backward_of(total)
    else:
        forward = backward = np.zeros(n)
    rest = summed(parts.indices, common.indices), summed(parts.output, 0.0), summed(parts.memory, common.memory)
    return RankLoads(forward + common.forward, backward + common.backward, *rest)


def phase_seconds(load: RankLoads, common: SharedTableCosts, prices: ShardCosts) -> dict[str, float]:
    """Each phase is as long as its slowest rank needs."""
    if prices.problem.ranks == 1:
        inward = outward = 0.0
    else:
        inward, outward = float(prices.input(load.indices.max())), float(prices.exchange(load.output.max()))
    scatter, gather, reduce = prices.between(common)
    return {
        "input": inward,
        "lookup": float(load.forward.max()),
        "output": outward + scatter,
        "gradient": outward + gather,
        "update": float(load.backward.max()),
        "replicas": reduce + common.dense,
    }


def sharding_cost(plan: ShardingPlan, prices: ShardCosts) -> ShardingCost:
    """What a plan's step takes."""
    parts, ranks, common = shards_of(plan, prices)
    load = rank_loads(parts, ranks, common, prices)
    over = max(0.0, float(load.memory.max()) - prices.problem.limit)
    return ShardingCost(phase_seconds(load, common, prices), load, over)
