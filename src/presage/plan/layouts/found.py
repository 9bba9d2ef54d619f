"""What a search found: the best layouts with their steps, the front of time and memory, what each knob is worth."""

from __future__ import annotations

from dataclasses import dataclass

from presage.jobs.efficiency import Efficiency
from presage.jobs.flops import job_flops, peak_of
from presage.jobs.job import Job
from presage.jobs.memory import job_memory
from presage.jobs.step import step
from presage.plan.layouts.layout import Layout, layout_of

__all__ = ["Counts", "Found", "Priced", "Short", "priced"]


@dataclass(frozen=True)
class Priced:
    """A layout with all that is known of it."""

    job: Job
    seconds: float
    needed: float  # bytes of the worst stage
    parts: dict[str, float]  # seconds of its step by what they go to

    @property
    def layout(self) -> Layout:
        return layout_of(self.job)

    @property
    def mfu(self) -> float:
        """Of the peak, by the model's FLOPs."""
        _, peak = peak_of(self.job.platform.gpu, self.job.precision)
        return job_flops(self.job).model / (self.seconds * self.job.gpus * peak)

    @property
    def tokens_per_gpu(self) -> float:
        """A second."""
        return self.job.tokens / self.seconds / self.job.gpus

    @property
    def fits(self) -> bool:
        return self.needed <= self.job.platform.gpu.memory


def priced(job: Job, efficiency: Efficiency | None = None) -> Priced:
    """A job as it is."""
    done = step(job, efficiency)
    return Priced(job, float(done.seconds), job_memory(job).needed, {k: float(v) for k, v in done.parts.items()})


@dataclass(frozen=True)
class Short:
    """A layout with its time and memory alone."""

    layout: Layout
    seconds: float
    needed: float


@dataclass(frozen=True)
class Counts:
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
class Found:
    """Best first. `own` is the job's own plan, where it can be run on these GPUs."""

    objective: str
    best: tuple[Priced, ...]
    front: tuple[Short, ...]
    by_knob: dict[str, dict[str, Short]]
    own: Priced | None
    counts: Counts
    complete: bool  # whether all that had to be priced was
    took: float  # seconds
    efficiency: Efficiency | None
