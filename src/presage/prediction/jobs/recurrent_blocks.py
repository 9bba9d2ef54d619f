"""Layers that keep a state instead of keys, as graph ops on one rank: Mamba-2 and linear attention by a delta rule.

Both cut a sequence into chunks: products within a chunk, a state handed from chunk to chunk. Mamba-2 as mamba_ssm's
kernels do it (state-space duality, arXiv 2405.21060), delta rules as flash-linear-attention's (arXiv 2412.06464): each
product is a batched GEMM over chunks and heads, operands and states go through memory between kernels. No such kernel
was measured, so `recurrent_note` says so in an answer.
"""

from __future__ import annotations

from presage.configs.job import Job
from presage.parallel.plan import Axis
from presage.prediction.jobs.layer_blocks import RankSizes, linear
from presage.prediction.jobs.layer_graph import LOW, LayerBuilder, PendingOp

STATE_BYTES = 4  # states between chunks are summed up in fp32


def mamba(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Input projection, short convolution, scan over chunks, gated norm, output projection."""
    z = job.model.mamba
    assert z is not None
    width, wide, heads = z.width // s.tp, z.convolved // s.tp, max(1, z.heads // s.tp)
    linear(b, job, s, "in_proj", (s.tokens, width + wide + heads, s.width), enters=True)
    _convolution(b, s, wide)
    chunks = max(1, s.tokens // z.chunk)
    groups, q = max(1, z.groups // s.tp), min(z.chunk, s.tokens)

    def bmm(batch: int, m: int, n: int, k: int) -> PendingOp:
        return b.gemm(m, n, k, _kind(s), batch=batch)

    scores, state = bmm(chunks * groups, q, q, z.state), bmm(chunks * heads, z.head_dim, z.state, q)
    within, across = bmm(chunks * heads, q, z.head_dim, q), bmm(chunks * heads, q, z.head_dim, z.state)
    kept = float(STATE_BYTES * chunks * heads * z.head_dim * z.state)
    read = float(s.bytes * s.tokens * (2 * width + wide) + 4.0 * s.tokens * heads * 3)
    masks = 4.0 * chunks * groups * q * q
    forward = [scores, state, within, across, b.memory_bound(read + 4 * kept + 2 * masks, 5)]
    # scores and states are made again; then two products for each of the forward pass
    products = [scores, state, *2 * [scores, state, within, across]]
    backward = [*products, b.memory_bound(2.5 * read + 8 * kept + 4 * masks, 12)]
    _exchanged(b, job, s, "scan", forward, backward, width + wide)
    _gated_norm(b, s, width)
    linear(b, job, s, "out_proj", (s.tokens, s.width, width), leaves=True)


def linear_attention(b: LayerBuilder, job: Job, s: RankSizes) -> None:
    """Gated DeltaNet or Kimi's delta attention: projections, convolution, delta rule over chunks, gated norm."""
    z = job.model.linear
    assert z is not None
    keys, values, heads = z.keys // s.tp, z.values // s.tp, max(1, z.value_heads // s.tp)
    low = z.kind == "kimi-delta"
    wide = 2 * keys + values
    linear(b, job, s, "in_proj", (s.tokens, wide + z.gates // (1 if low else s.tp), s.width), enters=True)
    if low:
        linear(b, job, s, "gate_proj", (s.tokens, keys + values, z.value_dim))
    _convolution(b, s, wide)
    c, chunks = min(z.chunk, s.tokens), max(1, s.tokens // z.chunk)
    k, v = z.key_dim, z.value_dim

    def bmm(m: int, n: int, inner: int) -> PendingOp:
        return b.gemm(m, n, inner, _kind(s), batch=chunks * heads)

    # keys with keys and their triangular inverse; keys and values through it; states; queries with keys and states
    inverse = [bmm(c, c, k), bmm(c, c, c)]
    through = [bmm(c, k, c), bmm(c, v, c)]
    states = [bmm(c, v, k), bmm(k, v, c)]
    out = [bmm(c, c, k), bmm(c, v, k), bmm(c, v, c)]
    kept = float(2 * chunks * heads * k * v)
    row = float(s.bytes * s.tokens * heads)
    moved = row * (4 * k + 6 * v) + 4.0 * s.tokens * heads * (k if low else 2) + 2 * kept
    squares = float(s.bytes * chunks * heads * c * c)
    forward = [*inverse, *through, *states, *out, b.memory_bound(moved + 4 * squares, 7)]
    products = [*through, *states, *2 * [*inverse, *through, *states, *out]]
    backward = [*products, b.memory_bound(2.5 * moved + 8 * squares, 14)]
    _exchanged(b, job, s, "scan", forward, backward, wide)
    _gated_norm(b, s, values)
    linear(b, job, s, "out_proj", (s.tokens, s.width, values), leaves=True)


def _kind(s: RankSizes) -> str:
    """Scans stay out of low precisions."""
    return "bf16" if s.kind in LOW else s.kind


def _convolution(b: LayerBuilder, s: RankSizes, channels: int) -> None:
    """A few tokens of each channel, and the activation after it, in one kernel."""
    once = float(s.bytes * s.tokens * channels)
    b.block("conv", [b.memory_bound(2 * once)], [b.memory_bound(3 * once, 2)])


def _gated_norm(b: LayerBuilder, s: RankSizes, width: int) -> None:
    """The norm of what a scan gives, times a gate."""
    once = float(s.bytes * s.tokens * width)
    b.block("gated_norm", [b.memory_bound(3 * once, 1, "norm")], [b.memory_bound(6 * once, 2, "norm_backward")])


def _exchanged(
    b: LayerBuilder, job: Job, s: RankSizes, name: str, forward: list[PendingOp], backward: list[PendingOp], width: int
) -> None:
    """The scan of all tokens of some heads: context-parallel ranks exchange parts of sequences for heads and back."""
    if job.parallel.cp > 1:
        sent = float(s.bytes * s.tokens * width)
        forward = [b.collective("all_to_all", sent, Axis.CP), *forward, b.collective("all_to_all", sent / 2, Axis.CP)]
        backward = [b.collective("all_to_all", sent / 2, Axis.CP), *backward, b.collective("all_to_all", sent, Axis.CP)]
    b.block(name, forward, backward)


def recurrent_note(job: Job) -> tuple[str, ...]:
    """What an answer says of layers whose kernels were not measured."""
    kinds = {job.model.mixer(i) for i in range(job.model.layers)} & {"mamba", "linear"} if job.model.pattern else set()
    names = {"mamba": "Mamba-2 scans", "linear": "linear-attention kernels"}
    told = " and ".join(names[k] for k in sorted(kinds))
    return (f"{told} are priced as batched GEMMs and memory traffic: none was measured",) if told else ()
