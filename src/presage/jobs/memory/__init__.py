"""Memory of a job: weights, gradients, optimizer, activations and buffers of each stage, and whether it fits."""

from presage.jobs.memory.flight import in_flight
from presage.jobs.memory.helps import Help, helps
from presage.jobs.memory.memory import JobMemory, StageMemory, job_memory

__all__ = ["Help", "JobMemory", "StageMemory", "helps", "in_flight", "job_memory"]
