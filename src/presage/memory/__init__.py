"""Memory of a job: weights, gradients, optimizer, activations and buffers of each stage, and whether it fits."""

from presage.memory.job_memory import JobMemory, StageMemory, job_memory
from presage.memory.microbatches_in_flight import in_flight
from presage.memory.savings import Help, helps

__all__ = ["Help", "JobMemory", "StageMemory", "helps", "in_flight", "job_memory"]
