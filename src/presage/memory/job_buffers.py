"""Buffers: what a framework holds beside weights and activations, and what is outside its allocator."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.memory.activations import number_bytes, transformer_engine
from presage.memory.parameter_shards import ParameterShards

__all__ = ["Buffers", "buffers", "outside"]

GIB, MIB = 1024.0**3, 1024.0**2
# A process on an A100 with one number on it, as the BLOOM chronicles tell (1573 MiB: CUDA 11 loads all kernels at
# once); about a third with lazy loading, since CUDA 11.7.
CONTEXT, LAZY_CONTEXT = 1573 * MIB, 0.5 * GIB
# Of one NCCL communicator: 544 MB for two A100, 688 MB for more (github.com/NVIDIA/nccl issue 964).
COMMUNICATOR = 0.6e9
DEEPSPEED_BUCKET = 5e8  # elements, its default
OLD = ("deepspeed", "megatron-2021")


class Buffers(NamedTuple):
    """Bytes: fixed ones, by the parameter of a stage, and by what a stage has."""

    fixed: float
    per_parameter: float
    most_parameters: float  # more than so many need no more
    per_end: float  # of embedding and head
    head: float
    dense: float  # where there is a layer without experts
    moe: float  # where there is one with
    both: float  # of these two, what a stage with both kinds has once
    per_flight: float


def buffers(job: Job, s: ParameterShards) -> Buffers:
    p, f = job.parallel, job.framework
    fixed, per_flight = _transfers(job)
    fixed += job.platform.gpu.cublas_workspace
    per_parameter = per_end = dense = moe = both = head = 0.0
    most = float("inf")
    if p.fsdp or p.zero >= 3:
        per_parameter, per_end, layer = _gathered(job)
        dense, moe = layer * s.dense, layer * (s.moe + s.experts)
        both = min(dense, moe)
    elif f.host == "deepspeed" and p.zero:
        per_parameter, most = 2.0, DEEPSPEED_BUCKET
    elif f.host == "torch" and job.dp > 1 and p.zero == 0:
        per_parameter = float(f.gradient_bytes)  # DDP's buckets
    if transformer_engine(job):
        # gradients go straight into the accumulated ones; autograd gets a stand-in for each shape of weight, kept
        e, x = number_bytes(job.precision), job.model.experts
        one = s.experts * p.ep / x.experts if x else 0.0
        head, dense, moe, both = e * s.head, dense + e * s.dense, moe + e * (s.moe + one), both + e * s.attention
    return Buffers(fixed, per_parameter, most, per_end, head, dense, moe, both, per_flight)


def _gathered(job: Job) -> tuple[float, float, float]:
    """Parameters of other ranks: bytes by the parameter of the stage, of its ends, of one layer. One layer is in use,
    the next on its way, in the buffer it arrives in; then a gradient and the buffer it is sent from. A pipeline keeps
    all parameters, and all gradients until its last microbatch."""
    f, p = job.framework, job.parallel
    if p.pp > 1:
        return f.gather_bytes + f.reduce_bytes, 0.0, 0.0
    if p.zero == 2:
        return f.gather_bytes, 0.0, 2.0 + f.reduce_bytes
    return 0.0, f.gather_bytes, 3.0 * f.gather_bytes + 2 + f.reduce_bytes


def _transfers(job: Job) -> tuple[float, float]:
    """Between stages and between tensor-parallel ranks: bytes, and bytes by the microbatch in flight."""
    p = job.parallel
    whole = number_bytes(job.precision) * job.model.hidden * job.rank_tokens
    outer = whole / p.tp if p.sequence_parallel else whole
    total = 2 * outer if p.pp > 1 else 0.0
    if p.tp > 1 and p.sequence_parallel:
        total += whole
    if job.overlap.tensor and p.tp > 1:
        total += 4 * whole  # of each product that runs beside a transfer: both ways, both passes
    kept = outer if p.pp > 1 and job.framework.host in OLD else 0.0  # later ones free what they have sent
    return total, kept


def outside(job: Job) -> float:
    """Of the driver and of NCCL: no allocator of a framework counts it."""
    p = job.parallel
    old = job.framework.host in OLD
    groups = sum(n > 1 for n in (p.tp, p.pp, p.cp, p.ep, job.dp)) + (job.gpus > 1)
    if old and p.pp > 1:  # one for each neighbour, one for all of a replica, one for tied embeddings
        groups += 2 + job.model.tied
    return (CONTEXT if old else LAZY_CONTEXT) + groups * COMMUNICATOR
