"""The communicators of a job: along each axis of its parallel plan, how many ranks, and how many share a domain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from presage.configs.job import Job
from presage.costs.collectives.group import RankGroup
from presage.parallel.plan import Axis, ParallelPlan


def communicators(job: Job) -> Mapping[Axis, RankGroup]:
    """The communicators of a job on its platform."""
    return _communicators(job.parallel, job.gpus, job.platform.domain)


@lru_cache(4096)
def _communicators(plan: ParallelPlan, gpus: int, domain: int) -> Mapping[Axis, RankGroup]:
    axes = plan.axes(gpus).items()
    return {axis: RankGroup(ranks, max(1, min(ranks, domain // stride))) for axis, (ranks, stride) in axes}
