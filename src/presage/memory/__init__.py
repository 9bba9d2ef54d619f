"""Memory of a job: weights, gradients, optimizer, activations and buffers of each stage, and whether it fits."""

from presage.memory.by_module import memory_by_module
from presage.memory.job_memory import SAFETY, JobMemory, StageMemory, in_flight, job_memory
from presage.memory.savings import MemorySaving, memory_savings

__all__ = [
    "SAFETY", "JobMemory", "MemorySaving", "StageMemory", "in_flight", "job_memory", "memory_by_module",
    "memory_savings",
]  # fmt: skip
