"""The blocks of one Transformer layer on one rank, as graph ops: one microbatch forward and backward.

Sizes are those of a rank: tokens of its microbatch and context part, widths over tensor-parallel ranks. With sequence
parallelism what lies between tensor-parallel blocks has only a part of the tokens.
"""

from __future__ import annotations

from presage.configs.job import Job
from presage.configs.transformer import CLAMPED
from presage.parallel.dispatchers import dispatcher
from presage.parallel.plan import Axis
from presage.prediction.jobs.attention_blocks import latent_attention, plain_attention
from presage.prediction.jobs.layer_blocks import (
    RankSizes,
    bias_gradient,
    builder,
    cast,
    linear,
    norm,
    residual,
    unpacked,
)
from presage.prediction.jobs.layer_graph import LayerBuilder, LayerGraph, PendingOp
from presage.prediction.jobs.recurrent_blocks import linear_attention, mamba

PADDED = 16  # tokens of an expert are a multiple of it
MIXERS = {"attention": plain_attention, "latent": latent_attention, "mamba": mamba, "linear": linear_attention}


def layer_graph(job: Job, layer: int) -> LayerGraph:
    """One layer, by its number."""
    b = builder(job)
    _mixing(b, job, layer)
    _feeding(b, job, layer)
    return b.layer()


def mixing_graph(job: Job, layer: int) -> LayerGraph:
    """The part of a layer that mixes tokens."""
    b = builder(job)
    _mixing(b, job, layer)
    return b.layer()


def feeding_graph(job: Job, layer: int) -> LayerGraph:
    """The rest of a layer: its feed-forward block or experts."""
    b = builder(job)
    _feeding(b, job, layer)
    return b.layer()


def _mixing(b: LayerBuilder, job: Job, layer: int) -> None:
    m = job.model
    s = RankSizes.of(job)._replace(window=m.window if m.has_window(layer) else 0)
    if mixes := m.mixer(layer):
        norm(b, job, s, "norm1")
        MIXERS["latent" if m.latent and mixes == "attention" else mixes](b, job, s)
        residual(b, job, s)


def _feeding(b: LayerBuilder, job: Job, layer: int) -> None:
    s = RankSizes.of(job)
    if feeds := job.model.feeds(layer):
        norm(b, job, s, "norm2")
        if feeds == "experts":
            expert_blocks(b, job, s)
        else:
            feed_forward(b, job, s, "mlp", job.model.ffn)
        residual(b, job, s)
    if more := job.framework.extra_bytes * s.between * s.width:  # casts and kernels that no law counts
        b.block("extra", [b.memory_bound(more / 3)], [b.memory_bound(2 * more / 3)])


# ---- feed-forward


