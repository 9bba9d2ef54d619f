"""More GPUs: what a job's step, its tail, its failures and so its useful throughput become from 8K to 256K of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from presage.configs.job import Job
from presage.pool.pool import SERIAL, Pool
from presage.prediction.draws.distribution import belief_of
from presage.runs.run import TrainingRun
from presage.runs.save import checkpoints_of
from presage.runs.sets import DEFAULT, reliability
from presage.runs.steps import StepTimes
from presage.studies.study_point import SETUP, Point, Setup, Skipped, Study, at

__all__ = ["GPUS", "goodput", "scale_study", "scaled_job"]

GPUS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
LONG = 1_000_000  # steps


def scale_study(
    job: Job, gpus: Sequence[int] = GPUS, setup: Setup = SETUP, strong: bool = False, pool: Pool = SERIAL
) -> Study:
    """Replicas are added; the batch grows with them, or stays (`strong`)."""
    found = list(pool.map(partial(_at, setup), [(scaled_job(job, n, strong), n) for n in sorted(gpus)]))
    points = tuple(p for p in found if isinstance(p, Point))
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("scale", job, points, tuple(p for p in found if isinstance(p, Skipped)), source)


def _at(setup: Setup, moved: tuple[Job, int]) -> Point | Skipped:
    job, gpus = moved
    found = at(f"{gpus:,}", job, setup)
    if isinstance(found, Skipped):
        return found
    useful = goodput(job, found.mean)
    return found.with_more(goodput=useful, useful_rate=found.rate * useful)


def scaled_job(job: Job, gpus: int, strong: bool = False) -> Job:
    """On so many GPUs, with the microbatches that each replica had, or the batch."""
    batch = job.global_batch if strong else round(job.global_batch * gpus / job.gpus)
    return replace(job, gpus=gpus, global_batch=max(1, batch))


def goodput(job: Job, seconds: float) -> float:
    """The share of time that is steps that count, with checkpoints at their best interval: the exact formula, with
    failures of Llama 3's rates, the same for each node however large the job."""
    kind = reliability(DEFAULT)
    return float(TrainingRun(LONG, job.gpus, StepTimes(seconds), kind, checkpoints_of(job, kind)).efficiency)
