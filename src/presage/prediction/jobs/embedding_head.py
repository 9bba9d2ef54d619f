"""What comes before the first layer and after the last, as graph ops: embedding, vocabulary head, loss."""

from __future__ import annotations

from presage.configs.job import Job
from presage.parallel.plan import Axis
from presage.prediction.jobs.layer_graph import LayerBuilder, LayerGraph
from presage.prediction.jobs.transformer_layer import RankSizes, builder, linear, norm


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
