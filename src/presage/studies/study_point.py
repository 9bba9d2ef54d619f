"""A point of a study: a job somewhere, its prediction and its steps drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from presage.configs.check import problems
from presage.configs.job import Job
from presage.noise.model import NO_NOISE, NoiseModel
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import Drawn, Draws, draw, without_fitted_stragglers
from presage.prediction.draws.step_model import StepModel, step_model
from presage.prediction.jobs.job_prediction import JobResult, predict_job

MS = 1e3


@dataclass(frozen=True)
class StudySetup:
    """How points are drawn: noise from a file or assumed (see `belief_of`)."""

    noise: str | None = None
    seed: int = 0
    draws: int = 20_000


SETUP = StudySetup()


@dataclass(frozen=True)
class SkippedPoint:
    """A point that cannot be, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class StudyPoint(Drawn):
    """A job, how long its step is, and how its steps differ; `more`: what one study alone tells, by name."""

    name: str
    prediction: JobResult
    shape: StepModel
    noise: NoiseModel
    draws: Draws
    more: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def job(self) -> Job:
        return self.prediction.job

    @property
    def spread(self) -> float:
        """p95 / p50."""
        return self.p95.value / self.p50.value

    @property
    def mean(self) -> float:
        return self.draws.mean.value

    @cached_property
    def quiet(self) -> float:
        """Seconds of a step were all GPUs alike and nothing in the way."""
        return float(draw(self.shape, NO_NOISE, 0, 1, 1).seconds.flat[0])

    @property
    def stragglers(self) -> float:
        """What noise adds to the mean step, as a share of one without."""
        return self.mean / self.quiet - 1

    @property
    def excess(self) -> float:
        """What noise adds to p95, as a share of a step without noise."""
        return self.p95.value / self.quiet - 1

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.job.tokens / self.mean / self.job.gpus

    def part(self, *names: str) -> float:
        """The share of some parts in the predicted step."""
        return sum(self.prediction.breakdown.get(n, 0.0) for n in names) / self.prediction.seconds

    def with_more(self, **more: float) -> StudyPoint:
        """With what one study alone tells."""
        return replace(self, more={**self.more, **more})

    def to_json(self) -> dict[str, Any]:
        p = self.prediction
        return {
            "name": self.name,
            "gpus": self.job.gpus,
            "global_batch": self.job.global_batch,
            "predicted_ms": p.seconds * MS,
            "quiet_ms": self.quiet * MS,
            "mean_ms": self.mean * MS,
            "p50_ms": self.p50.to_json(MS),
            "p95_ms": self.p95.to_json(MS),
            "p95_over_p50": self.spread,
            "straggler_cost": self.stragglers,
            "tokens_per_second_per_gpu": self.rate,
            "mfu": p.mfu * p.seconds / self.mean,
            "bound": p.bound,
            "exposed_communication": p.exposed / p.seconds,
            "fits": p.memory.fits,
            "breakdown_ms": {k: v * MS for k, v in p.breakdown.items()},
            "more": dict(self.more),
            "note": self.note,
        }


@dataclass(frozen=True, eq=False)
class Study:
    """Points, the first the one that others are held against, and those that cannot be."""

    kind: str
    job: Job
    points: tuple[StudyPoint, ...]
    skipped: tuple[SkippedPoint, ...] = ()
    source: str = ""  # of the noise

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.kind,
            "job": self.job.name,
            "noise": self.source,
            "points": [p.to_json() for p in self.points],
            "skipped": [{"name": s.name, "reason": s.reason} for s in self.skipped],
        }


def study_point(name: str, job: Job, setup: StudySetup) -> StudyPoint | SkippedPoint:
    """The point of a job, or what is wrong with it."""
    wrong = problems(job)
    return SkippedPoint(name, wrong[0]) if wrong else predict_point(name, job, setup)


def study_pair(setup: StudySetup, named: tuple[str, Job]) -> StudyPoint | SkippedPoint:
    """The same of a name and a job together: as pools ask."""
    return study_point(*named, setup)


def predict_point(name: str, job: Job, setup: StudySetup) -> StudyPoint:
    """With what is believed of the noise of such a job."""
    found = replace(predict_job(job), drawn=False)  # its own draws follow
    noise = belief_of(job, found.seconds, setup.noise)[0].noise
    shape = without_fitted_stragglers(step_model(job, found.job_step), noise)
    return StudyPoint(name, found, shape, noise, draw_point(shape, noise, setup))


def draw_point(shape: StepModel, noise: NoiseModel, setup: StudySetup) -> Draws:
    """As many steps as were asked for."""
    return draw(shape, noise, setup.seed, setup.draws)
