"""What a checkpoint of a job takes, from its size and the storage."""

from __future__ import annotations

from dataclasses import replace

from presage.configs.job import Job
from presage.errors import PresageError
from presage.memory.optimizer_state import optimizer_state
from presage.runs.failures import Reliability
from presage.runs.run import CheckpointPlan

__all__ = ["SETUP", "STORAGE", "checkpoint_bytes", "checkpoints_of"]

GB, TB = 1e9, 1e12
STORAGE = 2000 * GB / 3000  # bytes/s a node of 8 GPUs: 2 TB/s, sustained, for the 24,000 GPUs of Llama 3's cluster
SETUP = 5.0  # seconds to stop, plan and agree: assumed


def checkpoint_bytes(job: Job) -> float:
    """Weights and the optimizer's state, each once."""
    whole = optimizer_state(replace(job, parallel=replace(job.parallel, zero=0)))
    return job.model.parameters * (whole.weight + whole.optimizer)


def checkpoints_of(
    job: Job,
    reliability: Reliability,
    seconds: float | None = None,
    background: float = 0.0,
    storage: float | None = None,
    every: int | None = None,
) -> CheckpointPlan:
    """As said, or 5 s + bytes / storage; `background` is the share of the writing that steps go on under."""
    if not 0 <= background <= 1:
        raise PresageError(f"{background:g} of the writing in the background: it should be 0 to 1")
    if seconds is not None:
        return CheckpointPlan(seconds, 0.0, every, "as said")
    nodes = job.gpus / reliability.node_gpus
    rate, nbytes = storage or STORAGE * nodes, checkpoint_bytes(job)
    writing = nbytes / rate
    told = f"{SETUP:g} s + {nbytes / TB:.3g} TB at {rate / GB:,.4g} GB/s"
    told += f", {background:.0%} of the writing in the background" if background else ""
    return CheckpointPlan(SETUP + (1 - background) * writing, background * writing, every, told)
