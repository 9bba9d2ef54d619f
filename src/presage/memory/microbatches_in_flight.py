"""How many microbatches (of a chunk) a pipeline stage holds at once."""

from __future__ import annotations

from presage.configs.job import Job
from presage.parallel.schedules import schedule_kind

__all__ = ["in_flight"]


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most.

    Interleaved as Megatron-Core warms up: two for every later stage, and all chunks but the last of `pp` microbatches.
    """
    p = job.parallel
    if p.pp == 1:
        return p.virtual
    many = max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    if schedule_kind(p.schedule).phased:
        return many * p.virtual
    if p.virtual > 1:
        return min((p.pp - stage - 1) * 2 + (p.virtual - 1) * p.pp + 1, many * p.virtual)
    return min(many, p.pp - stage)
