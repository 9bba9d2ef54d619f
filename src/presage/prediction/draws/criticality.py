"""Criticality: of one more percent of a class of work (or of a stage), the share that shows in the step.

A step is as long as its longest path, so what it takes rises ever faster as one kind of work grows, until that work is
all that counts. The slope where the job is, over the slope out there, is the share of the work that lies on the path.
The clock is held where the power limit has it: slower products would else get some of it back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from presage.configs.job import Job
from presage.noise.model import CLASSES
from presage.parallel.pipeline_run import simulate_durations
from presage.prediction.draws.step_model import StepModel
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.work_pace import WorkPaces

__all__ = ["Critical", "criticality", "scale_stage", "stage_criticality"]

NEAR, FAR = 0.01, 200.0
NO_LIMIT = 1e6  # W


class Critical(NamedTuple):
    """Seconds of a step: on its longest path, and all there are of them."""

    shown: float
    seconds: float

    @property
    def share(self) -> float:
        """0 where all of it is hidden behind other work."""
        found = self.shown / self.seconds if self.seconds > 0 else 0.0
        return min(1.0, found) if found > 1e-6 else 0.0


def criticality(shape: StepModel) -> dict[str, Critical]:
    """Of the classes of work that the job has."""
    slow = job_step(shape.job, shape.efficiency).slowdown
    held, base = _unlimited(shape.job), WorkPaces(products=slow, attention=slow)

    def at(kind: str, times: float) -> float:
        return job_step(held, shape.efficiency, base._replace(**{kind: getattr(base, kind) * times})).seconds

    found = {k: _critical(at(k, 1.0), at(k, 1 + NEAR), at(k, FAR), at(k, FAR * (1 + NEAR))) for k in CLASSES}
    return {k: c for k, c in found.items() if c.seconds > 1e-9 * shape.seconds}


def stage_criticality(shape: StepModel, stage: int) -> Critical:
    """Of a pipeline stage's passes."""
    at = [scale_stage(shape, stage, t).seconds for t in (1.0, 1 + NEAR, FAR, FAR * (1 + NEAR))]
    return _critical(*at)


def _critical(here: float, more: float, far: float, further: float) -> Critical:
    return Critical((more - here) / NEAR, (further - far) / (NEAR * FAR))


def _unlimited(job: Job) -> Job:
    gpu = replace(job.platform.gpu, power_limit=NO_LIMIT)
    return replace(job, platform=replace(job.platform, gpu=gpu))


def scale_stage(shape: StepModel, stage: int, times: float) -> StepModel:
    """The same step with a pipeline stage whose passes take so many times as long."""
    d = shape.pipeline.durations
    factor = [[times if s == stage else 1.0] for s in range(shape.stages)]
    passes = {name: getattr(d, name) * factor for name in ("forward", "backward", "weight", "extra")}
    done = simulate_durations(shape.pipeline.schedule, d._replace(**passes))
    seconds = shape.seconds + done.total - shape.pipeline.total
    made = replace(shape, seconds=seconds, pipeline=done, work=shape.work * factor)
    made.__dict__["curves"] = shape.curves  # what transfers add is not priced anew
    return made
