"""Buffers of a job: what a framework holds beside weights and activations, what is outside its allocator, its loss."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.frameworks import generation
from presage.configs.job import Job
from presage.configs.tuning import BASES
from presage.memory.activations import number_bytes, transformer_engine
from presage.memory.optimizer_state import ParameterShards, padded

GIB, MIB = 1024.0**3, 1024.0**2
# A process on an A100 with one number on it, as the BLOOM chronicles tell (1573 MiB: CUDA 11 loads all kernels at
# once); about a third with lazy loading, since CUDA 11.7.
CONTEXT, LAZY_CONTEXT = 1573 * MIB, 0.5 * GIB
# Of one NCCL communicator: 544 MB for two A100, 688 MB for more (github.com/NVIDIA/nccl issue 964).
COMMUNICATOR = 0.6e9
# Transformer Engine's workspace for cuBLASLt (pytorch/module/base.py), from Hopper on and before.
ENGINE_WORKSPACE, OLD_WORKSPACE = 32 * MIB, 4 * MIB
USERBUFFER_STREAMS = 3  # with products beside transfers it has one for each of their streams
GROUPED_STREAMS = 4  # and four more for experts' grouped products
DEEPSPEED_BUCKET = 5e8  # elements, its default
OLD = ("deepspeed", "megatron-2021")


class Buffers(NamedTuple):
    """Bytes, whatever the size of microbatches: fixed ones, by the parameter of a stage, and by what a stage has."""

    fixed: float
    per_parameter: float
    most_parameters: float  # more than so many need no more
    per_end: float  # of embedding and head
    head: float
    dense: float  # where there is a layer without experts
    moe: float  # where there is one with
    both: float  # of these two, what a stage with both kinds has once


def buffers(job: Job, s: ParameterShards) -> Buffers:
    p, f = job.parallel, job.framework
    fixed = workspaces(job) + _unpacked(job)
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
    if transformer_engine(job) and f.fused_accumulation:
        # gradients go straight into the accumulated ones; autograd gets a stand-in for each shape of weight, kept
        e, x = number_bytes(job.precision), job.model.experts
        one = s.experts * p.ep / x.experts if x else 0.0
        head, dense, moe, both = e * s.head, dense + e * s.dense, moe + e * (s.moe + one), both + e * s.attention
    return Buffers(fixed, per_parameter, most, per_end, head, dense, moe, both)


def _unpacked(job: Job) -> float:
    """A matrix of frozen weights in 16 bits, unpacked before it is multiplied."""
    x = job.model.experts
    return 2.0 * job.model.hidden * (x.ffn if x else job.model.ffn) if job.tuning.packed else 0.0


def scores_buffer(job: Job) -> float:
    """Megatron-Core's own attention adds products into a buffer for all scores, which it keeps."""
    f, p = job.framework, job.parallel
    if f.host != "megatron-core" or f.attention != "fused-softmax":
        return 0.0
    return number_bytes(job.precision) * job.model.heads / p.tp * job.sequence * job.rank_tokens


def input_masks(job: Job) -> float:
    """Masks of sequence x sequence, a byte each, of a microbatch where tokens or labels are read."""
    return float(job.sequence) * job.rank_tokens if job.framework.attention_masks else 0.0


def workspaces(job: Job) -> float:
    """Workspaces of cuBLAS: PyTorch has one for each of its two threads, Transformer Engine others."""
    gpu = job.platform.gpu
    megatron = job.framework.host in ("megatron-core", "graph")
    engine = (ENGINE_WORKSPACE if generation(gpu) >= 9 else OLD_WORKSPACE) if megatron else 0.0
    if job.overlap.tensor and job.parallel.tp > 1:
        engine *= USERBUFFER_STREAMS
    if job.model.experts and job.framework.grouped_experts:
        engine += GROUPED_STREAMS * (ENGINE_WORKSPACE if engine >= ENGINE_WORKSPACE else OLD_WORKSPACE)
    return (2 if megatron else 1) * gpu.cublas_workspace + (engine if transformer_engine(job) else 0.0)


def _gathered(job: Job) -> tuple[float, float, float]:
    """Parameters of other ranks: bytes by the parameter of the stage, of its ends, of one layer. One layer is in use,
    the next on its way, in the buffer it arrives in; then a gradient and the buffer it is sent from. A pipeline keeps
    all parameters, and all gradients until its last microbatch."""
    f, p = job.framework, job.parallel
    if f.foreach:  # PyTorch's first FSDP frees a layer before the next arrives
        frozen = job.tuning.frozen
        return 0.0, f.gather_bytes, BASES[job.tuning.base] if frozen else f.gather_bytes + 2.0 + f.reduce_bytes
    if p.pp > 1:
        return f.gather_bytes + f.reduce_bytes, 0.0, 0.0
    if p.zero == 2:
        return f.gather_bytes, 0.0, 2.0 + f.reduce_bytes
    return 0.0, f.gather_bytes, 3.0 * f.gather_bytes + 2 + f.reduce_bytes


def token_buffers(job: Job) -> tuple[float, float]:
    """Buffers that grow with microbatches, between stages and between tensor-parallel ranks and for scores: bytes, and
    bytes by the microbatch in flight."""
    p = job.parallel
    whole = number_bytes(job.precision) * job.model.hidden * job.rank_tokens
    outer = whole / p.tp if p.sequence_parallel else whole
    total = 2 * outer if p.pp > 1 else 0.0
    if p.tp > 1 and p.sequence_parallel:
        total += whole
    if job.overlap.tensor and p.tp > 1:
        total += 4 * whole  # of each product that runs beside a transfer: both ways, both passes
    kept = outer if p.pp > 1 and job.framework.host in OLD else 0.0  # later ones free what they have sent
    return total + scores_buffer(job), kept


def outside(job: Job) -> float:
    """Bytes of the driver and of NCCL, which no framework's allocator counts."""
    p = job.parallel
    old = job.framework.host in OLD
    groups = sum(n > 1 for n in (p.tp, p.pp, p.cp, p.ep, job.dp)) + (job.gpus > 1)
    if old and p.pp > 1:  # one for each neighbour, one for all of a replica, one for tied embeddings
        groups += 2 + job.model.tied
    return (CONTEXT if old else LAZY_CONTEXT) + groups * COMMUNICATOR


# ---- Loss: the logits of one microbatch and what the cross entropy makes of them, where the head is.


def logits(job: Job) -> tuple[float, float]:
    """Bytes at the worst moment, and of freed blocks that nothing of this size can use again."""
    m, p, f = job.model, job.parallel, job.framework
    e = number_bytes(job.precision)
    count = float(padded(m.vocab, p.tp)) * job.rank_tokens * (1 + m.predicted)
    back = (
        e * (m.hidden + (m.hidden / p.tp if p.sequence_parallel else 0.0)) * job.rank_tokens
    )  # gradient of the head's input
    if f.logit_bytes:
        return f.logit_bytes * count, 0.0
    if f.fused_loss:  # gradients are written over the logits; a compiled loss writes them beside
        return (2 * e if f.compiled else e) * count + back, 0.0
    if f.host in ("megatron-core", "graph"):
        return (e + 4.0) * count, 0.0  # the logits, and in fp32, where exponentials are written over them
    if f.host in ("deepspeed", "megatron-2021"):
        return (e + 8.0) * count, 0.0  # the logits, in fp32, and their exponentials
    # PyTorch: log-probabilities, their gradient and that of the logits, all in fp32; the logits are free by then
    return 12.0 * count, e * count
