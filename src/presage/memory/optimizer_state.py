"""Bytes per parameter of weights, gradients and optimizer state, and how each is sharded."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.transformer import Transformer

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
    """Bytes per parameter of a rank, after sharding."""

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
    copies = max(1, job.expert_dp * ranks // max(1, job.dp * p.cp))  # of an expert, those that share one copy
    return OptimizerState(
        *_cut(p.zero, weight, gradient, optimizer, ranks), *_cut(p.zero, weight, gradient, optimizer, copies)
    )


def _whole(job: Job) -> tuple[float, float, float]:
    """Bytes per parameter before sharding."""
    f, p = job.framework, job.parallel
    moments = MOMENTS.get(job.optimizer, 8.0)
    if job.optimizer == "adam-16bit" and job.precision in ("bf16", "fp16"):
        return 2.0, 2.0, moments
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


# ---- Shares: the parameters one rank holds, by what they belong to, cut as tensor-parallel frameworks cut them.

VOCAB_MULTIPLE = 128  # vocabularies are padded to a multiple of this times the tensor-parallel ranks


class ParameterShards(NamedTuple):
    """Parameters of a rank before any sharding over data-parallel ranks."""

    attention: float  # of a layer
    dense: float  # a layer without experts
    moe: float  # a layer with experts, all but these
    experts: float  # its routed experts
    embedding: float
    positions: float
    head: float  # the matrix
    norm: float  # the last one
    further: float  # one more predicted token: its layer and projection, but its experts
    further_experts: float


def parameter_shards(job: Job) -> ParameterShards:
    m, p = job.model, job.parallel
    tp = p.tp
    attention = m.attention_parameters(tp)
    fixed = attention + 2 * m.norm_parameters
    e = m.experts
    moe = experts = 0.0
    if e is not None:
        moe = fixed + m.router_parameters + (m.block_parameters(e.shared_ffn) / tp if e.shared_ffn else 0.0)
        experts = e.experts * m.block_parameters(e.ffn, e.latent) / (p.ep * p.expert_tp)
    dense = fixed + m.block_parameters(m.ffn) / tp
    vocab = padded(m.vocab, tp) * m.hidden
    positions = float(m.max_positions * m.hidden) if m.positions == "learned" else 0.0
    further = 2.0 * m.hidden**2 / tp + 3 * m.norm_parameters + (moe if e else dense) if m.predicted else 0.0
    return ParameterShards(
        attention, dense, moe, experts, vocab, positions, vocab, float(m.norm_parameters), further, experts
    )


def padded(vocab: int, tp: int) -> int:
    """A rank's rows of the vocabulary."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * VOCAB_MULTIPLE if tp > 1 else vocab


def key_heads(m: Transformer, tp: int) -> float:
    """Heads of keys on one rank."""
    return max(1.0, m.kv_heads / tp)
