"""A chunk's passes with what runs beside them: the host that launches, gathers of sharded parameters (FSDP, ZeRO-3).

While a transfer runs beside compute it holds some multiprocessors, and compute gets on with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.costs.closed_form.kernels import Bytes
from presage.costs.host_constants import HOOKS_US, LAYER
from presage.costs.layer_host import LayerHost
from presage.memory.activations import layer_activations
from presage.parallel.dispatchers import dispatcher
from presage.parallel.orders import Extent
from presage.parallel.plan import Axis, ParallelPlan
from presage.parallel.schedules import schedule_kind
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.optimizer_step import PINNED
from presage.prediction.jobs.replica_traffic import reduction
from presage.prediction.jobs.stages import Chunk
from presage.prediction.jobs.weights import Dealt, Weights, gathered_bytes, trained_weights

Floats = NDArray[np.float64]
US = 1e-6
GATHER = ("all_gather", "all_gather_copy_out", "reshard")  # hooks of FSDP in each pass
PARAMETERS = 8  # tensors of a block


class ChunkTimes(NamedTuple):
    """Seconds of one microbatch, by chunk."""

    forward: Floats
    backward: Floats
    weight: Floats  # of the backward pass, what gradients of weights take
    waits: Floats  # for parameters and gradients on their way, and for multiprocessors that their transfers hold
    host: Floats  # for the host
    hidden: Floats  # of tokens' ways to experts, what runs beside compute


class ChunkWork(NamedTuple):
    """What chunks do in a microbatch, in seconds. Arrays by chunk; where many plans are asked about at once, with axes
    for these before that of the chunks."""

    ahead: Floats  # on the GPU
    back: Floats  # with what is computed again
    ahead_experts: Floats  # of these, exchanges with experts
    back_experts: Floats
    weight: Floats  # of the backward pass, gradients of weights
    paired: Floats  # the share of exchanges that runs beside another pass
    lost: float  # what compute beside them loses
    meets: Floats  # 1 where the host waits for exchanges, else 0
    layers: Floats
    gather: Floats  # of sharded parameters, before a pass
    gather_again: Floats  # before the backward pass
    reduce: Floats  # of gradients
    launch: Floats  # by the host, the forward pass
    launch_back: Floats
    away: Floats  # of activations to the host's memory
    late_weights: bool  # gradients of weights are put off, and run beside exchanges
    held: float  # the share of compute that a transfer beside it takes


def pass_times(w: ChunkWork) -> ChunkTimes:
    """Seconds of passes, with all that runs beside them."""
    moved = w.weight if w.late_weights else 0.0
    over = np.minimum(w.ahead_experts, w.back - w.back_experts - moved) * w.paired * (1 - w.lost)
    over_back = np.minimum(w.back_experts, w.ahead - w.ahead_experts + moved) * w.paired * (1 - w.lost)
    ahead, back = w.ahead - over, w.back - over_back
    parts = np.maximum(1, w.layers)
    forward = np.maximum(w.gather, ahead + w.held * w.gather) + w.gather / parts
    sent = w.gather_again + w.reduce
    backward = np.maximum(sent, back + w.held * sent) + w.reduce / parts
    waits = forward - ahead + backward - back
    launched, launched_back = w.launch + w.ahead_experts * w.meets, w.launch_back + w.back_experts * w.meets
    late = np.maximum(0.0, np.maximum(launched, w.away) - forward)
    late_back = np.maximum(0.0, np.maximum(launched_back, w.away) - backward)
    backward = backward + late_back
    weight = backward * w.weight / np.where(back > 0, back, np.inf)  # it waits as the rest does
    return ChunkTimes(forward + late, backward, weight, waits, late + late_back, over + over_back)


def chunk_times(job: Job, pricer: BlockCostModel, kinds: Sequence[Chunk], host: LayerHost, slow: float) -> ChunkTimes:
    """Seconds of chunks, with tensor-core kernels slowed down by the power limit."""
    both = [(c.passes.forward, c.passes.backward + c.passes.again) for c in kinds]
    ahead, back, ahead_experts, back_experts = np.array(
        [(a.seconds(slow), b.seconds(slow), a.ep, b.ep) for a, b in both]
    ).T
    layers = np.array([c.layers for c in kinds], np.float64)
    ends = np.array([c.first or c.last for c in kinds], np.float64)
    gather, reduce = np.array([_chunk_transfers(job, pricer, c) for c in kinds]).T
    launch, launch_back = launches(job, host, layers, ends, recomputed_whole(job.recompute), hooked(job, job.parallel))
    return pass_times(
        ChunkWork(
            ahead, back, ahead_experts, back_experts, np.array([c.passes.backward.weight * slow for c in kinds]),
            np.array(hidden_share(job)), exchange_loss(job, pricer), np.array(meets_host(job)), layers, gather,
            gather * (job.parallel.zero == 3), reduce, launch * pricer.paces.host, launch_back * pricer.paces.host,
            np.array([offload_seconds(job, c.dealt) for c in kinds]), job.overlap.weight_gradients, pricer.held,
        )
    )  # fmt: skip


def offload_seconds(job: Job, dealt: Dealt) -> float:
    """Seconds of the activations of a microbatch that go to the host's memory, and again of those that come back: they
    run beside compute, which waits where they take longer."""
    r = job.recompute
    if not r.offload:
        return 0.0
    here = replace(job, recompute=replace(r, offload=0.0))
    kept = 0.0
    for number, count in dealt:
        m = job.model
        memory = layer_activations(here, m.has_experts(number), m.mixer(number), bool(m.feeds(number)))
        kept += count * memory.kept * job.rank_tokens
    return kept * r.offload / (PINNED * job.platform.gpu.pcie)


def meets_host(job: Job) -> float:
    """1 where the host does not launch beside exchanges with experts, else 0. Ranks meet in each, and counts of one are
    read back before the next layer's is launched, so no host runs ahead of it; exchanges by NCCL that overlap with
    another microbatch's passes leave the host that one's launches."""
    if job.framework.host == "graph" or job.model.experts is None:
        return 0.0
    return float(not job.hides_dispatch or dispatcher(job.dispatcher).fused)


def hidden_share(job: Job) -> float:
    """The share of a forward's and of a backward's exchanges with experts that run beside the other pass, of another
    microbatch; weight gradients that are put off run beside the backward's. The first forwards of a pipeline and its
    last backwards have nothing beside them."""
    return paired_share(job) if job.model.experts and job.hides_dispatch else 0.0


def exchange_loss(job: Job, pricer: BlockCostModel) -> float:
    """The share of compute beside an exchange with experts that is lost to the multiprocessors it holds."""
    sms = dispatcher(job.dispatcher).sms
    return sms / job.platform.gpu.sms if sms else pricer.held


def paired_share(job: Job) -> float:
    """The share of a stage's forwards that have a backward beside them: all but those in flight when the first backward
    begins, in the mean over the stages."""
    p = job.parallel
    ahead = _in_flight(p.pipeline_kind.name, Extent(p.pp, job.microbatches, p.virtual, 1))
    return max(0.0, 1 - ahead / (job.passes * p.virtual))


@lru_cache(4096)
def _in_flight(schedule: str, extent: Extent) -> float:
    """Chunks in flight, in the mean over the stages."""
    kind = schedule_kind(schedule)
    return sum(kind.in_flight(k, extent) for k in range(extent.stages)) / extent.stages


def _chunk_transfers(job: Job, pricer: BlockCostModel, c: Chunk) -> tuple[float, float]:
    """Seconds of a chunk's sharded parameters: gathers of a pass, and the reduction."""
    if not sends_each_pass(job.parallel):
        return 0.0, 0.0
    where = c.dealt, c.first, c.last
    return transfers(job, pricer, trained_weights(job, *where), gathered_bytes(job, *where), max(1, c.layers))


