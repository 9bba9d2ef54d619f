"""StepDistribution: quantiles of a job's step time, with noise from a file or a preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.displayed import Displayed
from presage.errors import PresageError, near
from presage.hardware import Gpu
from presage.noise.distribution import Distribution
from presage.noise.files import read_noise
from presage.noise.model import Belief
from presage.noise.priors import CONDITIONS, DEFAULT, prior
from presage.noise.sampling import Estimate
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.data_dependence import own_load
from presage.prediction.draws.draw import (
    DrawRequest,
    Draws,
    draw_all,
    replicas_key,
    transfers_vary,
    without_fitted_stragglers,
)
from presage.prediction.draws.noise_sets import even_noises, interval_ends
from presage.prediction.draws.step_model import NODE, StepModel, step_model
from presage.prediction.jobs.job_prediction import JobResult

Floats = NDArray[np.float64]
MS = 1e3
QUANTILES = (0.05, 0.5, 0.9, 0.95, 0.99)
FEWEST = 1_000  # draws of each noise model that the measurements allow, for intervals
SMALL = 0.25  # pools that their slowest replicas are drawn from, of the usual size
CONFIDENCE = 0.95  # of a bound of a quantile
SHARES = (0.5, 0.9, 0.95)  # of steps that stated intervals hold
QUICK = 4_000  # draws of a distribution for a page
TIMES = (1.02, 1.05, 1.1, 1.2, 1.5)  # as long as the median: how likely is a step longer than that


@dataclass(frozen=True, eq=False, repr=False)
class StepDistribution(Displayed):
    """Step times and run means of a job as quantiles with errors (`steps`, `runs`).

    `others` are draws with other noise models that the measurements allow: the spread of their quantiles gives the 90%
    intervals.
    """

    draws: Draws
    others: tuple[Draws, ...] = ()
    source: str = ""  # of the noise
    seed: int = 0
    extremes: tuple[float, ...] = ()  # quantiles that were asked for, with a bound each

    @property
    def count(self) -> int:
        """Number of drawn steps."""
        return int(self.draws.seconds.size)

    @property
    def found(self) -> StepDistribution:
        """This distribution: a name of 0.1, until the next release."""
        return self

    @cached_property
    def steps(self) -> dict[float, Estimate]:
        """Quantiles of a step."""
        return {p: self.quantile(p) for p in sorted({*QUANTILES, *self.extremes})}

    @cached_property
    def runs(self) -> dict[float, Estimate]:
        """Quantiles of a run's mean step."""
        return {p: self.run_quantile(p) for p in sorted({*QUANTILES, *self.extremes})}

    @cached_property
    def longer(self) -> dict[float, Estimate]:
        """Probability that a step exceeds the median by these factors."""
        middle = self.steps[0.5].value
        return {t: self.exceeds(t * middle) for t in TIMES}

    @property
    def figures(self) -> list[float]:
        """Mean, median and p95 of a step, median and p95 of a run's mean step, in seconds."""
        steps, runs = self.steps, self.runs
        return [self.mean.value, steps[0.5].value, steps[0.95].value, runs[0.5].value, runs[0.95].value]

    @cached_property
    def mean(self) -> Estimate:
        return self._with_interval(self.draws.mean, lambda: self._steps_of_others.mean(axis=1))

    def quantile(self, p: float) -> Estimate:
        """A quantile of the step time."""
        return self._with_interval(self.draws.quantile(p), lambda: sorted_quantile(self._steps_of_others, p))

    def bound(self, p: float) -> float | None:
        """What the quantile of a step is not above, with 95% confidence and this noise: an order statistic of the drawn
        runs, whatever their distribution; None where they are too few."""
        from scipy.special import bdtr

        runs = len(self.draws.seconds)  # steps of a run are not independent: they count as one
        above = np.flatnonzero(bdtr(np.arange(runs), runs, p) >= CONFIDENCE)
        return float(np.quantile(self.draws.seconds, (above[0] + 1) / runs)) if len(above) else None

    def run_quantile(self, p: float) -> Estimate:
        """A quantile of a run's mean step time."""
        return self._with_interval(self.draws.run_quantile(p), lambda: sorted_quantile(self._runs_of_others, p))

    def exceeds(self, seconds: float) -> Estimate:
        """The probability that a step takes longer."""
        found = self.draws.exceeds(seconds)
        return self._with_interval(found, lambda: (self._steps_of_others > seconds).mean(axis=1))

    def interval(self, share: float) -> tuple[float, float]:
        """The middle `share` of steps, whatever of the allowed noise the job has."""
        steps = self._steps_of_others if self.others else self.draws.seconds
        low, high = np.quantile(steps, [0.5 - share / 2, 0.5 + share / 2])
        return float(low), float(high)

    @cached_property
    def _steps_of_others(self) -> Floats:
        """[noise model, draw]: seconds of steps, rising."""
        return np.sort([d.seconds.ravel() for d in self.others], axis=1)

    @cached_property
    def _runs_of_others(self) -> Floats:
        """[noise model, run]: seconds of mean steps, rising."""
        return np.sort([d.run_means for d in self.others], axis=1)

    def _with_interval(self, value: Estimate, of_others: Callable[[], Floats]) -> Estimate:
        if not self.others:
            return value
        (low, high), errors = interval_ends(of_others())
        return replace(value, low=min(low, value.value), high=max(high, value.value), end_errors=errors)

    @property
    def _bounds(self) -> list[tuple[float, float | None]]:
        return [(p, self.bound(p)) for p in self.extremes]

    def frame_rows(self) -> list[dict[str, Any]]:
        """Quantiles of a step and of a run's mean step."""
        return [
            {"quantile": p, "step_seconds": e.value, "run_mean_seconds": self.runs[p].value}
            for p, e in self.steps.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        return {
            "draws": self.count,
            "seed": self.seed,
            "noise": self.source,
            "step_ms": {"mean": _ms(self.mean)} | {_name(p): _ms(e) for p, e in self.steps.items()},
            "step_bound_95_ms": {_name(p): None if b is None else MS * b for p, b in self._bounds},
            "run_mean_step_ms": {_name(p): _ms(e) for p, e in self.runs.items()},
            "longer_than_median_times": {f"{t:g}": _plain(e) for t, e in self.longer.items()},
            "step_interval_ms": {f"{100 * s:g}": [MS * x for x in self.interval(s)] for s in SHARES},
            "noise_models": len(self.others),
            "step_sd": self.draws.step_sd,
            "run_sd": self.draws.run_sd,
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
    belief = _loaded(belief, load or own_load(p.job, seed))
    return replace(step_distribution(step_model(p.job, p.job_step), belief, seed, count, pool=pool), source=source)


def quick_distribution(p: JobResult, seed: int = 0, count: int = QUICK, noise: str | None = None) -> StepDistribution:
    """The step-time distribution with fewer draws and without intervals for the noise's own uncertainty."""
    belief, source = belief_of(p.job, p.seconds, noise)
    belief = _loaded(belief, own_load(p.job, seed))
    return replace(
        step_distribution(step_model(p.job, p.job_step), belief, seed, count, intervals=False), source=source
    )


def _loaded(belief: Belief, load: Distribution | None) -> Belief:
    """Noise with microbatches that differ by their work."""
    if load is None:
        return belief
    others = {k: v for k, v in belief.intervals.items() if not k.startswith("load.")}
    return replace(belief, noise=replace(belief.noise, load=load), intervals=others)


def belief_of(job: Job, seconds: float, noise: str | None = None) -> tuple[Belief, str]:
    """The noise model of a job with its uncertainty, and its source: a file, or a preset."""
    return noise_of_gpus(job.platform.gpu, job.gpus, seconds, noise)


def noise_of_gpus(gpu: str | Gpu, gpus: int, seconds: float, noise: str | None = None) -> tuple[Belief, str]:
    """The noise model of a file, or of a preset for so many GPUs and so long a step; and where it is from."""
    kept = noise or DEFAULT
    if kept not in CONDITIONS:
        if not Path(kept).exists() and not Path(kept).suffix:
            there = f"nor one of {', '.join(CONDITIONS)}{near(kept, CONDITIONS)}"
            raise PresageError(f"--noise {kept}: not a file, {there}")
        return read_noise(kept), kept
    return prior(gpu, gpus, NODE, seconds, kept), f'"{kept}" preset (no measurements given)'


def _name(p: float) -> str:
    return f"p{100 * p:g}"


def _ms(e: Estimate) -> dict[str, float | None]:
    return _plain(e, MS)


def _plain(e: Estimate, times: float = 1.0) -> dict[str, float | None]:
    wrong = e.end_errors or (None, None)
    ends = {"low_90": e.low, "high_90": e.high, "low_90_error": wrong[0], "high_90_error": wrong[1]}
    return {**e.to_json(times), **{k: None if v is None else v * times for k, v in ends.items()}}


def sorted_quantile(rising: Floats, p: float) -> Floats:
    """[row]: a quantile of each row of rising values."""
    place = p * (rising.shape[1] - 1)
    low = int(place)
    high = min(low + 1, rising.shape[1] - 1)
    return np.asarray(rising[:, low] + (place - low) * (rising[:, high] - rising[:, low]))


def step_distribution(
    shape: StepModel,
    belief: Belief,
    seed: int = 0,
    count: int = 10_000,
    intervals: bool = True,
    record: int = 1,
    pool: Pool = THREADS_2,
) -> StepDistribution:
    """The step-time distribution of a step model; `intervals`: with those of the noise's own uncertainty; `record`:
    of means of so many consecutive steps."""
    may_be = even_noises(belief, np.random.default_rng((seed, 1))) if intervals else []
    if transfers_vary(belief.noise):
        shape.curves  # noqa: B018 - which all of them share
    few = min(count, FEWEST)
    sizes = [(belief.noise, count, 1.0), *((noise, few, SMALL) for noise in may_be)]
    calm: dict[object, StepModel] = {}  # the same for all that differ in what is common to all GPUs
    requests = []
    for noise, draws, pools in sizes:
        key = replicas_key(shape, noise)
        alone = calm[key] = calm.get(key) or without_fitted_stragglers(shape, noise)
        requests.append(DrawRequest(alone, noise, draws, record=record, pools=pools, evenly=intervals))
    found = dict(draw_all(requests, seed, pool))
    return StepDistribution(found[0], tuple(found[i] for i in range(1, len(requests))), seed=seed)
