"""How many microbatches (of a chunk) a pipeline stage holds at once."""

from __future__ import annotations

from presage.configs.job import Job
from presage.parallel.schedules import Extent, schedule_kind

__all__ = ["in_flight"]


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most."""
    p, microbatches = job.parallel, max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    return schedule_kind(p.schedule).in_flight(stage, Extent(p.pp, microbatches, p.virtual, 1))
