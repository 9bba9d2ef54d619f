"""Faster GPUs on the same network: tensor cores of two and four times the rate, with the power that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from presage.configs.job import Job
from presage.errors import PresageError
from presage.hardware import Gpu, Platform
from presage.noise.model import NoiseModel
from presage.placement.fleet import random_fleet
from presage.placement.place import place
from presage.pool.pool import SERIAL, Pool
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import without_fitted_stragglers
from presage.prediction.draws.step_model import NODE, step_model
from presage.prediction.jobs.job_prediction import predict_job
from presage.runs.run import TrainingRun, checkpoints_of
from presage.runs.sets import DEFAULT, reliability
from presage.runs.steps import StepTimes
from presage.search import job_plan, plan_words, search
from presage.studies.study_point import (
    SETUP,
    SkippedPoint,
    Study,
    StudyPoint,
    StudySetup,
    draw_point,
    study_pair,
    study_point,
)

TIMES = (1.0, 2.0, 4.0)


def compute_study(
    job: Job, times: Sequence[float] = TIMES, setup: StudySetup = SETUP, memory: bool = False, pool: Pool = SERIAL
) -> Study:
    """The plan stays; `memory`: its bandwidth grows with the rate of arithmetic."""
    if min(times) <= 0:
        raise PresageError("a GPU computes some times above 0 as fast as before")
    moved = [(f"x{x:g}", with_gpu(job, with_faster_compute(job.platform.gpu, x, memory))) for x in sorted(times)]
    found = list(pool.map(partial(study_pair, setup), moved))
    points = [p for p in found if isinstance(p, StudyPoint)]
    first = points[0] if points else None
    points = [p.with_more(speedup=first.mean / p.mean) for p in points if first is not None]
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("compute", job, tuple(points), tuple(p for p in found if isinstance(p, SkippedPoint)), source)


def with_faster_compute(gpu: Gpu, times: float, memory: bool = False) -> Gpu:
    """With so many times the FLOP/s, and the power limit with it (a FLOP takes the energy it took). Launches, the host
    and links stay; memory does unless said otherwise."""
    wide = times if memory else 1.0
    return replace(
        gpu,
        peak={kind: rate * times for kind, rate in gpu.peak.items()},
        sustained_bf16=None if gpu.sustained_bf16 is None else gpu.sustained_bf16 * times,
        power_limit=gpu.power_limit * times,
        memory_bandwidth=gpu.memory_bandwidth * wide,
        sustained_copy=None if gpu.sustained_copy is None else gpu.sustained_copy * wide,
    )


def with_gpu(job: Job, gpu: Gpu) -> Job:
    """The job on the same platform with another GPU."""
    return replace(job, platform=replace(job.platform, gpu=gpu))


# ---- Larger NVLink domains: the same GPUs and the same network between domains, of 8 or 72 GPUs each.

DOMAINS = (8, 72)
MESH = 4  # GPUs that links without a switch join


def domain_study(
    job: Job,
    domains: Sequence[int] = DOMAINS,
    setup: StudySetup = SETUP,
    best: bool = False,
    workers: int = 1,
    ray: str | None = None,
) -> Study:
    """The job's own plan in each; `best`: beside it the best that a search finds there."""
    found: list[StudyPoint | SkippedPoint] = []
    for size in sorted(domains):
        moved = replace(job, platform=with_domain(job.platform, size))
        found.append(_noted(study_point(f"NVL{size}", moved, setup)))
        if best:
            found.append(_best(moved, size, setup, workers, ray))
    points = [p for p in found if isinstance(p, StudyPoint)]
    points = [p.with_more(speedup=points[0].mean / p.mean) for p in points]
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("domain", job, tuple(points), tuple(p for p in found if isinstance(p, SkippedPoint)), source)


def _best(job: Job, size: int, setup: StudySetup, workers: int, ray: str | None) -> StudyPoint | SkippedPoint:
    name, found = f"NVL{size}, best plan", search(job, job.gpus, top=1, workers=workers, ray=ray)
    if not found.best:
        return SkippedPoint(name, "no plan fits in memory")
    return _noted(study_point(name, found.best[0].job, setup))


def _noted(p: StudyPoint | SkippedPoint) -> StudyPoint | SkippedPoint:
    return replace(p, note=plan_words(job_plan(p.job))) if isinstance(p, StudyPoint) else p


