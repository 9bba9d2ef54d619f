"""Gradients and parameters between replicas: what is sent for each chunk."""

from __future__ import annotations

from dataclasses import dataclass

from presage.configs.job import Job
from presage.costs.closed_form.kernels import Bytes
from presage.parallel.plan import Axis
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.weights import Weights


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a chunk's transfers, if nothing else is sent."""

    reduce: float  # of gradients
    gather: float  # of parameters
    parts: int  # buckets


def exchange(job: Job, pricer: BlockCostModel, w: Weights[float]) -> Exchange:
    """Communication of a chunk's weights once per step. With ZeRO-2 each pass sends its own gradients."""
    f, reduce = job.framework, 0.0
    if job.parallel.zero < 2:
        reduce = reduction(job, pricer, w.shared * f.reduce_bytes, Axis.SHARD, Axis.REPLICAS)
        reduce += reduction(job, pricer, w.experts * f.reduce_bytes, Axis.EXPERT_DP, None)
    gather = 0.0
    if job.parallel.zero:
        gather = updated(job, pricer, w.shared * f.gather_bytes, Axis.SHARD)
        gather += updated(job, pricer, w.experts * f.gather_bytes, Axis.EXPERT_DP)
    parts = max(1, round(w.all * f.gradient_bytes / f.bucket_bytes))
    return Exchange(reduce, gather, parts)


def updated(job: Job, pricer: BlockCostModel, nbytes: float, over: Axis) -> float:
    """Seconds of parameters after the update: gathered from all ranks that updated a share, or broadcast by each of
    them in turn."""
    if not job.framework.broadcasts:
        return pricer.collective_seconds("all_gather", nbytes, over)
    ranks = pricer.groups[over].ranks
    return ranks * pricer.collective_seconds("broadcast", nbytes / ranks, over) if ranks > 1 and nbytes else 0.0


def reduction(job: Job, pricer: BlockCostModel, nbytes: Bytes, over: Axis, beyond: Axis | None) -> Bytes:
    """Seconds of gradients' reduction: over all ranks that hold them, or scattered over those that share a copy and
    then reduced over the copies (`beyond`)."""
    if not job.parallel.zero:
        return pricer.collective_seconds("all_reduce", nbytes, Axis.DP if beyond else over)
    took = pricer.collective_seconds("reduce_scatter", nbytes, over)
    if beyond:
        ranks = pricer.groups[over].ranks
        took += pricer.collective_seconds("all_reduce", nbytes / ranks, beyond)
    return took
