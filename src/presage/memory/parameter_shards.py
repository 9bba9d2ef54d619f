"""Shares: the parameters one rank holds, by what they belong to, cut as tensor-parallel frameworks cut them."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.transformer import Transformer

__all__ = ["ParameterShards", "parameter_shards"]

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
    attention = _attention(m, tp)
    fixed = attention + 2 * m.norm_parameters
    e = m.experts
    moe = experts = 0.0
    if e is not None:
        moe = fixed + m.hidden * e.experts + (m.block_parameters(e.shared_ffn) / tp if e.shared_ffn else 0.0)
        experts = e.experts * m.block_parameters(e.ffn) / (p.ep * p.expert_tp)
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


def _attention(m: Transformer, tp: int) -> float:
    """Of one layer; with more ranks than keys' heads every rank has one of them."""
    h, bias = m.hidden, int(m.bias)
    if m.latent is None:
        out = m.heads * m.head_dim / tp
        return (h + bias) * (out + 2 * key_heads(m, tp) * m.head_dim) + out * h + bias * h
    a = m.latent
    query = h * a.query_rank + a.query_rank * (1 + m.query_width / tp) if a.query_rank else h * m.query_width / tp
    key = h * (a.key_rank + a.rope) + a.key_rank * (1 + m.heads * (a.nope + a.value) / tp)
    return query + key + m.value_width / tp * h


def key_heads(m: Transformer, tp: int) -> float:
    """Heads of keys on one rank."""
    return max(1.0, m.kv_heads / tp)
