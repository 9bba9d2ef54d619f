"""What layouts need and take: pure functions of a job and a few layouts, to be run anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from presage.configs.job import Job
from presage.memory.job_memory import most_needed
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_step import job_step, step_lower_bound
from presage.search.layout import JobPlan, apply_plan
from presage.search.plan_space import PlanFamily, PlanSpace

__all__ = ["Survey", "price_plans", "survey_families"]


class Survey(NamedTuple):
    """Of some families: how many layouts are legal, and those that fit."""

    legal: int
    smallest: float  # bytes that the most frugal of all legal ones needs
    layouts: list[JobPlan]
    needed: list[float]  # bytes
    bound: list[float]  # seconds: no step takes less


def survey_families(space: PlanSpace, efficiency: Efficiency | None, families: Sequence[PlanFamily]) -> Survey:
    """All layouts of families: which fit, and what their steps take at least.

    Larger microbatches need no less memory, so what does not fit with small ones is not looked at with larger ones.
    """
    job, memory = _same(space.job), float(space.job.platform.gpu.memory)
    out = Survey(0, float("inf"), [], [], [])
    legal, smallest, full = 0, float("inf"), set[tuple[object, ...]]()
    for family in families:
        for x in space.layouts(family):
            legal, key = legal + 1, (x.gpus, x.parallel, x.recompute)
            if key in full:
                continue
            made = apply_plan(job, x)
            needed = most_needed(made)
            smallest = min(smallest, needed)
            if needed > memory:
                full.add(key)
                continue
            out.layouts.append(x)
            out.needed.append(needed)
            out.bound.append(step_lower_bound(made, efficiency))
    return out._replace(legal=legal, smallest=smallest)


def price_plans(job: Job, efficiency: Efficiency | None, layouts: Sequence[JobPlan]) -> list[float]:
    """Seconds of their steps."""
    job = _same(job)
    return [float(job_step(apply_plan(job, x), efficiency).seconds) for x in layouts]


@lru_cache(8)
def _same(job: Job) -> Job:
    """The first job that equals this one: copies that come from elsewhere are slower to look up things by."""
    return job