def feed_forward(b: LayerBuilder, job: Job, s: RankSizes, name: str, ffn: int) -> None:
    """Two GEMMs with an activation between them, cut over tensor-parallel ranks."""
    width = max(1, ffn // s.tp)
    linear(b, job, s, f"{name}_up", (s.tokens, width * (2 if job.model.gated else 1), s.width), enters=True)
    activation(b, job, s, s.tokens * width)
    linear(b, job, s, f"{name}_down", (s.tokens, s.width, width), leaves=True)


def activation(b: LayerBuilder, job: Job, s: RankSizes, numbers: float) -> None:
    """An activation function with so many outputs; a gated one reads two inputs for each."""
    reads = 2 if job.model.gated else 1
    forward, backward = (reads + 1) * s.bytes * numbers, (2 * reads + 1) * s.bytes * numbers
    if job.model.activation == CLAMPED:  # both halves clamped and joined before Megatron's fused kernel, as they are
        forward, backward = forward + 4 * reads * s.bytes * numbers, backward + 5 * reads * s.bytes * numbers
    if job.framework.fused_norms or job.framework.compiled:
        return b.block("act", [b.memory_bound(forward)], [b.memory_bound(backward)])
    more = 2 * s.bytes * numbers * (1 if job.model.gated else 0)  # the gate's output is written and read again
    return b.block("act", [b.memory_bound(forward + more, 2)], [b.memory_bound(backward + 2 * more, 4)])


def expert_blocks(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Router, dispatch, expert GEMMs, combine; then shared experts. Experts of a latent width get tokens that were made
    narrow, and what they send back is made wide again."""
    m, p, e = job.model, job.parallel, job.model.experts
    assert e is not None
    tokens = s.between if p.sequence_parallel or p.tp == 1 else max(1, s.tokens // s.tp)  # each rank routes its part
    routed = tokens * e.top_k * e.busiest(p.ep)  # tokens that reach a rank's experts
    here, width = max(1, e.experts // p.ep), max(1, e.ffn // p.expert_tp)
    rows = max(1, round(routed * p.expert_tp / here / PADDED)) * PADDED
    router = b.gemm(tokens, e.experts, s.width, "fp32" if s.bytes == 4 else "tf32")
    sent = m.expert_width
    moved = tokens * e.top_k * sent * s.bytes
    there, home = _exchanges(b, job, float(tokens * sent * s.bytes), routed / tokens)
    scores = b.memory_bound(12.0 * tokens * e.experts, 8)
    d = dispatcher(job.dispatcher)
    ordered = None if d.sorts else b.memory_bound(2.0 * routed * sent * s.bytes, 2, "permute")
    # gathered by token; weighted, and added up by token with atomics
    out, back = (None if d.fused else b.memory_bound(share * moved, 3, "permute") for share in (2.0, 3.2))
    b.block("router", [router, scores], [scores, router, None if job.tuning.frozen else router])
    if e.latent:
        linear(b, job, s, "moe_narrow", (tokens, sent, s.width))
    b.block("dispatch", [out, there, ordered], [ordered, home, out])
    expert_gemms(b, job, s, "moe_up", here, (rows, width * (2 if m.gated else 1), sent))
    activation(b, job, s, rows * here * width)
    expert_gemms(b, job, s, "moe_down", here, (rows, sent, width))
    b.block("combine", [ordered, home, back], [back, there, ordered])
    if e.latent:
        linear(b, job, s, "moe_wide", (tokens, s.width, sent))
    if e.shared_ffn:
        feed_forward(b, job, s, "shared", e.shared_ffn)


def _exchanges(b: LayerBuilder, job: Job, nbytes: float, copies: float) -> tuple[PendingOp | None, PendingOp | None]:
    """Tokens to the ranks of their experts, and back: `nbytes` of a rank's tokens, each sent so many times."""
    ranks = job.parallel.ep * job.parallel.expert_tp
    if ranks == 1:
        return None, None
    if job.dispatcher != "allgather":
        both = b.collective("all_to_all", nbytes * copies, Axis.EP)
        return both, both
    whole = nbytes * job.parallel.ep  # of all ranks
    return b.collective("all_gather", whole, Axis.EP), b.collective("reduce_scatter", whole, Axis.EP)


def expert_gemms(b: LayerBuilder, job: Job, s: RankSizes, name: str, groups: int, size: tuple[int, int, int]) -> None:
    """A linear layer of each expert of a rank."""
    rows, n, k = size
    frozen, unpack = job.tuning.frozen, unpacked(b, job, name, float(groups * n * k))
    forward = b.gemm(rows, n, k, s.kind, groups=groups)
    back = b.gemm(rows, k, n, s.kind, groups=groups, weight_k_major=False)
    weight = None if frozen else b.weight_gradient(n, k, rows, s.kind, groups)
    bias = None if frozen else bias_gradient(b, job, s, rows * groups * n)
    ahead = [unpack, cast(b, job, s, rows * groups * k), forward]
    b.block(name, ahead, [cast(b, job, s, rows * groups * n), unpack, back, weight, bias])


# ---- What comes before the first layer and after the last, as graph ops: embedding, vocabulary head, loss.


def embedding_graph(job: Job) -> LayerGraph:
    """Rows of the table, cut by vocabulary over tensor-parallel ranks; backward adds them up."""
    s, b = RankSizes.of(job), builder(job)
    rows = float(s.tokens * s.width * s.bytes)
    op = "reduce_scatter" if job.parallel.sequence_parallel else "all_reduce"
    reduce = b.collective(op, rows, Axis.TP) if s.tp > 1 else None
    gather = b.collective("all_gather", rows, Axis.TP) if s.tp > 1 and job.parallel.sequence_parallel else None
    more = 2 * rows if job.framework.dropout else 0.0
    forward, backward = b.memory_bound(2 * rows + more, 3, "embedding"), b.memory_bound(6 * rows + more, 4, "embedding")
    b.block("embedding", [forward, reduce], [] if job.tuning.frozen else [gather, backward])
    return b.layer()


def head_graph(job: Job) -> LayerGraph:
    """The last normalisation, the GEMM with the vocabulary, the loss."""
    b = builder(job)
    _head(b, job)
    return b.layer()


def _head(b: LayerBuilder, job: Job) -> None:
    s = RankSizes.of(job)
    s = s._replace(kind="bf16" if s.bytes == 2 and s.kind != "fp16" else s.kind)  # heads stay out of fp8
    words = -(-job.model.vocab // s.tp)
    norm(b, job, s, "norm")
    linear(b, job, s, "head", (s.tokens, words, s.width), enters=True)
    logits = float(s.tokens) * words
    # forward reads logits, finds maximum and sum; backward writes their gradient. Unfused: fp32 copies of each step.
    ahead, back = ((2, 4), (12, 3)) if job.framework.fused_loss or job.framework.compiled else ((38, 8), (18, 4))
    reduce = b.collective("all_reduce", 4.0 * 3 * s.tokens, Axis.TP) if s.tp > 1 else None
    sums = b.memory_bound(ahead[0] * logits, ahead[1], "loss")
    gradient = b.memory_bound(back[0] * logits, back[1], "loss")
    b.block("loss", [sums, reduce], [gradient])


def further_graph(job: Job) -> LayerGraph:
    """A further predicted token, besides a layer of its own: two norms, a GEMM of twice the width, and a head."""
    s, b = RankSizes.of(job), builder(job)
    norm(b, job, s, "norm")
    norm(b, job, s, "norm")
    linear(b, job, s, "further", (s.tokens, s.width, 2 * s.width))
    _head(b, job)
    return b.layer()
