"""Known: what was worked out for one plan of a job and holds for its others, so that thousands of them pay for it once.

Plans of a job have its model, platform, sequence, precision and software in common. Beyond these, a layer's price
depends on a few degrees (`layer_key`), and whatever is kept says in its key what else it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from presage.configs.job import Job
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.work_pace import EVEN, Paces

__all__ = ["Known", "forget", "known_of", "layer_key"]

Value = TypeVar("Value")


class Known:
    """Values by key, each made once."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        value: Value | None = self.found.get(key)
        if value is None:
            value = self.found[key] = make()
        return value


def known_of(job: Job, efficiency: Efficiency, paces: Paces = EVEN) -> Known:
    """The one that all plans of a job share; what is asked at odd paces is not kept for others."""
    if paces is not EVEN:
        return Known()
    return _known(job.model, job.platform, job.sequence, job.precision, job.framework, job.overlap, efficiency)


@lru_cache(128)
def _known(*_: object) -> Known:
    return Known()


def forget() -> None:
    """Everything."""
    _known.cache_clear()


def layer_key(job: Job) -> tuple[Any, ...]:
    """What a layer's price depends on besides what all plans of a job have in common."""
    p = job.parallel
    return *p.layer_degrees, job.micro_batch
