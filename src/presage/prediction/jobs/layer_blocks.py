"""Blocks that layers are made of, as graph ops on one rank: norms, residuals, linear layers with or without adapters.

Sizes are those of a rank: tokens of its microbatch and context part, widths over tensor-parallel ranks. With sequence
parallelism what lies between tensor-parallel blocks has only a part of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.tuning import BASES, block_adapters
from presage.parallel.plan import Axis
from presage.prediction.jobs.layer_graph import LOW, LayerBuilder, PendingOp


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
    `leaves`: its output is reduced. Frozen weights have no gradient: only adapters beside them have."""
    rows, n, k = size
    frozen, beside = job.tuning.frozen, adapters(b, job, s, name, rows)
    forward_gemm = b.gemm(rows, n, k, s.kind)
    data_gradient = b.gemm(rows, k, n, s.kind, weight_k_major=False)
    weight_gradient = None if frozen else b.weight_gradient(n, k, rows, s.kind)
    unpack = unpacked(b, job, name, float(n * k))
    bias = None if frozen else bias_gradient(b, job, s, rows * n)
    forward = [unpack, cast(b, job, s, rows * k), forward_gemm, *beside.forward]
    backward = [cast(b, job, s, rows * n), unpack, data_gradient, weight_gradient, bias, *beside.backward]
    if s.tp > 1 and (enters or leaves):
        whole = rows * (k if enters else n) * s.bytes
        gather = job.parallel.sequence_parallel
        reduce = "reduce_scatter" if gather else "all_reduce"
        if enters and gather:
            forward.insert(0, b.collective("all_gather", whole, Axis.TP, forward_gemm))
            if weight_gradient or beside.backward:  # for the gradients of weights
                backward.insert(
                    backward.index(data_gradient), b.collective("all_gather", whole, Axis.TP, data_gradient, True)
                )
        if enters:  # beside the weight's gradient; where there is none, nothing hides it
            backward.append(b.collective(reduce, whole, Axis.TP, weight_gradient, True))
        if leaves:
            forward.append(b.collective(reduce, whole, Axis.TP, forward_gemm))
            if gather:
                backward.insert(0, b.collective("all_gather", whole, Axis.TP, data_gradient))
    b.block(name, forward, backward)


class BesideOps(NamedTuple):
    """What adapters add to the passes of a block."""

    forward: tuple[PendingOp, ...] = ()
    backward: tuple[PendingOp, ...] = ()


def adapters(b: LayerBuilder, job: Job, s: RankSizes, name: str, rows: int) -> BesideOps:
    """LoRA adapters of a block: down to their rank and up again, scaled and added to the block's output. PEFT's run as
    separate kernels, and where adapters are in fp32 so are their GEMMs and the sum."""
    t, forward, backward = job.tuning, list[PendingOp](), list[PendingOp]()
    for inputs, outputs in block_adapters(t, job.model, name, s.tp):
        wide = t.adapter_bits == 32
        kind, e = ("fp32", 4) if wide else ("fp16" if s.kind == "fp16" else "bf16" if s.bytes == 2 else s.kind, s.bytes)
        down, up = b.gemm(rows, t.rank, inputs, kind), b.gemm(rows, outputs, t.rank, kind)
        into, out = float(rows * inputs), float(rows * outputs)
        widened = (s.bytes + e) * into if wide else 0.0
        drop = (2 * e + 1) * into if t.dropout else 0.0
        added = 3 * s.bytes * out if job.framework.fused_adapters else (5 * e + 2 * s.bytes) * out
        forward += [x for x in (memory_pass(b, widened + drop), down, up, memory_pass(b, added)) if x]
        back = [
            memory_pass(b, (s.bytes + 2 * e) * out if wide or not job.framework.fused_adapters else 0.0),
            b.gemm(rows, t.rank, outputs, kind), b.weight_gradient(outputs, t.rank, rows, kind),
            b.gemm(rows, inputs, t.rank, kind), b.weight_gradient(t.rank, inputs, rows, kind),
            memory_pass(b, widened + drop + 3 * s.bytes * into),
        ]  # fmt: skip
        backward += [x for x in back if x]
    return BesideOps(tuple(forward), tuple(backward))


def unpacked(b: LayerBuilder, job: Job, name: str, weights: float) -> PendingOp | None:
    """Frozen weights of a layer that lie packed are written out in 16 bits before each GEMM; those of the head are
    not packed."""
    if not job.tuning.packed or name == "head":
        return None
    return b.memory_bound((BASES[job.tuning.base] + 2.0) * weights, 1, "cast")


def cast(b: LayerBuilder, job: Job, s: RankSizes, numbers: float) -> PendingOp | None:
    """Into the low precision, as it is and, for a weight's gradient, transposed; with maxima, as the recipe scales."""
    if s.kind not in LOW:
        return None
    c = job.recipe.cast
    return b.memory_bound((c.once if job.tuning.frozen else c.nbytes) * numbers, c.launches, "cast")


def bias_gradient(b: LayerBuilder, job: Job, s: RankSizes, numbers: float) -> PendingOp | None:
    """Gradient of a bias: a sum over rows."""
    return b.memory_bound(s.bytes * numbers, 1, "reduce") if job.model.bias else None


def memory_pass(b: LayerBuilder, nbytes: float, kind: str = "pointwise") -> PendingOp | None:
    return b.memory_bound(nbytes, 1, kind) if nbytes else None