def sends_each_pass(p: ParallelPlan) -> bool:
    """Whether parameters or gradients are sent in each pass."""
    return p.zero >= 2 or p.fsdp


def transfers(
    job: Job, pricer: BlockCostModel, trained: Weights[Bytes], gathered: Weights[Bytes], parts: Bytes
) -> tuple[Bytes, Bytes]:
    """Seconds of sharded parameters: gathers of a pass, and the reduction; by layer, as FSDP sends them. Gradients that
    alone are sharded (ZeRO-2) are reduced in each microbatch too, for there is no place to add them up."""
    f = job.framework
    gather = pricer.collective_seconds("all_gather", gathered.shared / parts, Axis.SHARD) * parts
    reduce = reduction(job, pricer, trained.shared * f.reduce_bytes / parts, Axis.SHARD, Axis.REPLICAS) * parts
    gather += pricer.collective_seconds("all_gather", gathered.experts, Axis.EXPERT_DP)
    reduce += pricer.collective_seconds("reduce_scatter", trained.experts * f.reduce_bytes, Axis.EXPERT_DP)
    return gather * float(job.parallel.zero == 3 or job.parallel.fsdp), reduce


def recomputed_whole(r: Recompute) -> float:
    """The share of layers that are recomputed as a whole."""
    return r.share if r.mode == "full" else 0.0


def hooked(job: Job, p: ParallelPlan) -> float:
    """1 where FSDP's hooks are launched around layers, else 0."""
    return float(p.fsdp and job.framework.host != "graph")


def launches(
    job: Job, host: LayerHost, layers: Floats, ends: Floats, again: float | Floats, hooks: float | Floats
) -> tuple[Floats, Floats]:
    """Seconds the host takes to launch both passes: of chunks with so many layers, with an end of the model or not, of
    which such a share is recomputed as a whole, with FSDP's hooks (1) or without (0)."""
    send = host.send if job.parallel.pp > 1 else 0.0
    ahead = layers * host.forward * (1 - (1 - LAYER["forward_without_graph"]) * again)
    back = layers * host.backward + layers * host.recompute * again
    ahead, back = ahead + ends * host.ends_forward + send, back + ends * host.ends_backward + send
    gather = hooks * sum(_hook(name) for name in GATHER) * layers
    return ahead + gather, back + gather + hooks * _hook("post_backward_reduce") * layers


@cache
def _hook(name: str) -> float:
    once, each = HOOKS_US[f"FSDP::{name}"]
    return (once + PARAMETERS * each) * US
