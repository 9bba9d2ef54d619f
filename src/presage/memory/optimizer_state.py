"""State: bytes a parameter of weights, gradients and the optimizer, and how far each is sharded."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job

__all__ = ["OptimizerState", "optimizer_state"]

MOMENTS = {
    "adam": 8.0,
    "adamw": 8.0,
    "adam-16bit": 4.0,  # everything in the weights' 16 bits, and no copy in fp32
    "lion": 4.0,
    "momentum": 4.0,
    "muon": 4.0,
    "adagrad": 4.0,
    "sgd": 0.0,
    "none": 0.0,
}
# What products in low precision keep of a weight beside (or in place of) the one in 16 bits: itself and its transpose.
COPIES = {"fp8": 2.0, "mxfp8": 2.0 + 1 / 16, "nvfp4": 1.0 + 1 / 8}


class OptimizerState(NamedTuple):
    """Bytes a parameter of a rank, sharded."""

    weight: float
    gradient: float
    optimizer: float
    expert_weight: float
    expert_gradient: float
    expert_optimizer: float


def optimizer_state(job: Job) -> OptimizerState:
    p = job.parallel
    weight, gradient, optimizer = _whole(job)
    ranks = max(1, job.sharding)
    copies = max(1, min(ranks, job.expert_dp))
    return OptimizerState(
        *_cut(p.zero, weight, gradient, optimizer, ranks), *_cut(p.zero, weight, gradient, optimizer, copies)
    )


def _whole(job: Job) -> tuple[float, float, float]:
    """Before sharding."""
    f, p = job.framework, job.parallel
    moments = MOMENTS.get(job.optimizer, 8.0)
    if p.fsdp or job.precision in ("fp32", "tf32"):  # the weights are in fp32: the optimizer has no copy of its own
        return 4.0, 4.0, moments
    weight = 2.0
    if job.precision in COPIES and f.host in ("megatron-core", "graph"):
        # a distributed optimizer keeps the weights themselves in fp8; fp4 is made from 16 bits
        alone = job.precision != "nvfp4" and p.zero > 0
        weight = COPIES[job.precision] + (0.0 if alone else 2.0)
    gradient = float(f.gradient_bytes)
    if f.host == "deepspeed" and p.zero <= 1 and job.precision == "bf16":
        gradient = 6.0  # its optimizer for bf16 adds up in fp32 what is there in bf16 too
    return weight, gradient, moments + (0.0 if job.optimizer == "adam-16bit" else 4.0)


def _cut(zero: int, weight: float, gradient: float, optimizer: float, ranks: int) -> tuple[float, float, float]:
    return (
        weight / (ranks if zero >= 3 else 1),
        gradient / (ranks if zero >= 2 else 1),
        optimizer / (ranks if zero >= 1 else 1),
    )
