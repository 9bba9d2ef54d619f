"""What a search found: the best layouts with their steps, the front of time and memory, what each knob is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from presage.configs.job import Job
from presage.memory import job_memory
from presage.noise.sampling import Estimate
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.jobs.job_step import job_step
from presage.search.layout import JobPlan

__all__ = ["OnProgress", "PricedPlan", "SearchCounts", "SearchProgress", "SearchResult", "predict_plan"]


def predict_plan(job: Job, efficiency: Efficiency | None = None) -> JobResult:
    """A job as it is, with all that is known of its step."""
    return JobResult(job, job_step(job, efficiency), job_memory(job))


class SearchProgress(NamedTuple):
    """Where a search stands."""

    what: str  # surveying, pricing, drawing
    done: int
    total: int
    plans: int  # surveyed or priced so far
    best: float  # of what is known


OnProgress = Callable[[SearchProgress], None]


@dataclass(frozen=True)
class PricedPlan:
    """A layout with its time and memory alone."""

    layout: JobPlan
    seconds: float
    needed: float


@dataclass(frozen=True)
class SearchCounts:
    """How many layouts there were."""

    legal: int
    too_large: int  # that need more memory than a GPU has
    set_aside: int  # that were proven to be no better, without a price
    priced: int
    smallest: float  # bytes that the most frugal legal one needs

    @property
    def fit(self) -> int:
        return self.legal - self.too_large


@dataclass(frozen=True)
class SearchResult:
    """Best first. `own` is the job's own plan, where it can be run on these GPUs."""

    objective: str
    best: tuple[JobResult, ...]
    front: tuple[PricedPlan, ...]
    by_knob: dict[str, dict[str, PricedPlan]]
    own: JobResult | None
    counts: SearchCounts
    complete: bool  # whether all that had to be priced was
    took: float  # seconds
    efficiency: Efficiency | None
    cloud: tuple[PricedPlan, ...] = ()  # all that were priced, best first
    late: tuple[Estimate, ...] = ()  # of the best, and then of `own`: what 19 of 20 steps take at most
    noise: str = ""  # where that noise is from
