"""Attention of a layer, as graph ops on one rank: multi-head, grouped or latent, fused or not."""

from __future__ import annotations

import numpy as np

from presage.configs.job import Job
from presage.costs.families.attention import AttentionShape
from presage.parallel.plan import Axis
from presage.prediction.jobs.layer_blocks import RankSizes, linear, memory_pass
from presage.prediction.jobs.layer_graph import LOW, LayerBuilder, PendingOp

UNFUSED = ("unfused", "fused-softmax")


def plain_attention(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Multi-head, grouped-query or multi-query attention."""
    m = job.model
    into = s.head * m.head_dim * (2 if m.gated_attention else 1) + 2 * s.keys * m.head_dim
    rotated = s.tokens * (s.head + s.keys) * m.head_dim * s.bytes if m.positions == "rope" else 0
    fused = job.framework.compiled or job.framework.fused_norms
    passes = 2 if fused else 13  # halves turned, joined, two products, a sum
    rope = memory_pass(b, passes * rotated)
    linear(b, job, s, "qkv", (s.tokens, into, s.width), enters=True)
    b.block("rope", [rope], [rope])
    _attention_core(b, job, s, m.head_dim, m.head_dim, s.keys)
    if m.gated_attention:
        once = float(s.tokens * s.head * m.head_dim * s.bytes)
        b.block("attention_gate", [b.memory_bound(3 * once)], [b.memory_bound(5 * once)])
    linear(b, job, s, "proj", (s.tokens, s.width, s.head * m.head_dim), leaves=True)


def latent_attention(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Multi-head latent attention: narrow GEMMs that every rank does, then wide ones cut by heads."""
    z = job.model.latent
    assert z is not None
    dim = z.rope + z.nope
    linear(b, job, s, "down_proj", (s.between, (z.query_rank or 0) + z.key_rank + z.rope, s.width))
    narrow = b.memory_bound(2.0 * s.between * (z.query_rank + z.key_rank) * s.bytes, 2, "norm")
    b.block("norm", [narrow], [narrow, narrow])
    if z.query_rank:
        linear(b, job, s, "up_proj", (s.tokens, s.head * dim, z.query_rank), enters=True)
    else:
        linear(b, job, s, "qkv", (s.tokens, s.head * dim, s.width), enters=True)
    linear(b, job, s, "up_proj", (s.tokens, s.head * (z.nope + z.value), z.key_rank), enters=True)
    joined = s.tokens * s.head * (2 * dim + z.value) * s.bytes  # rotated parts are joined to the others
    rope = b.memory_bound(2.0 * joined, 3)
    b.block("rope", [rope], [rope])
    _attention_core(b, job, s, dim, z.value, s.head)
    linear(b, job, s, "proj", (s.tokens, s.width, s.head * z.value), leaves=True)


def _attention_core(b: LayerBuilder, job: Job, s: RankSizes, dim: int, value: int, keys: int) -> None:
    """Attention itself."""
    if job.framework.attention in UNFUSED:
        return _unfused(b, job, s, dim, value)
    p, m = job.parallel, job.model
    queries, seen, masked = max(1, job.sequence // p.cp), job.sequence, m.causal
    documents = cut_documents(job, s.window)
    window = 0 if m.chunked or s.window >= job.sequence else s.window
    if p.cp > 1 and m.causal:
        seen, masked = min(keys_seen(job, documents), window or job.sequence), False
    packed = documents if p.cp == 1 else ()
    shape = AttentionShape(job.micro_batch, s.head, keys, queries, seen, dim, value, masked, window, documents=packed)
    forward, backward = b.attention(shape), b.attention(shape._replace(backward=True))
    out = s.tokens * s.head * value * s.bytes
    sums = memory_pass(b, 2.0 * out)  # of outputs times their gradients, by row
    if p.cp == 1:
        return b.block("core_attn", [forward], [sums, backward])
    joined = memory_pass(b, 4.0 * out)  # what the parts gave is put together, scaled anew
    sent = float(job.micro_batch * job.sequence * (keys * (dim + value)) * s.bytes)  # keys and values of other ranks
    gather = b.collective("all_gather", sent, Axis.CP, forward)
    gather_back = b.collective("all_gather", 2 * sent, Axis.CP, backward)
    return b.block("core_attn", [gather, forward, joined], [gather_back, sums, backward, joined])


def cut_documents(job: Job, window: int) -> tuple[int, ...]:
    """What a query sees of a row: its document, or in a layer with chunks its chunk of it; empty: the whole row."""
    documents = job.documents
    if not (job.model.chunked and window and window < job.sequence):
        return documents
    return tuple(min(window, n - i) for n in documents or (job.sequence,) for i in range(0, n, window))


def keys_seen(job: Job, documents: tuple[int, ...]) -> int:
    """Keys that a context-parallel rank's queries see on average under a causal mask: half of their document where each
    rank has an early and a late part of it; else those of the rank that sees most."""
    p, rows = job.parallel, documents or (job.sequence,)
    if job.balanced:
        return max(1, round(sum(n * n for n in rows) / sum(rows) / 2))
    part, before = max(1, job.sequence // p.cp), np.concatenate([np.arange(n) for n in rows])
    return max(1, round(max(float(before[i * part : (i + 1) * part].mean()) for i in range(p.cp))))


def _unfused(b: LayerBuilder, job: Job, s: RankSizes, dim: int, value: int) -> None:
    """Scores as a matrix in memory: a GEMM, a softmax, dropout, a GEMM."""
    queries, keys, heads = max(1, job.sequence // job.parallel.cp), job.sequence, job.micro_batch * s.head
    kind = "bf16" if s.kind in LOW else s.kind
    scores = float(heads) * queries * keys
    softmax, softmax_back = _softmax(b, job, s, scores)
    drop = memory_pass(b, (2 * s.bytes + 1) * scores, "dropout") if job.framework.dropout else None
    moved = 2.0 * s.bytes * job.micro_batch * queries * s.head * dim
    heads_in, heads_out = b.memory_bound(2 * moved, 2, "copy"), b.memory_bound(moved, 1, "copy")

    def bmm(m: int, n: int, k: int) -> PendingOp:
        return b.gemm(m, n, k, kind, batch=heads)

    gradients = [
        bmm(queries, dim, keys),
        bmm(keys, dim, queries),
        bmm(queries, keys, value),
        bmm(keys, value, queries),
    ]
    b.block(
        "core_attn",
        [heads_in, bmm(queries, keys, dim), softmax, drop, bmm(queries, value, keys), heads_out],
        [heads_out, *gradients, drop, softmax_back, heads_in],
    )


def _softmax(b: LayerBuilder, job: Job, s: RankSizes, scores: float) -> tuple[PendingOp, PendingOp]:
    """Forward and backward, of so many scores; Megatron's kernel skips those under a causal mask."""
    if not softmax_fused(job):
        plain = b.memory_bound((6 * s.bytes + 4) * scores, 4, "softmax")
        return plain, plain
    seen = 0.5 if job.model.causal and not job.framework.compiled else 1.0
    forward, backward = (1 + seen) * s.bytes * scores, (1 + 2 * seen) * s.bytes * scores
    return b.memory_bound(forward, 1, "softmax"), b.memory_bound(backward, 1, "softmax")


def softmax_fused(job: Job) -> bool:
    """Megatron's kernel takes four rows of scores at a time, of fp16 or bf16, and falls back to PyTorch's ops where
    heads times samples is no multiple of that."""
    if job.framework.compiled or job.framework.attention not in UNFUSED:
        return True
    return job.framework.attention == "fused-softmax" and job.micro_batch * job.model.heads // job.parallel.tp % 4 == 0
