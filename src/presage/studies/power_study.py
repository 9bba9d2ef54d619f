"""Less power: GPUs held below their limit are slower on average, and differ more, each as its silicon has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from presage.configs.job import Job
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.noise.model import NoiseModel
from presage.placement.fleet import drawn_fleet
from presage.placement.place import place
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import without_fitted_stragglers
from presage.prediction.draws.step_model import NODE, step_model
from presage.prediction.jobs.job_prediction import predict_job
from presage.studies.compute_study import with_gpu
from presage.studies.study_point import SETUP, Point, Setup, Study, drawn

__all__ = ["CAPS", "WIDER", "capped", "power_study", "wider"]

CAPS = (1.0, 0.85, 0.7)  # of the power limit
LOWEST, MOST = 0.01, 100.0  # caps, and times the spread
WIDER = 2.0  # times the spread between GPUs: 2% becomes 4%
PLACED, RANDOMS = 2_000, 6  # draws of each placement, and random ones
PLACEABLE = 65_536  # GPUs


def power_study(
    job: Job, caps: Sequence[float] = CAPS, setup: Setup = SETUP, times: float = WIDER, placing: bool = True
) -> Study:
    """Each cap with the spread that is believed, and with `times` as much of it (and as many slow GPUs). What placing
    GPUs by their speeds could gain is told of the first and of the last."""
    if not caps or min(caps) < LOWEST or max(caps) > 1 or not 0 < times <= MOST:
        limits = f"caps are shares of the power limit, {LOWEST:g} to 1"
        raise PresageError(f"{limits}; the spread grows by times above 0 and up to {MOST:g}")
    points: list[Point] = []
    base, source = belief_of(job, predict_job(job).seconds, setup.noise)
    for cap in sorted(caps, reverse=True):
        for more in sorted({1.0, times}):
            points.append(_at(with_gpu(job, capped(job.platform.gpu, cap)), cap, base.noise, more, setup))
    first = points[0]
    points = [p.with_more(slower=p.mean / first.mean - 1) for p in points]
    for at in {0, len(points) - 1} if placing and job.gpus <= PLACEABLE else ():
        points[at] = points[at].with_more(placing=gain(points[at], setup.seed))
    return Study("power", job, tuple(points), (), source)


def _at(job: Job, cap: float, usual: NoiseModel, more: float, setup: Setup) -> Point:
    """The laws know the usual spread already, a wider one comes on top: see `calmed`."""
    found, noise = predict_job(job), wider(usual, more)
    shape = without_fitted_stragglers(step_model(job, found.job_step), usual)
    sd, watts = noise.of("products").rank, job.platform.gpu.power_limit
    name = f"{watts:,.0f} W, spread {100 * sd:.2g}%"
    point = Point(name, found, shape, noise, drawn(shape, noise, setup))
    return point.with_more(cap=cap, spread=sd, clock=1 / found.job_step.slowdown)


def gain(point: Point, seed: int) -> float:
    """What the best placement of GPUs whose speeds are known takes off p95, against random ones."""
    noise, job = point.noise, point.job
    slow = float(noise.slow.factor.quantile(np.float64(0.5)))
    rng = np.random.default_rng((seed, 2))
    fleet = drawn_fleet(job.gpus, NODE, noise.of("products").rank, rng, noise.slow.share, slow)
    found = place(point.shape, fleet, noise, seed=seed, draws=PLACED, randoms=RANDOMS)
    return 1 - found.best.p95.value / found.randoms.p95


def capped(gpu: Gpu, cap: float) -> Gpu:
    """Held to a share of its power limit."""
    return replace(gpu, power_limit=gpu.power_limit * cap)


def wider(noise: NoiseModel, times: float) -> NoiseModel:
    """With so many times the spread between GPUs, and so many times as many slow ones."""
    ranks = {p: v * times for p, v in noise.numbers().items() if p.startswith("spread.") and p.endswith(".rank")}
    return noise.changed(ranks | {"slow.share": min(0.99, noise.slow.share * times)})
