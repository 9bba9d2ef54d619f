"""StepTimes: how long steps of a run take, and how the sum over many of them differs from run to run.

A step takes `seconds` times a factor of the run, a drift over the run, and a factor of the step that goes with the
step before it (AR(1)); now and then a stall comes on top. A run has up to a million steps, so nothing is drawn step by
step: the variance of a sum of n of them is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.model import NetworkRegimes, NoiseModel, SlowGpus, Stalls
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import draw, without_fitted_stragglers
from presage.prediction.draws.step_model import step_model
from presage.prediction.jobs.job_prediction import JobResult

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """Step times of a run; standard deviations are of logarithms."""

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
        """Mean step in seconds and drift of each draw."""
        z = rng.standard_normal((3, draws))
        own = np.exp(self.run_sd * z[0] - self.run_sd**2 / 2) * np.exp(self.model_sd * z[1])
        return self.seconds * own, self.drift + self.drift_sd * z[2]

    def measured(self, seconds: float) -> StepTimes:
        """With a measured step time, which has no model error."""
        return replace(self, seconds=seconds, model_sd=0.0)

    def mean_sd(self, n: Floats) -> Floats:
        """Standard deviation of the mean of n consecutive steps, relative to a step."""
        return np.asarray(self.sd * np.sqrt(sum_variance(n, self.correlation)) / n)

    def drawn(self, rng: np.random.Generator, draws: int, nodes: float) -> Floats:
        """Seconds of single steps, each of a run of its own."""
        mean, drift = self.runs(rng, draws)
        bulk = mean * np.exp(drift * (rng.random(draws) - 0.5) + self.sd * rng.standard_normal(draws) - self.sd**2 / 2)
        stalled = rng.random(draws) < -np.expm1(-self.stalls.per_step(nodes, self.seconds))
        return np.asarray(bulk + np.where(stalled, self.stalls.seconds.sample(rng, draws), 0.0))


def sum_variance(n: Floats, correlation: float) -> Floats:
    """Variance of a sum of n AR(1) values of variance 1; exact for whole n."""
    r = correlation
    return np.asarray(n * (1 + r) / (1 - r) - 2 * r * (1 - r**n) / (1 - r) ** 2)


# ---- Step times of a run from draws of the job's step: the slowest of all GPUs, and what they share.

COUNT = 4_000  # steps that are drawn


def step_times(
    job: JobResult, noise: str | None = None, episodes: bool = True, seed: int = 0, pool: Pool = THREADS_2
) -> tuple[StepTimes, str]:
    """Step times of a job's run, and the source of the noise: file or preset. `episodes`: it has slow episodes."""
    belief, source = belief_of(job.job, job.seconds, noise)
    lasting = _lasting(belief.noise, job.job.gpus, episodes)
    found = draw(without_fitted_stragglers(step_model(job.job, job.job_step), lasting), lasting, seed, COUNT, pool=pool)
    c = belief.noise.common
    times = StepTimes(
        seconds=float(found.seconds.mean()),
        run_sd=found.run_sd,
        drift=c.drift,
        drift_sd=c.drift_sd,
        sd=found.step_sd,
        correlation=max(0.0, c.correlation),
        stalls=belief.noise.stalls,
        model_sd=job.model_error.sd,
    )
    return times, source


def _lasting(noise: NoiseModel, gpus: int, episodes: bool) -> NoiseModel:
    """The noise present in every hour of a run."""
    slow = noise.slow if noise.slow.share * gpus >= 1 else SlowGpus()
    return replace(noise, stalls=Stalls(), slow=slow, network=NetworkRegimes() if episodes else noise.network)
