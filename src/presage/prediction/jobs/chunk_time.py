"""A chunk's passes with what runs beside them: the host that launches, gathers of sharded parameters (FSDP, ZeRO-3).

While a transfer runs beside compute it holds some multiprocessors, and compute gets on with the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from presage.configs.job import Job
from presage.costs.host_constants import HOOKS_US, LAYER
from presage.costs.layer_host import LayerHost
from presage.memory.activations import layer_activations
from presage.parallel.dispatchers import dispatcher
from presage.parallel.orders import Extent
from presage.parallel.plan import Axis
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel
from presage.prediction.jobs.optimizer_step import PINNED
from presage.prediction.jobs.replica_traffic import reduction
from presage.prediction.jobs.stages import Chunk
from presage.prediction.jobs.weights import gathered_bytes, trained_weights

US = 1e-6
GATHER = ("all_gather", "all_gather_copy_out", "reshard")  # hooks of FSDP in each pass
PARAMETERS = 8  # tensors of a block


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Seconds of one microbatch."""

    forward: float
    backward: float
    weight: float  # of the backward pass, what gradients of weights take
    waits: float  # for parameters and gradients on their way, and for multiprocessors that their transfers hold
    host: float  # for the host
    hidden: float = 0.0  # of tokens' ways to experts, what runs beside compute


def chunk_time(job: Job, pricer: BlockCostModel, c: Chunk, host: LayerHost, slow: float) -> ChunkTime:
    """Seconds of a chunk, with tensor-core kernels slowed down by the power limit."""
    both = c.passes.forward, c.passes.backward + c.passes.again
    hidden = _hidden(job, pricer, both, c.passes.backward.weight, slow)
    ahead, back = (cost.seconds(slow) - less for cost, less in zip(both, hidden, strict=True))
    gather, reduce = _transfers(job, pricer, c)
    taken, parts = pricer.held, max(1, c.layers)
    forward = max(gather, ahead + taken * gather) + gather / parts
    again = gather if job.parallel.zero == 3 else 0.0
    backward = max(again + reduce, back + taken * (again + reduce)) + reduce / parts
    waits = forward - ahead + backward - back
    launches = _host(job, c, host)
    met = [_waited(job, cost) for cost in both]
    times = zip(launches, met, (forward, backward), strict=True)
    away = offload_seconds(job, c)
    late = [max(0.0, h * pricer.paces.host + wait - t, away - t) for h, wait, t in times]
    backward += late[1]
    weight = backward * c.passes.backward.weight * slow / back if back else 0.0  # it waits as the rest does
    return ChunkTime(forward + late[0], backward, weight, waits, sum(late), sum(hidden))


def offload_seconds(job: Job, c: Chunk) -> float:
    """Seconds of the activations of a microbatch that go to the host's memory, and again of those that come back: they
    run beside compute, which waits where they take longer."""
    r = job.recompute
    if not r.offload:
        return 0.0
    here = replace(job, recompute=replace(r, offload=0.0))
    kept = 0.0
    for number, count in c.dealt:
        m = job.model
        memory = layer_activations(here, m.has_experts(number), m.mixer(number), bool(m.feeds(number)))
        kept += count * memory.kept * job.rank_tokens
    return kept * r.offload / (PINNED * job.platform.gpu.pcie)


def _waited(job: Job, c: BlockCost) -> float:
    """Seconds of exchanges with experts that the host does not launch beside. Ranks meet in each, and counts of one are
    read back before the next layer's is launched, so no host runs ahead of it; exchanges by NCCL that overlap with
    another microbatch's passes leave the host that one's launches."""
    if job.framework.host == "graph" or not c.ep:
        return 0.0
    return 0.0 if job.hides_dispatch and not dispatcher(job.dispatcher).fused else c.ep


def _hidden(
    job: Job, pricer: BlockCostModel, both: tuple[BlockCost, BlockCost], weight: float, slow: float
) -> tuple[float, float]:
    """Seconds of a forward's and of a backward's exchanges with experts that run beside the other pass, of another
    microbatch; weight gradients that are put off run beside the backward's. The first forwards of a pipeline and its
    last backwards have nothing beside them."""
    ahead, back = both
    if not job.hides_dispatch or not (ahead.ep or back.ep):
        return 0.0, 0.0
    moved = weight * slow if job.overlap.weight_gradients else 0.0
    share, lost = paired_share(job), exchange_loss(job, pricer)
    over = min(ahead.ep, back.seconds(slow) - back.ep - moved), min(back.ep, ahead.seconds(slow) - ahead.ep + moved)
    return over[0] * share * (1 - lost), over[1] * share * (1 - lost)


def exchange_loss(job: Job, pricer: BlockCostModel) -> float:
    """The share of compute beside an exchange with experts that is lost to the multiprocessors it holds."""
    sms = dispatcher(job.dispatcher).sms
    return sms / job.platform.gpu.sms if sms else pricer.held


def paired_share(job: Job) -> float:
    """The share of a stage's forwards that have a backward beside them: all but those in flight when the first backward
    begins, in the mean over the stages."""
    p = job.parallel
    extent = Extent(p.pp, job.microbatches, p.virtual, 1)
    ahead = sum(p.pipeline_kind.in_flight(k, extent) for k in range(p.pp)) / p.pp
    return max(0.0, 1 - ahead / (job.passes * p.virtual))


def _transfers(job: Job, pricer: BlockCostModel, c: Chunk) -> tuple[float, float]:
    """Seconds of sharded parameters: gathers of a pass, and the reduction; by layer, as FSDP sends them. Gradients that
    alone are sharded (ZeRO-2) are reduced in each microbatch too, for there is no place to add them up."""
    if job.parallel.zero < 2 and not job.parallel.fsdp:
        return 0.0, 0.0
    where = c.dealt, c.first, c.last
    w, sent, f = trained_weights(job, *where), gathered_bytes(job, *where), job.framework
    parts = max(1, c.layers)
    gather = pricer.collective_seconds("all_gather", sent.shared / parts, Axis.SHARD) * parts
    reduce = reduction(job, pricer, w.shared * f.reduce_bytes / parts, Axis.SHARD, Axis.REPLICAS) * parts
    if sent.experts:
        gather += pricer.collective_seconds("all_gather", sent.experts, Axis.EXPERT_DP)
    if w.experts:
        reduce += pricer.collective_seconds("reduce_scatter", w.experts * f.reduce_bytes, Axis.EXPERT_DP)
    return (gather if job.parallel.zero == 3 or job.parallel.fsdp else 0.0), reduce


def _host(job: Job, c: Chunk, host: LayerHost) -> tuple[float, float]:
    """Seconds the host takes to launch both passes."""
    ahead, back = c.layers * host.forward, c.layers * host.backward
    if job.recompute.mode == "full":
        back += c.layers * host.recompute * job.recompute.share
        ahead *= 1 - (1 - LAYER["forward_without_graph"]) * job.recompute.share
    if c.first or c.last:
        ahead, back = ahead + host.ends_forward, back + host.ends_backward
    if job.parallel.pp > 1:
        ahead, back = ahead + host.send, back + host.send
    if job.parallel.fsdp and job.framework.host != "graph":
        gather = sum(_hook(name) for name in GATHER) * c.layers
        ahead, back = ahead + gather, back + gather + _hook("post_backward_reduce") * c.layers
    return ahead, back


def _hook(name: str) -> float:
    once, each = HOOKS_US[f"FSDP::{name}"]
    return (once + PARAMETERS * each) * US
