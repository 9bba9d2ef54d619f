"""How sure a job's step is: the guarantee of a prediction, from a noise file or what is assumed without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from presage.configs.job import Job
from presage.errors import PresageError, near
from presage.noise.distribution import Distribution
from presage.noise.files import read_noise
from presage.noise.model import Belief
from presage.noise.priors import CONDITIONS, DEFAULT, prior
from presage.noise.sampling import Estimate
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.draw import DrawRequest, Draws, draw_all, transfers_vary, without_fitted_stragglers
from presage.prediction.draws.step_model import NODE, StepModel, step_model
from presage.prediction.jobs.job_prediction import JobResult

__all__ = [
    "QUANTILES",
    "Guarantee",
    "StepDistribution",
    "belief_of",
    "guarantee",
    "predict_distribution",
    "quick_distribution",
]

MS = 1e3
QUICK = 4_000  # draws of a distribution for a page
TIMES = (1.02, 1.05, 1.1, 1.2, 1.5)  # as long as the median: how likely is a step longer than that


@dataclass(frozen=True, eq=False)
class StepDistribution:
    """How long steps and runs of a job take, as quantiles with errors (`steps`, `runs`), and what that rests on."""

    found: Guarantee
    belief: Belief
    source: str  # of the noise
    seed: int

    @property
    def count(self) -> int:
        return int(self.found.draws.seconds.size)

    @cached_property
    def steps(self) -> dict[float, Estimate]:
        """Quantiles of a step."""
        return {p: self.found.quantile(p) for p in QUANTILES}

    @cached_property
    def runs(self) -> dict[float, Estimate]:
        """Quantiles of a run's mean step."""
        return {p: self.found.run_quantile(p) for p in QUANTILES}

    @cached_property
    def longer(self) -> dict[float, Estimate]:
        """How likely a step takes longer than so many times the median."""
        middle = self.steps[0.5].value
        return {t: self.found.exceeds(t * middle) for t in TIMES}

    @cached_property
    def mean(self) -> Estimate:
        return self.found.mean

    def to_json(self) -> dict[str, Any]:
        d = self.found.draws
        return {
            "draws": self.count,
            "seed": self.seed,
            "noise": self.source,
            "step_ms": {"mean": _ms(self.mean)} | {_name(p): _ms(e) for p, e in self.steps.items()},
            "run_mean_step_ms": {_name(p): _ms(e) for p, e in self.runs.items()},
            "longer_than_median_times": {f"{t:g}": _plain(e) for t, e in self.longer.items()},
            "step_sd": d.step_sd,
            "run_sd": d.run_sd,
        }


def predict_distribution(
    p: JobResult,
    noise: str | None = None,
    count: int = 10_000,
    seed: int = 0,
    load: Distribution | None = None,
    pool: Pool = THREADS_2,
) -> StepDistribution:
    """A job's step as a distribution: `count` draws of it, with quantiles of steps and of run means.

    `noise` is a file as `write_noise` writes it, or the conditions assumed of such GPUs (screened, production,
    unscreened); `load` makes microbatches differ by their work.
    """
    belief, source = belief_of(p.job, p.seconds, noise)
    if load is not None:
        others = {k: v for k, v in belief.intervals.items() if not k.startswith("load.")}
        belief = replace(belief, noise=replace(belief.noise, load=load), intervals=others)
    return StepDistribution(
        guarantee(step_model(p.job, p.job_step), belief, seed, count, pool=pool), belief, source, seed
    )


def quick_distribution(p: JobResult, seed: int = 0, count: int = QUICK) -> StepDistribution:
    """The step-time distribution under the assumed noise, with fewer draws and no intervals."""
    belief, source = belief_of(p.job, p.seconds)
    return StepDistribution(guarantee(step_model(p.job, p.job_step), belief, seed, count, sets=0), belief, source, seed)


def belief_of(job: Job, seconds: float, noise: str | None = None) -> tuple[Belief, str]:
    """What is believed of a job's noise, and where that is from: a file, or what is assumed under some conditions."""
    kept = noise or DEFAULT
    if kept not in CONDITIONS:
        if not Path(kept).exists() and not Path(kept).suffix:
            there = f"nor one of {', '.join(CONDITIONS)}{near(kept, CONDITIONS)}"
            raise PresageError(f"--noise {kept}: not a file, {there}")
        return read_noise(kept), kept
    return prior(job.platform.gpu, job.gpus, NODE, seconds, kept), f'"{kept}" preset (no measurements given)'


def _name(p: float) -> str:
    return f"p{100 * p:g}"


def _ms(e: Estimate) -> dict[str, float | None]:
    return _plain(e, MS)


def _plain(e: Estimate, times: float = 1.0) -> dict[str, float | None]:
    ends = {"low_90": e.low, "high_90": e.high}
    return {**e.to_json(times), **{k: None if v is None else v * times for k, v in ends.items()}}


# ---- Guarantee: quantiles of a job's step and run, and how sure they are where the noise is not known exactly.

QUANTILES = (0.05, 0.5, 0.9, 0.95, 0.99)
SETS = 16
FEWEST = 2_000


@dataclass(frozen=True, eq=False)
class Guarantee:
    """A job's step as a distribution; `others` are draws with what the noise may be as well."""

    draws: Draws
    others: tuple[Draws, ...] = ()

    def quantile(self, p: float) -> Estimate:
        """Of a step."""
        return self._with_interval(lambda d: d.quantile(p))

    def run_quantile(self, p: float) -> Estimate:
        """Of a run's mean step."""
        return self._with_interval(lambda d: d.run_quantile(p))

    def exceeds(self, seconds: float) -> Estimate:
        """The probability that a step takes longer."""
        return self._with_interval(lambda d: d.exceeds(seconds))

    @property
    def mean(self) -> Estimate:
        return self._with_interval(lambda d: d.mean)

    def _with_interval(self, told: Callable[[Draws], Estimate]) -> Estimate:
        value = told(self.draws)
        if not self.others:
            return value
        low, high = np.quantile([told(d).value for d in self.others], [0.05, 0.95])
        return replace(value, low=float(min(low, value.value)), high=float(max(high, value.value)))


def guarantee(
    shape: StepModel, belief: Belief, seed: int = 0, count: int = 10_000, sets: int = SETS, pool: Pool = THREADS_2
) -> Guarantee:
    """With `sets` = 0 the noise is taken as it is believed to be."""
    rng = np.random.default_rng((seed, 1))
    may_be = [belief.drawn(rng) for _ in range(sets if belief.intervals else 0)]
    if transfers_vary(belief.noise):
        shape.curves  # noqa: B018 - which all of them share
    asked = [DrawRequest(without_fitted_stragglers(shape, belief.noise), belief.noise, count)]
    asked += [DrawRequest(without_fitted_stragglers(shape, noise), noise, min(count, FEWEST)) for noise in may_be]
    found = dict(draw_all(asked, seed, pool))
    return Guarantee(found[0], tuple(found[i] for i in range(1, len(asked))))
