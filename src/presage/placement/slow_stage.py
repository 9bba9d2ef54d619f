"""One slow stage, moved through a pipeline: what it costs by where it is, beside a pipeline with none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.noise.sampling import RandomStreams
from presage.parallel.pipeline import Schedule
from presage.placement.placement_score import Judge
from presage.placement.placement_search import assign
from presage.placement.replica_time import Pipeline
from presage.placement.toy_pipelines import own_noise, toy_shape

__all__ = ["Moved", "moved_through"]

Floats = NDArray[np.float64]
DRAWS = 4_000


@dataclass(frozen=True, eq=False)
class Moved:
    """p95 of a step relative to the healthy pipeline's, [stage]; `chosen`: where the optimiser puts the slow one."""

    schedule: Schedule
    slow: float
    heavy: float
    p95: Floats
    chosen: int

    @property
    def first(self) -> float:
        return float(self.p95[0])

    @property
    def middle(self) -> float:
        return float(self.p95[len(self.p95) // 2])

    @property
    def last(self) -> float:
        return float(self.p95[-1])

    @cached_property
    def spread(self) -> float:
        """The worst place against the best."""
        return float(self.p95.max() / self.p95.min())

    @property
    def found(self) -> float:
        """What the optimiser's choice costs."""
        return float(self.p95[self.chosen])


def moved_through(
    schedule: Schedule, slow: float = 1.2, heavy: float = 1.0, cv: float = 0.02, draws: int = DRAWS, seed: int = 0
) -> Moved:
    """Stages alike but for the last, `heavy` times as heavy; backwards twice as long as forwards."""
    weights = np.ones(schedule.stages)
    weights[-1] = heavy
    pipeline = Pipeline(toy_shape(schedule, weights), own_noise(cv), most=1 << 30)
    factors = np.ones((schedule.stages + 1, schedule.stages))
    factors[np.arange(schedule.stages), np.arange(schedule.stages)] = slow
    noises = pipeline.noises(RandomStreams(seed)("own"), draws)
    seconds = pipeline.quiet(factors)[:, None] * pipeline.ratios(factors, noises)
    p95 = np.quantile(seconds, 0.95, axis=1)
    values = factors[0]
    found = assign(Judge(pipeline, 1, seed=seed), values)
    chosen = int(np.flatnonzero(found.groups[0] == values.argmax())[0])
    return Moved(schedule, slow, heavy, p95[:-1] / p95[-1], chosen)
