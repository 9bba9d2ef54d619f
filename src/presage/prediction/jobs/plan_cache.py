"""PlanCache: values computed for one plan of a job that hold for others too, so that thousands of plans pay once.

Plans of a job have its model, platform, sequence, precision and software in common. Beyond these, a layer's price
depends on a few degrees (`layer_key`), and whatever is kept says in its key what else it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from presage.configs.job import Job
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.work_pace import EVEN, WorkPaces

Value = TypeVar("Value")


class PlanCache:
    """Values by key, each made once."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        value: Value | None = self.found.get(key)
        if value is None:
            value = self.found[key] = make()
        return value


def plan_cache(job: Job, efficiency: Efficiency, paces: WorkPaces = EVEN) -> PlanCache:
    """The one that all plans of a job share; what is asked at odd paces is not kept for others."""
    if paces is not EVEN:
        return PlanCache()
    common = (
        job.model,
        job.platform,
        job.sequence,
        job.precision,
        job.framework,
        job.overlap,
        job.tuning,
        job.recipe,
        job.lengths,
        job.balanced,
    )
    return _known(*common, efficiency)


@lru_cache(128)
def _known(*_: object) -> PlanCache:
    return PlanCache()


def clear_plan_cache() -> None:
    """Drop all cached values."""
    _known.cache_clear()


def layer_key(job: Job) -> tuple[Any, ...]:
    """What a layer's price depends on besides what all plans of a job have in common."""
    p = job.parallel
    return *p.layer_degrees, job.micro_batch
