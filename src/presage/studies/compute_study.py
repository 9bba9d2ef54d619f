"""Faster GPUs on the same network: tensor cores of two and four times the rate, with the power that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from presage.configs.job import Job
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.pool.pool import SERIAL, Pool
from presage.prediction.draws.distribution import belief_of
from presage.studies.study_point import SETUP, Point, Setup, Skipped, Study, one_of

__all__ = ["TIMES", "compute_study", "faster"]

TIMES = (1.0, 2.0, 4.0)


def compute_study(
    job: Job, times: Sequence[float] = TIMES, setup: Setup = SETUP, memory: bool = False, pool: Pool = SERIAL
) -> Study:
    """The plan stays; `memory`: its bandwidth grows with the rate of arithmetic."""
    if min(times) <= 0:
        raise PresageError("a GPU computes some times above 0 as fast as before")
    moved = [(f"x{x:g}", with_gpu(job, faster(job.platform.gpu, x, memory))) for x in sorted(times)]
    found = list(pool.map(partial(one_of, setup), moved))
    points = [p for p in found if isinstance(p, Point)]
    first = points[0] if points else None
    points = [p.with_more(speedup=first.mean / p.mean) for p in points if first is not None]
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("compute", job, tuple(points), tuple(p for p in found if isinstance(p, Skipped)), source)


def faster(gpu: Gpu, times: float, memory: bool = False) -> Gpu:
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
