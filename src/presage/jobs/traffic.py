"""Gradients and parameters between replicas: what is sent for each chunk, and how much of it nothing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.jobs.cost import Pricer
from presage.jobs.job import Job
from presage.jobs.weights import Weights

__all__ = ["Exchange", "exchange", "exposed_gathers", "exposed_reductions", "reduction"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a chunk's transfers, if nothing else is sent."""

    reduce: float  # of gradients
    gather: float  # of parameters
    parts: int  # buckets


def exchange(job: Job, pricer: Pricer, w: Weights) -> Exchange:
    f = job.framework
    reduce = reduction(job, pricer, w.shared * f.reduce_bytes, "shard", "replicas")
    reduce += reduction(job, pricer, w.experts * f.reduce_bytes, "expert_dp", "")
    gather = 0.0
    if job.parallel.zero:
        gather = pricer.talk_seconds("all_gather", w.shared * f.gather_bytes, "shard")
        gather += pricer.talk_seconds("all_gather", w.experts * f.gather_bytes, "expert_dp")
    parts = max(1, round(w.all * f.gradient_bytes / f.bucket_bytes))
    return Exchange(reduce, gather, parts)


def reduction(job: Job, pricer: Pricer, nbytes: float, over: str, beyond: str) -> float:
    if not job.parallel.zero:
        return pricer.talk_seconds("all_reduce", nbytes, "dp" if beyond else over)
    took = pricer.talk_seconds("reduce_scatter", nbytes, over)
    if beyond:
        ranks = getattr(pricer.groups, over).ranks
        took += pricer.talk_seconds("all_reduce", nbytes / ranks, beyond)
    return took


def exposed_reductions(
    sent: Sequence[Exchange], done: Sequence[float], took: Sequence[float], end: float, beside: bool
) -> float:
    """How long after `end` a stage's last reduction ends: `done` is when the last backward pass of each chunk ends and
    `took` how long it takes. Beside it, a bucket is sent as soon as it is full."""
    if not beside:
        return max(0.0, max(done) + sum(x.reduce for x in sent) - end)
    at = 0.0
    for x, when, long in sorted(zip(sent, done, took, strict=True), key=lambda row: row[1]):
        at = max(at, when - long * (1 - 1 / x.parts)) + x.reduce
        at = max(at, when + x.reduce / x.parts)
    return max(0.0, at - end)


def exposed_gathers(sent: Sequence[Exchange], starts: Sequence[float], took: Sequence[float], beside: bool) -> float:
    """How much later a stage's first forward passes run because parameters are still on their way."""
    if not beside:
        return sum(x.gather for x in sent)
    at, late = 0.0, 0.0
    for x, when, long in sorted(zip(sent, starts, took, strict=True), key=lambda row: row[1]):
        first = at + x.gather / x.parts
        at += x.gather
        late = max(late, first - when, at - x.gather / x.parts - when - long)
    return max(0.0, late)
