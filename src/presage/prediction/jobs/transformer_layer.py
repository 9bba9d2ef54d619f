"""The blocks of one Transformer layer on one rank, as graph ops: one microbatch forward and backward.

Sizes are those of a rank: tokens of its microbatch and context part, widths over tensor-parallel ranks. With sequence
parallelism what lies between tensor-parallel blocks has only a part of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.transformer import CLAMPED
from presage.costs.families.attention import AttentionShape
from presage.parallel.dispatchers import dispatcher
from presage.parallel.plan import Axis
from presage.prediction.jobs.layer_graph import LOW, LayerBuilder, LayerGraph, PendingOp

UNFUSED = ("unfused", "fused-softmax")
PADDED = 16  # tokens of an expert are a multiple of it


def layer_graph(job: Job, layer: int) -> LayerGraph:
    """One layer, by its number."""
    m, b = job.model, builder(job)
    s = RankSizes.of(job)._replace(window=m.window if m.has_window(layer) else 0)
    norm(b, job, s, "norm1")
    if m.latent:
        latent_attention(b, job, s)
    else:
        plain_attention(b, job, s)
    residual(b, job, s)
    norm(b, job, s, "norm2")
    if m.has_experts(layer):
        expert_blocks(b, job, s)
    else:
        feed_forward(b, job, s, "mlp", m.ffn)
    residual(b, job, s)
    if more := job.framework.extra_bytes * s.between * s.width:  # casts and kernels that no law counts
        b.block("extra", [b.memory_bound(more / 3)], [b.memory_bound(2 * more / 3)])
    return b.layer()


def builder(job: Job) -> LayerBuilder:
    """An empty graph of the job's precision."""
    return LayerBuilder(job.precision, job.framework.gradient_bytes)


