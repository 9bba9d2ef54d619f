"""StepTimes: how long steps of a run take, and how the sum over many of them differs from run to run.

A step takes `seconds` times a factor of the run, a drift over the run, and a factor of the step that goes with the
step before it (AR(1)); now and then a stall comes on top. A run has up to a million steps, so nothing is drawn step by
step: the variance of a sum of n of them is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.model import Stalls

__all__ = ["MODEL_SD", "StepTimes", "sum_variance"]

Floats = NDArray[np.float64]
MODEL_SD = 0.076 / 0.6745  # a median error of 7.6% on 1,287 public runs (docs/runs.md), were errors Normal


@dataclass(frozen=True)
class StepTimes:
    """Steps of a run. Standard deviations are of logarithms."""

    seconds: float  # of a step, stalls and slow episodes apart
    run_sd: float = 0.0  # between runs
    drift: float = 0.0  # from the first step of a run to the last; `seconds` are those of its middle
    drift_sd: float = 0.0  # between runs
    sd: float = 0.0  # between steps of a run
    correlation: float = 0.0  # with the step before
    stalls: Stalls = field(default_factory=Stalls)
    model_sd: float = 0.0  # of presage's own error of `seconds`: the same for all runs of a job, and unknown

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not 0 <= self.correlation < 1:
            raise PresageError("steps need seconds above 0 and a correlation from 0 to below 1")

    def runs(self, rng: np.random.Generator, draws: int) -> tuple[Floats, Floats]:
        """Of each draw: seconds of its average step, and its drift."""
        z = rng.standard_normal((3, draws))
        own = np.exp(self.run_sd * z[0] - self.run_sd**2 / 2) * np.exp(self.model_sd * z[1])
        return self.seconds * own, self.drift + self.drift_sd * z[2]

    def mean_sd(self, n: Floats) -> Floats:
        """Of the mean of n steps in a row, as a share of a step."""
        return np.asarray(self.sd * np.sqrt(sum_variance(n, self.correlation)) / n)

    def drawn(self, rng: np.random.Generator, draws: int, nodes: float) -> Floats:
        """Seconds of single steps, each of a run of its own."""
        mean, drift = self.runs(rng, draws)
        bulk = mean * np.exp(drift * (rng.random(draws) - 0.5) + self.sd * rng.standard_normal(draws) - self.sd**2 / 2)
        stalled = rng.random(draws) < -np.expm1(-self.stalls.per_step(nodes, self.seconds))
        return np.asarray(bulk + np.where(stalled, self.stalls.seconds.sample(rng, draws), 0.0))


def sum_variance(n: Floats, correlation: float) -> Floats:
    """Of a sum of n values of variance 1 where each goes with the one before: exact for whole n."""
    r = correlation
    return np.asarray(n * (1 + r) / (1 - r) - 2 * r * (1 - r**n) / (1 - r) ** 2)
