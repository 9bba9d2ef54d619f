"""Judge: what a placement is worth, quickly: the p95 of the slowest replica, each drawn with the same noise.

Of every replica the logarithm's mean and standard deviation are found from some draws through the engine; replicas
are independent given what they share, so that P(step <= t) is the product of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.noise.sampling import RandomStreams
from presage.placement.replica_time import Pipeline, Singles

__all__ = ["GOAL", "Judge", "Moments", "level"]

Floats = NDArray[np.float64]
GOAL = 0.95
DRAWS = 96
STEADIEST = 1e-4  # of the logarithm: no replica repeats better


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the logarithm of replicas' seconds, [row]."""

    mean: Floats
    sd: Floats
    quiet: Floats  # the logarithm itself, without noise

    def put(self, rows: NDArray[np.int64], new: Moments) -> None:
        """Other values for some rows, in place: the search changes two at a time."""
        self.mean[rows], self.sd[rows], self.quiet[rows] = new.mean, new.sd, new.quiet

    def below(self, log_seconds: float) -> Floats:
        """[row]: the logarithm of the probability to take no longer."""
        from scipy.special import log_ndtr

        return np.asarray(log_ndtr((log_seconds - self.mean) / self.sd))


def level(m: Moments, goal: float = GOAL) -> float:
    """Seconds that the slowest of the replicas stays below with this probability."""
    from scipy.special import ndtri

    wanted = np.log(goal)
    low = float((m.mean + ndtri(goal) * m.sd).max())  # one alone, and each as if all were like the worst
    high = float((m.mean + ndtri(goal ** (1 / len(m.mean))) * m.sd).max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if m.below(middle).sum() < wanted else (low, middle)
        if high - low < 1e-13:
            break
    return float(np.exp(high))


@dataclass(frozen=True, eq=False)
class Judge:
    """Of placements of so many replicas."""

    pipeline: Pipeline
    replicas: int
    draws: int = DRAWS
    seed: int = 0

    @cached_property
    def noises(self) -> Singles | None:
        rng = RandomStreams(self.seed)("judge")
        return self.pipeline.noises(rng, self.draws) if self.pipeline.varies else None

    def moments(self, factors: Floats) -> Moments:
        """Of replicas [row, stage]."""
        quiet = np.log(self.pipeline.quiet(factors))
        if self.noises is None:
            return Moments(quiet.copy(), np.full(len(quiet), STEADIEST), quiet)
        log = np.log(self.pipeline.ratios(factors, self.noises))
        return Moments(quiet + log.mean(axis=1), np.maximum(log.std(axis=1, ddof=1), STEADIEST), quiet)

    def p95(self, factors: Floats) -> float:
        """Of the slowest replica of a placement [replica, stage]."""
        return level(self.moments(factors))

    @cached_property
    def wide(self) -> float:
        """How many standard deviations above its mean the slowest of the replicas, all alike, is at p95."""
        from scipy.special import ndtri

        return float(ndtri(GOAL ** (1 / self.replicas)))

    @property
    def work(self) -> int:
        """Tasks that judging one replica takes."""
        return self.pipeline.tasks * (self.draws if self.pipeline.varies else 0) + self.pipeline.quick_tasks
