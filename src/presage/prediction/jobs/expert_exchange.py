"""What a token dispatcher costs a layer with experts, without the rest of the layer: to choose one by."""

from __future__ import annotations

from presage.configs.job import Job, activation_bytes
from presage.costs.closed_form import ClosedFormKernels
from presage.parallel.dispatchers import dispatcher
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.efficiency import LAWS
from presage.prediction.jobs.plan_cache import PlanCache, layer_key, plan_cache

PASSES = 9.2  # of a token's experts' inputs through memory, forward and backward, where tokens are permuted by kernels


def dispatch_seconds(job: Job, known: PlanCache | None = None) -> float:
    """Seconds of a layer's four exchanges, and of permutations around them that the dispatcher leaves to kernels;
    `known` is the plans' cache, where it is at hand."""
    return (known or plan_cache(job, LAWS)).get(("dispatch", layer_key(job)), lambda: _seconds(job))


def _seconds(job: Job) -> float:
    e, ep = job.model.experts, job.parallel.ep
    if e is None:
        return 0.0
    nbytes = float(max(1, job.rank_tokens // job.parallel.tp) * job.model.expert_width * activation_bytes(job))
    gathers = job.dispatcher == "allgather"
    sent = nbytes * ep if gathers else nbytes * e.top_k * e.busiest(ep)
    one = BlockCostModel(job, LAWS).exchange_seconds("all_gather" if gathers else "all_to_all", sent)
    moved = 0.0 if dispatcher(job.dispatcher).fused else PASSES * nbytes * e.top_k
    kernels = ClosedFormKernels.of(job.platform.gpu, job.framework.attention)
    return 4 * one + kernels.memory_bound(moved, 1, "permute")
