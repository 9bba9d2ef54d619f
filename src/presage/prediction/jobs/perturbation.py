"""Step time with one class of work faster or slower."""

from __future__ import annotations

from dataclasses import dataclass

from presage.configs.job import Job
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.work_pace import WorkPaces

BY = 0.1  # of its seconds
LEAST = 5e-5  # of the step: what moves it less does not matter


@dataclass(frozen=True, slots=True)
class WorkClassSensitivity:
    """A class of work of `WorkPaces`, and the step time with it faster and slower, in seconds."""

    name: str
    quicker: float
    slower: float


def perturb(job: Job, efficiency: Efficiency | None = None, by: float = BY) -> tuple[WorkClassSensitivity, ...]:
    """Classes of work that change the step, largest effect first."""
    now = job_step(job, efficiency).seconds
    found = []
    for name in WorkPaces._fields:
        ends = [job_step(job, efficiency, WorkPaces(**{name: times})).seconds for times in (1 - by, 1 + by)]
        found.append(WorkClassSensitivity(name, *ends))
    matter = (s for s in found if max(abs(s.quicker - now), abs(s.slower - now)) > LEAST * now)
    return tuple(sorted(matter, key=lambda s: s.quicker))
