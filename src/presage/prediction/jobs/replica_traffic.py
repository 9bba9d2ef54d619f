"""Gradients and parameters between replicas: what is sent for each chunk, and how much of it nothing hides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.engine.compiled import compiled
from presage.prediction.jobs.block_cost import Pricer
from presage.prediction.jobs.weights import Weights

__all__ = ["Exchange", "exchange", "exposed_gathers", "exposed_reductions", "reduction"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a chunk's transfers, if nothing else is sent."""

    reduce: float  # of gradients
    gather: float  # of parameters
    parts: int  # buckets


def exchange(job: Job, pricer: Pricer, w: Weights) -> Exchange:
    """Of a chunk with such weights, once a step. With ZeRO-2 each pass sends its gradients itself."""
    f, reduce = job.framework, 0.0
    if job.parallel.zero < 2:
        reduce = reduction(job, pricer, w.shared * f.reduce_bytes, "shard", "replicas")
        reduce += reduction(job, pricer, w.experts * f.reduce_bytes, "expert_dp", "")
    gather = 0.0
    if job.parallel.zero:
        gather = pricer.talk_seconds("all_gather", w.shared * f.gather_bytes, "shard")
        gather += pricer.talk_seconds("all_gather", w.experts * f.gather_bytes, "expert_dp")
    parts = max(1, round(w.all * f.gradient_bytes / f.bucket_bytes))
    return Exchange(reduce, gather, parts)


def reduction(job: Job, pricer: Pricer, nbytes: float, over: str, beyond: str) -> float:
    """Seconds of gradients' reduction: over all ranks that hold them, or scattered over those that share a copy and
    then reduced over the copies (`beyond`)."""
    if not job.parallel.zero:
        return pricer.talk_seconds("all_reduce", nbytes, "dp" if beyond else over)
    took = pricer.talk_seconds("reduce_scatter", nbytes, over)
    if beyond:
        ranks = getattr(pricer.groups, over).ranks
        took += pricer.talk_seconds("all_reduce", nbytes / ranks, beyond)
    return took


@compiled
def exposed_reductions(reduce: Floats, parts: Floats, done: Floats, took: Floats, end: float, beside: bool) -> float:
    """How long after `end` the last reduction of any stage ends. Of every [stage, chunk]: seconds and buckets of its
    reduction, when its last backward pass ends, how long that takes. Beside it, a bucket is sent as soon as it is
    full."""
    most = 0.0
    for s in range(len(reduce)):
        at = 0.0
        if not beside:
            at = done[s].max() + reduce[s].sum()
        else:
            for c in np.argsort(done[s], kind="mergesort"):
                at = max(at, done[s, c] - took[s, c] * (1 - 1 / parts[s, c])) + reduce[s, c]
                at = max(at, done[s, c] + reduce[s, c] / parts[s, c])
        most = max(most, at - end)
    return most


@compiled
def exposed_gathers(gather: Floats, parts: Floats, starts: Floats, took: Floats, beside: bool) -> float:
    """How much later the first forward passes of any stage run because parameters are still on their way."""
    late = 0.0
    for s in range(len(gather)):
        if not beside:
            late = max(late, gather[s].sum())
            continue
        at = 0.0
        for c in np.argsort(starts[s], kind="mergesort"):
            one, begin = gather[s, c] / parts[s, c], starts[s, c]
            late = max(late, at + one - begin)
            at += gather[s, c]
            late = max(late, at - one - begin - took[s, c])
    return late
