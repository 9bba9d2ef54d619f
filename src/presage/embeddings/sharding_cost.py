"""The predicted time of a plan, phase by phase and rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, Plan
from presage.embeddings.sharding_prices import Common, Part, Parts, Prices

__all__ = ["PHASES", "Cost", "Load", "cost", "load_of", "parts_of", "phases"]

Array = npt.NDArray[Any]
PHASES = ("input", "lookup", "output", "gradient", "update", "replicas")


@dataclass(frozen=True, eq=False)
class Load:
    """What each rank has to do: seconds, bytes of indices in, bytes of pooled rows out, memory."""

    forward: Array
    backward: Array
    indices: Array
    output: Array
    memory: Array


@dataclass(frozen=True)
class Cost:
    """Seconds of a step's embeddings."""

    phases: dict[str, float]
    load: Load
    over: float  # bytes of the fullest rank beyond its memory, or 0

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def imbalance(self) -> float:
        """Seconds that the mean rank waits for the slowest in lookups and updates."""
        return sum(float(x.max() - x.mean()) for x in (self.load.forward, self.load.backward))


def parts_of(plan: Plan, prices: Prices) -> tuple[Parts, Array, Common]:
    """The parts that have one rank, their ranks, and what all ranks share."""
    tables: list[int] = []
    found: list[Part] = []
    ranks: list[int] = []
    for t, placed in enumerate(plan.tables):
        if placed.sharding in (TABLE, COLUMN):
            cut = len(placed.ranks)
            tables += [t] * cut
            found += [prices.part(t, cut)] * cut
            ranks += placed.ranks
    by_rows, held = ([t for t, p in enumerate(plan.tables) if p.sharding == kind] for kind in (ROW, DATA))
    width = len(prices.part(0).terms)
    return Parts.of(tables, found, width), np.array(ranks, int), prices.common(by_rows, held)


def load_of(parts: Parts, ranks: Array, common: Common, prices: Prices) -> Load:
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
    return Load(forward + common.forward, backward + common.backward, *rest)


def phases(load: Load, common: Common, prices: Prices) -> dict[str, float]:
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


def cost(plan: Plan, prices: Prices) -> Cost:
    """What a plan's step takes."""
    parts, ranks, common = parts_of(plan, prices)
    load = load_of(parts, ranks, common, prices)
    over = max(0.0, float(load.memory.max()) - prices.problem.limit)
    return Cost(phases(load, common, prices), load, over)
