"""The blocks of one layer of a Transformer on one rank: what runs forward and backward for one microbatch.

Sizes are those of a rank: tokens of its microbatch and context part, widths over tensor-parallel ranks. With sequence
parallelism what lies between tensor-parallel blocks has only a part of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.parallel.plan import Axis
from presage.prediction.jobs.ops import Attend, Block, Op, Product, Stream, Talk

__all__ = ["Sizes", "layer_blocks", "linear", "low_precision", "norm", "softmax_fused"]

LOW = ("fp8", "mxfp8", "nvfp4")
UNFUSED = ("unfused", "fused-softmax")
PADDED = 16  # tokens of an expert are a multiple of it


def low_precision(kind: str) -> bool:
    """Whether products need their operands cast."""
    return kind in LOW


def layer_blocks(job: Job, layer: int) -> tuple[Block, ...]:
    """Of one layer."""
    m = job.model
    s = Sizes.of(job)._replace(window=m.window if m.has_window(layer) else 0)
    attention = latent_blocks(job, s) if m.latent else plain_blocks(job, s)
    rest = expert_blocks(job, s) if m.has_experts(layer) else dense_blocks(job, s)
    added = residual(job, s)
    return norm(job, s, "norm1"), *attention, added, norm(job, s, "norm2"), *rest, added


class Sizes(NamedTuple):
    """Numbers that many blocks need, of one rank."""

    tp: int
    tokens: int
    between: int  # tokens between tensor-parallel blocks
    width: int
    head: int  # heads of queries
    keys: int  # heads of keys
    window: int
    kind: str
    bytes: int  # of a number between products

    @staticmethod
    def of(job: Job) -> Sizes:
        p, m = job.parallel, job.model
        tokens = max(1, job.rank_tokens)
        between = max(1, tokens // p.tp) if p.sequence_parallel else tokens
        heads, keys = max(1, m.heads // p.tp), max(1, m.kv_heads // p.tp)
        nbytes = 4 if job.precision in ("fp32", "tf32") else 2
        return Sizes(p.tp, tokens, between, m.hidden, heads, keys, m.window, job.precision, nbytes)


# ---- pieces


def norm(job: Job, s: Sizes, name: str) -> Block:
    """Reads and writes the activations once; in fp32 steps where it is not fused."""
    once = s.between * s.width * s.bytes
    if job.framework.fused_norms or job.framework.compiled:
        return Block.of(name, [Stream(2 * once, 1, "norm")], [Stream(3 * once, 2, "norm_backward")])
    # to fp32, square, mean, scale, back, times the weights: 36 bytes a number of 16 bits; backward as many again
    return Block.of(name, [Stream(18 * once, 7)], [Stream(36 * once, 12)])


def residual(job: Job, s: Sizes) -> Block:
    """Bias, dropout and addition to the residual stream; backward the gradients of both ways are added up."""
    once = s.between * s.width
    passes = 3 * s.bytes + (1 if job.framework.dropout else 0)
    back = (3 * s.bytes + (2 * s.bytes + 1 if job.framework.dropout else 0)) * once
    kind = "dropout" if job.framework.dropout else "pointwise"
    return Block.of("residual", [Stream(passes * once, 1, kind)], [Stream(back, 1, kind)])


def linear(
    job: Job, s: Sizes, name: str, rows: int, n: int, k: int, *, enters: bool = False, leaves: bool = False
) -> Block:
    """A linear layer. `enters` a tensor-parallel block: its input is gathered; `leaves`: its output is reduced."""
    product = Product(rows, n, k, s.kind)
    back = Product(rows, k, n, s.kind, along=False)
    weight = Product(n, k, rows, s.kind, sums=True, along=False)
    forward: list[Op | None] = [_cast(s, rows * k), product]
    backward: list[Op | None] = [_cast(s, rows * n), back, weight, _bias(job, s, rows * n)]
    if s.tp > 1 and (enters or leaves):
        whole = rows * (k if enters else n) * s.bytes
        gather = job.parallel.sequence_parallel
        if enters and gather:
            forward.insert(0, Talk("all_gather", whole, Axis.TP, product))
            backward[1:1] = [Talk("all_gather", whole, Axis.TP, back, True)]  # the input again, for wgrad
        if enters:
            backward.append(Talk("reduce_scatter" if gather else "all_reduce", whole, Axis.TP, weight, True))
        if leaves:
            forward.append(Talk("reduce_scatter" if gather else "all_reduce", whole, Axis.TP, product))
            if gather:
                backward.insert(0, Talk("all_gather", whole, Axis.TP, back))
    return Block.of(name, forward, backward)


def _cast(s: Sizes, numbers: float) -> Stream | None:
    """Into the low precision, as it is and transposed."""
    return Stream(4.0 * numbers, 1, "cast") if low_precision(s.kind) else None


def _bias(job: Job, s: Sizes, numbers: float) -> Stream | None:
    """Gradient of a bias: a sum over rows."""
    return Stream(s.bytes * numbers, 1, "reduce") if job.model.bias else None


# ---- attention


def plain_blocks(job: Job, s: Sizes) -> tuple[Block, ...]:
    """Multi-head, grouped-query or multi-query attention."""
    m = job.model
    into = s.head * m.head_dim + 2 * s.keys * m.head_dim
    rotated = s.tokens * (s.head + s.keys) * m.head_dim * s.bytes if m.positions == "rope" else 0
    passes = (
        2 if job.framework.compiled or job.framework.fused_norms else 13
    )  # halves turned, joined, two products, a sum
    return (
        linear(job, s, "qkv", s.tokens, into, s.width, enters=True),
        Block.of("rope", [_pass(passes * rotated)], [_pass(passes * rotated)]),
        _core(job, s, m.head_dim, m.head_dim, s.keys),
        linear(job, s, "proj", s.tokens, s.width, s.head * m.head_dim, leaves=True),
    )


def latent_blocks(job: Job, s: Sizes) -> tuple[Block, ...]:
    """Multi-head latent attention: narrow products that every rank does, then wide ones cut by heads."""
    m = job.model
    assert m.latent is not None
    z = m.latent
    dim = z.rope + z.nope
    down = linear(job, s, "down_proj", s.between, (z.query_rank or 0) + z.key_rank + z.rope, s.width)
    narrow = Stream(2.0 * s.between * (z.query_rank + z.key_rank) * s.bytes, 2, "norm")
    if z.query_rank:
        query = linear(job, s, "up_proj", s.tokens, s.head * dim, z.query_rank, enters=True)
    else:
        query = linear(job, s, "qkv", s.tokens, s.head * dim, s.width, enters=True)
    key = linear(job, s, "up_proj", s.tokens, s.head * (z.nope + z.value), z.key_rank, enters=True)
    joined = s.tokens * s.head * (2 * dim + z.value) * s.bytes  # rotated parts are joined to the others
    return (
        down,
        Block.of("norm", [narrow], [narrow, narrow]),
        query,
        key,
        Block.of("rope", [Stream(2.0 * joined, 3)], [Stream(2.0 * joined, 3)]),
        _core(job, s, dim, z.value, s.head),
        linear(job, s, "proj", s.tokens, s.width, s.head * z.value, leaves=True),
    )


def _core(job: Job, s: Sizes, dim: int, value: int, keys: int) -> Block:
    """Attention itself."""
    style = job.framework.attention
    if style in UNFUSED:
        return _unfused(job, s, dim, value)
    p, m = job.parallel, job.model
    queries, seen, masked = max(1, job.sequence // p.cp), job.sequence, m.causal
    if p.cp > 1 and m.causal:  # a rank has an early and a late part, so each sees half of the keys on average
        seen, masked = min(max(1, seen // 2), s.window or seen), False
    ahead = Attend(job.micro_batch, s.head, keys, queries, seen, dim, value, masked, s.window, False, style)
    back = ahead._replace(backward=True)
    talk = _context(job, s, keys * (dim + value))
    out = s.tokens * s.head * value * s.bytes
    sums = _pass(2.0 * out)  # of outputs times their gradients, by row
    joined = _pass(4.0 * out) if p.cp > 1 else None  # what the parts gave is put together, scaled anew
    return Block.of(
        "core_attn",
        [talk and talk._replace(beside=ahead), ahead, joined],
        [talk and talk._replace(nbytes=2 * talk.nbytes, beside=back), sums, back, joined],
    )


def _context(job: Job, s: Sizes, width: int) -> Talk | None:
    """Keys and values of the other context-parallel ranks."""
    if job.parallel.cp == 1:
        return None
    return Talk("all_gather", float(job.micro_batch * job.sequence * width * s.bytes), Axis.CP)


def _unfused(job: Job, s: Sizes, dim: int, value: int) -> Block:
    """Scores as a matrix in memory: a product, a softmax, dropout, a product."""
    queries, keys, heads = max(1, job.sequence // job.parallel.cp), job.sequence, job.micro_batch * s.head
    kind = "bf16" if low_precision(s.kind) else s.kind
    scores = float(heads) * queries * keys
    one = Product(queries, keys, dim, kind, batch=heads)
    two = Product(queries, value, keys, kind, batch=heads)
    ahead, back = _softmax(job, s, scores)
    drop = _pass((2 * s.bytes + 1) * scores, "dropout") if job.framework.dropout else None
    moved = 2.0 * s.bytes * job.micro_batch * queries * s.head * dim
    heads_in, heads_out = Stream(2 * moved, 2, "copy"), Stream(moved, 1, "copy")
    backs = [
        one._replace(n=dim, k=keys),
        Product(keys, dim, queries, kind, batch=heads),
        two._replace(n=keys, k=value),
        Product(keys, value, queries, kind, batch=heads),
    ]
    return Block.of(
        "core_attn", [heads_in, one, ahead, drop, two, heads_out], [heads_out, *backs, drop, back, heads_in]
    )


def _softmax(job: Job, s: Sizes, scores: float) -> tuple[Stream, Stream]:
    """Forward and backward, of so many scores; Megatron's kernel skips those under a causal mask."""
    if not softmax_fused(job):
        plain = Stream((6 * s.bytes + 4) * scores, 4, "softmax")
        return plain, plain
    seen = 0.5 if job.model.causal and not job.framework.compiled else 1.0
    return Stream((1 + seen) * s.bytes * scores, 1, "softmax"), Stream((1 + 2 * seen) * s.bytes * scores, 1, "softmax")