class RankSizes(NamedTuple):
    """Sizes on one rank that many blocks need."""

    tp: int
    tokens: int
    between: int  # tokens between tensor-parallel blocks
    width: int
    head: int  # heads of queries
    keys: int  # heads of keys
    window: int
    kind: str
    bytes: int  # of an activation

    @staticmethod
    def of(job: Job) -> RankSizes:
        p, m = job.parallel, job.model
        tokens = max(1, job.rank_tokens)
        between = max(1, tokens // p.tp) if p.sequence_parallel else tokens
        heads, keys = max(1, m.heads // p.tp), max(1, m.kv_heads // p.tp)
        nbytes = 4 if job.precision in ("fp32", "tf32") else 2
        return RankSizes(p.tp, tokens, between, m.hidden, heads, keys, m.window, job.precision, nbytes)


# ---- pieces


def norm(b: LayerBuilder, job: Job, s: RankSizes, name: str) -> None:
    """Reads and writes the activations once; in fp32 steps where it is not fused."""
    once = s.between * s.width * s.bytes
    if job.framework.fused_norms or job.framework.compiled:
        forward, backward = b.memory_bound(2 * once, 1, "norm"), b.memory_bound(3 * once, 2, "norm_backward")
    else:  # to fp32, square, mean, scale, back, times the weights: 36 bytes a number of 16 bits; backward as many again
        forward, backward = b.memory_bound(18 * once, 7), b.memory_bound(36 * once, 12)
    b.block(name, [forward], [backward])


def residual(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Bias, dropout and addition to the residual stream; backward the gradients of both ways are added up."""
    once = s.between * s.width
    passes = 3 * s.bytes + (1 if job.framework.dropout else 0)
    back = (3 * s.bytes + (2 * s.bytes + 1 if job.framework.dropout else 0)) * once
    kind = "dropout" if job.framework.dropout else "pointwise"
    b.block("residual", [b.memory_bound(passes * once, 1, kind)], [b.memory_bound(back, 1, kind)])


def linear(
    b: LayerBuilder, job: Job, s: RankSizes, name: str, size: tuple[int, int, int], *,
    enters: bool = False, leaves: bool = False,
) -> None:  # fmt: skip
    """A linear layer of `size` (rows, outputs, inputs). `enters` a tensor-parallel region: its input is gathered;
    `leaves`: its output is reduced."""
    rows, n, k = size
    forward_gemm = b.gemm(rows, n, k, s.kind)
    data_gradient = b.gemm(rows, k, n, s.kind, weight_k_major=False)
    weight_gradient = b.weight_gradient(n, k, rows, s.kind)
    forward = [_cast(b, s, rows * k), forward_gemm]
    backward = [_cast(b, s, rows * n), data_gradient, weight_gradient, _bias(b, job, s, rows * n)]
    if s.tp > 1 and (enters or leaves):
        whole = rows * (k if enters else n) * s.bytes
        gather = job.parallel.sequence_parallel
        reduce = "reduce_scatter" if gather else "all_reduce"
        if enters and gather:
            forward.insert(0, b.collective("all_gather", whole, Axis.TP, forward_gemm))
            again = b.collective("all_gather", whole, Axis.TP, data_gradient, True)  # for the weight gradient
            backward[1:1] = [again]
        if enters:
            backward.append(b.collective(reduce, whole, Axis.TP, weight_gradient, True))
        if leaves:
            forward.append(b.collective(reduce, whole, Axis.TP, forward_gemm))
            if gather:
                backward.insert(0, b.collective("all_gather", whole, Axis.TP, data_gradient))
    b.block(name, forward, backward)


def _cast(b: LayerBuilder, s: RankSizes, numbers: float) -> PendingOp | None:
    """Into the low precision, as it is and transposed."""
    return b.memory_bound(4.0 * numbers, 1, "cast") if s.kind in LOW else None


def _bias(b: LayerBuilder, job: Job, s: RankSizes, numbers: float) -> PendingOp | None:
    """Gradient of a bias: a sum over rows."""
    return b.memory_bound(s.bytes * numbers, 1, "reduce") if job.model.bias else None


# ---- attention


def plain_attention(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Multi-head, grouped-query or multi-query attention."""
    m = job.model
    into = s.head * m.head_dim + 2 * s.keys * m.head_dim
    rotated = s.tokens * (s.head + s.keys) * m.head_dim * s.bytes if m.positions == "rope" else 0
    fused = job.framework.compiled or job.framework.fused_norms
    passes = 2 if fused else 13  # halves turned, joined, two products, a sum
    rope = _pass(b, passes * rotated)
    linear(b, job, s, "qkv", (s.tokens, into, s.width), enters=True)
    b.block("rope", [rope], [rope])
    _attention_core(b, job, s, m.head_dim, m.head_dim, s.keys)
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
    if p.cp > 1 and m.causal:  # a rank has an early and a late part, so each sees half of the keys on average
        seen, masked = min(max(1, seen // 2), s.window or seen), False
    shape = AttentionShape(job.micro_batch, s.head, keys, queries, seen, dim, value, masked, s.window)
    forward, backward = b.attention(shape), b.attention(shape._replace(backward=True))
    out = s.tokens * s.head * value * s.bytes
    sums = _pass(b, 2.0 * out)  # of outputs times their gradients, by row
    if p.cp == 1:
        return b.block("core_attn", [forward], [sums, backward])
    joined = _pass(b, 4.0 * out)  # what the parts gave is put together, scaled anew
    sent = float(job.micro_batch * job.sequence * (keys * (dim + value)) * s.bytes)  # keys and values of other ranks
    gather = b.collective("all_gather", sent, Axis.CP, forward)
    gather_back = b.collective("all_gather", 2 * sent, Axis.CP, backward)
    return b.block("core_attn", [gather, forward, joined], [gather_back, sums, backward, joined])


def _unfused(b: LayerBuilder, job: Job, s: RankSizes, dim: int, value: int) -> None:
    """Scores as a matrix in memory: a GEMM, a softmax, dropout, a GEMM."""
    queries, keys, heads = max(1, job.sequence // job.parallel.cp), job.sequence, job.micro_batch * s.head
    kind = "bf16" if s.kind in LOW else s.kind
    scores = float(heads) * queries * keys
    softmax, softmax_back = _softmax(b, job, s, scores)
    drop = _pass(b, (2 * s.bytes + 1) * scores, "dropout") if job.framework.dropout else None
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


def _pass(b: LayerBuilder, nbytes: float, kind: str = "pointwise") -> PendingOp | None:
    return b.memory_bound(nbytes, 1, kind) if nbytes else None


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
    """Router, dispatch, expert GEMMs, combine; then shared experts."""
    m, p, e = job.model, job.parallel, job.model.experts
    assert e is not None
    tokens = s.between if p.sequence_parallel or p.tp == 1 else max(1, s.tokens // s.tp)  # each rank routes its part
    routed = tokens * e.top_k * e.busiest(p.ep)  # tokens that reach a rank's experts
    here, width = max(1, e.experts // p.ep), max(1, e.ffn // p.expert_tp)
    rows = max(1, round(routed * p.expert_tp / here / PADDED)) * PADDED
    router = b.gemm(tokens, e.experts, s.width, "fp32" if s.bytes == 4 else "tf32")
    moved = tokens * e.top_k * s.width * s.bytes
    there, home = _exchanges(b, job, float(tokens * s.width * s.bytes), routed / tokens)
    scores = b.memory_bound(12.0 * tokens * e.experts, 8)
    d = dispatcher(job.dispatcher)
    ordered = None if d.sorts else b.memory_bound(2.0 * routed * s.width * s.bytes, 2, "permute")
    # gathered by token; weighted, and added up by token with atomics
    out, back = (None if d.fused else b.memory_bound(share * moved, 3, "permute") for share in (2.0, 3.2))
    b.block("router", [router, scores], [scores, router, router])
    b.block("dispatch", [out, there, ordered], [ordered, home, out])
    expert_gemms(b, job, s, "moe_up", here, (rows, width * (2 if m.gated else 1), s.width))
    activation(b, job, s, rows * here * width)
    expert_gemms(b, job, s, "moe_down", here, (rows, s.width, width))
    b.block("combine", [ordered, home, back], [back, there, ordered])
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
    forward = b.gemm(rows, n, k, s.kind, groups=groups)
    back = b.gemm(rows, k, n, s.kind, groups=groups, weight_k_major=False)
    weight = b.weight_gradient(n, k, rows, s.kind, groups)
    bias = _bias(b, job, s, rows * groups * n)
    b.block(name, [_cast(b, s, rows * groups * k), forward], [_cast(b, s, rows * groups * n), back, weight, bias])


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
    b.block("embedding", [forward, reduce], [gather, backward])
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