def with_domain(platform: Platform, size: int) -> Platform:
    """The platform with so many GPUs on one NVLink, of the same rate each; between domains the network is as it was."""
    if platform.gpu.link is None or len(platform.links) < 2:
        raise PresageError(f"{platform.key}: its GPUs have no links of their own, or no network between nodes")
    if size < 2:
        raise PresageError(f"an NVLink domain of {size}: it should have 2 GPUs or more")
    near, far = platform.links[0], platform.links[-1]
    if size == near.ranks:
        return platform
    topology = "switch" if size > MESH else near.topology
    inner = replace(near, ranks=size, bandwidth=platform.gpu.link, topology=topology)
    outer = replace(far, ranks=size * -(-far.ranks // size))
    return replace(platform, key=f"{platform.key}-nvl{size}", links=(inner, outer))


# ---- Less power: GPUs held below their limit are slower on average, and differ more, each as its silicon has it.

CAPS = (1.0, 0.85, 0.7)  # of the power limit
LOWEST, MOST = 0.01, 100.0  # caps, and times the spread
WIDER = 2.0  # times the spread between GPUs: 2% becomes 4%
PLACED, RANDOMS = 2_000, 6  # draws of each placement, and random ones
PLACEABLE = 65_536  # GPUs


def power_study(
    job: Job, caps: Sequence[float] = CAPS, setup: StudySetup = SETUP, times: float = WIDER, placing: bool = True
) -> Study:
    """Each cap with the spread that is believed, and with `times` as much of it (and as many slow GPUs). What placing
    GPUs by their speeds could gain is told of the first and of the last."""
    if not caps or min(caps) < LOWEST or max(caps) > 1 or not 0 < times <= MOST:
        limits = f"caps are shares of the power limit, {LOWEST:g} to 1"
        raise PresageError(f"{limits}; the spread grows by times above 0 and up to {MOST:g}")
    points: list[StudyPoint] = []
    base, source = belief_of(job, predict_job(job).seconds, setup.noise)
    for cap in sorted(caps, reverse=True):
        for more in sorted({1.0, times}):
            points.append(
                _power_point(with_gpu(job, with_power_cap(job.platform.gpu, cap)), cap, base.noise, more, setup)
            )
    first = points[0]
    points = [p.with_more(slower=p.mean / first.mean - 1) for p in points]
    for at in {0, len(points) - 1} if placing and job.gpus <= PLACEABLE else ():
        points[at] = points[at].with_more(placing=placement_gain(points[at], setup.seed))
    return Study("power", job, tuple(points), (), source)


def _power_point(job: Job, cap: float, usual: NoiseModel, more: float, setup: StudySetup) -> StudyPoint:
    """The laws know the usual spread already, a wider one comes on top: see `without_fitted_stragglers`."""
    found, noise = replace(predict_job(job), drawn=False), with_wider_spread(usual, more)
    shape = without_fitted_stragglers(step_model(job, found.job_step), usual)
    sd, watts = noise.of("products").rank, job.platform.gpu.power_limit
    name = f"{watts:,.0f} W, spread {100 * sd:.2g}%"
    point = StudyPoint(name, found, shape, noise, draw_point(shape, noise, setup))
    return point.with_more(cap=cap, spread=sd, clock=1 / found.job_step.slowdown)


def placement_gain(point: StudyPoint, seed: int) -> float:
    """What the best placement of GPUs whose speeds are known takes off p95, against random ones."""
    noise, job = point.noise, point.job
    slow = float(noise.slow.factor.quantile(np.float64(0.5)))
    rng = np.random.default_rng((seed, 2))
    fleet = random_fleet(job.gpus, NODE, noise.of("products").rank, rng, noise.slow.share, slow)
    found = place(point.shape, fleet, noise, seed=seed, draws=PLACED, randoms=RANDOMS)
    return 1 - found.best.p95.value / found.randoms.p95


def with_power_cap(gpu: Gpu, cap: float) -> Gpu:
    """Held to a share of its power limit."""
    return replace(gpu, power_limit=gpu.power_limit * cap)


def with_wider_spread(noise: NoiseModel, times: float) -> NoiseModel:
    """With so many times the spread between GPUs, and so many times as many slow ones."""
    ranks = {p: v * times for p, v in noise.numbers().items() if p.startswith("spread.") and p.endswith(".rank")}
    return noise.changed(ranks | {"slow.share": min(0.99, noise.slow.share * times)})


# ---- More GPUs: what a job's step, its tail, its failures and so its useful throughput become from 8K to 256K of them.

GPUS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
LONG = 1_000_000  # steps


def scale_study(
    job: Job, gpus: Sequence[int] = GPUS, setup: StudySetup = SETUP, strong: bool = False, pool: Pool = SERIAL
) -> Study:
    """Replicas are added; the batch grows with them, or stays (`strong`)."""
    found = list(pool.map(partial(_scale_point, setup), [(scale_job(job, n, strong), n) for n in sorted(gpus)]))
    points = tuple(p for p in found if isinstance(p, StudyPoint))
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("scale", job, points, tuple(p for p in found if isinstance(p, SkippedPoint)), source)


def _scale_point(setup: StudySetup, moved: tuple[Job, int]) -> StudyPoint | SkippedPoint:
    job, gpus = moved
    found = study_point(f"{gpus:,}", job, setup)
    if isinstance(found, SkippedPoint):
        return found
    useful = goodput(job, found.mean)
    return found.with_more(goodput=useful, useful_rate=found.rate * useful)


def scale_job(job: Job, gpus: int, strong: bool = False) -> Job:
    """On so many GPUs, with the microbatches that each replica had, or the batch."""
    batch = job.global_batch if strong else round(job.global_batch * gpus / job.gpus)
    return replace(job, gpus=gpus, global_batch=max(1, batch))


def goodput(job: Job, seconds: float) -> float:
    """The share of time that is steps that count, with checkpoints at their best interval: the exact formula, with
    failures of Llama 3's rates, the same for each node however large the job."""
    kind = reliability(DEFAULT)
    return float(TrainingRun(LONG, job.gpus, StepTimes(seconds), kind, checkpoints_of(job, kind)).efficiency)
