"""What comes before the first layer and after the last: embedding, vocabulary head, loss."""

from __future__ import annotations

from presage.configs.job import Job
from presage.parallel.plan import Axis
from presage.prediction.jobs.ops import Block, Stream, Talk
from presage.prediction.jobs.transformer_layer import Sizes, linear, norm

__all__ = ["embedding_block", "further_blocks", "head_blocks"]


def embedding_block(job: Job) -> Block:
    """Rows of the table, cut by vocabulary over tensor-parallel ranks; backward adds them up."""
    s = Sizes.of(job)
    rows = float(s.tokens * s.width * s.bytes)
    op = "reduce_scatter" if job.parallel.sequence_parallel else "all_reduce"
    talk = Talk(op, rows, Axis.TP) if s.tp > 1 else None
    again = Talk("all_gather", rows, Axis.TP) if s.tp > 1 and job.parallel.sequence_parallel else None
    more = 2 * rows if job.framework.dropout else 0.0
    ahead, back = Stream(2 * rows + more, 3, "embedding"), Stream(6 * rows + more, 4, "embedding")
    return Block.of("embedding", [ahead, talk], [again, back])


def head_blocks(job: Job) -> tuple[Block, ...]:
    """The last normalisation, the product with the vocabulary, the loss."""
    s = Sizes.of(job)
    s = s._replace(kind="bf16" if s.bytes == 2 and s.kind != "fp16" else s.kind)  # heads stay out of fp8
    words = -(-job.model.vocab // s.tp)
    head = linear(job, s, "head", s.tokens, words, s.width, enters=True)
    logits = float(s.tokens) * words
    # forward reads logits, finds maximum and sum; backward writes their gradient. Unfused: fp32 copies of each step.
    ahead, back = ((2, 4), (12, 3)) if job.framework.fused_loss or job.framework.compiled else ((38, 8), (18, 4))
    talk = Talk("all_reduce", 4.0 * 3 * s.tokens, Axis.TP) if s.tp > 1 else None
    sums, gradient = Stream(ahead[0] * logits, ahead[1], "loss"), Stream(back[0] * logits, back[1], "loss")
    return norm(job, s, "norm"), head, Block.of("loss", [sums, talk], [gradient])


def further_blocks(job: Job) -> tuple[Block, ...]:
    """A further predicted token: two norms and a product of twice the width, beside a layer and a head of its own."""
    s = Sizes.of(job)
    return norm(job, s, "norm"), norm(job, s, "norm"), linear(job, s, "further", s.tokens, s.width, 2 * s.width)