def softmax_fused(job: Job) -> bool:
    """Megatron's kernel takes four rows of scores at a time, of fp16 or bf16, and falls back to PyTorch's ops where
    heads times samples is no multiple of that."""
    if job.framework.compiled or job.framework.attention not in UNFUSED:
        return True
    return job.framework.attention == "fused-softmax" and job.micro_batch * job.model.heads // job.parallel.tp % 4 == 0


def _pass(nbytes: float, kind: str = "pointwise") -> Stream | None:
    return Stream(nbytes, 1, kind) if nbytes else None


# ---- feed-forward


def dense_blocks(job: Job, s: Sizes) -> tuple[Block, ...]:
    """The feed-forward block of a layer without experts."""
    return feed_forward(job, s, "mlp", job.model.ffn)


def feed_forward(job: Job, s: Sizes, name: str, ffn: int) -> tuple[Block, ...]:
    """Two products with an activation between them, cut over tensor-parallel ranks."""
    width = max(1, ffn // s.tp)
    return (
        linear(job, s, f"{name}_up", s.tokens, width * (2 if job.model.gated else 1), s.width, enters=True),
        activation(job, s, s.tokens * width),
        linear(job, s, f"{name}_down", s.tokens, s.width, width, leaves=True),
    )


def activation(job: Job, s: Sizes, numbers: float) -> Block:
    """Of so many outputs; a gated one reads two."""
    reads = 2 if job.model.gated else 1
    forward, backward = (reads + 1) * s.bytes * numbers, (2 * reads + 1) * s.bytes * numbers
    if job.framework.fused_norms or job.framework.compiled:
        return Block.of("act", [Stream(forward)], [Stream(backward)])
    more = 2 * s.bytes * numbers * (1 if job.model.gated else 0)  # the gate's output is written and read again
    return Block.of("act", [Stream(forward + more, 2)], [Stream(backward + 2 * more, 4)])


def expert_blocks(job: Job, s: Sizes) -> tuple[Block, ...]:
    """Router, dispatch, expert products, combine; shared experts beside them."""
    m, p, e = job.model, job.parallel, job.model.experts
    assert e is not None
    tokens = s.between if p.sequence_parallel or p.tp == 1 else max(1, s.tokens // s.tp)  # each rank routes its part
    routed = tokens * e.top_k * (e.capacity or e.imbalance)  # tokens that reach a rank's experts
    here, width = max(1, e.experts // p.ep), max(1, e.ffn // p.expert_tp)
    rows = max(1, round(routed * p.expert_tp / here / PADDED)) * PADDED
    router = Product(tokens, e.experts, s.width, "fp32" if s.bytes == 4 else "tf32")
    moved = tokens * e.top_k * s.width * s.bytes
    spread = Talk("all_to_all", float(routed * s.width * s.bytes), Axis.EP) if p.ep > 1 else None
    scores = Stream(12.0 * tokens * e.experts, 8)
    ordered = Stream(2.0 * routed * s.width * s.bytes, 2, "permute")
    fused = job.framework.fused_dispatch
    # gathered by token; weighted, and added up by token with atomics
    out, back = (None if fused else Stream(share * moved, 3, "permute") for share in (2.0, 3.2))
    blocks = [
        Block.of("router", [router, scores], [scores, router, router]),
        Block.of("dispatch", [out, spread, ordered], [ordered, spread, out]),
        experts(s, "moe_up", here, rows, width * (2 if m.gated else 1), s.width),
        activation(job, s, rows * here * width),
        experts(s, "moe_down", here, rows, s.width, width),
        Block.of("combine", [ordered, spread, back], [back, spread, ordered]),
    ]
    return (*blocks, *(feed_forward(job, s, "shared", e.shared_ffn) if e.shared_ffn else ()))


def experts(s: Sizes, name: str, groups: int, rows: int, n: int, k: int) -> Block:
    """A linear layer of each expert of a rank."""
    forward = Product(rows, n, k, s.kind, groups)
    back = Product(rows, k, n, s.kind, groups, along=False)
    weight = Product(n, k, rows, s.kind, groups, sums=True, along=False)
    return Block.of(name, [_cast(s, rows * groups * k), forward], [_cast(s, rows * groups * n), back, weight])
