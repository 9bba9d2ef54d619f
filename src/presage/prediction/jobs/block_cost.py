"""Costs of blocks on one rank: seconds by kind of work, and the FLOPs and bytes that the power limit needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from presage.configs.job import Job, activation_bytes
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.closed_form.kernels import Bytes
from presage.costs.collectives import Collectives
from presage.costs.collectives.group import RankGroup
from presage.costs.exchange import TokenExchange, fused_seconds, nccl_seconds
from presage.costs.kernel_model import KernelModel, OpTime
from presage.costs.overlap import channels, contention
from presage.errors import PresageError
from presage.graph.graph import Op, argument
from presage.graph.work import COLLECTIVES
from presage.hardware import Gpu
from presage.parallel.dispatchers import dispatcher
from presage.parallel.plan import Axis, ParallelPlan
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.layer_graph import LayerBlock, LayerGraph
from presage.prediction.jobs.plan_cache import layer_key, plan_cache
from presage.prediction.jobs.work_pace import EVEN, WorkPaces, pace_of

AXES = {axis.value: axis for axis in Axis}
USUALLY_HELD = 0.2  # of the SMs, where channels are not known
REACHED, DRAWN, WAVES = 0.75, 0.35, 8.0  # of a link by collectives; of memory by large GEMMs; waves of tiles


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds at the full clock by kind of work; communication as far as it is exposed."""

    product: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    weight: float = 0.0  # of the products, those for gradients of weights
    flops: float = 0.0  # of products
    attention_flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, o: BlockCost) -> BlockCost:
        return BlockCost(
            self.product + o.product, self.attention + o.attention, self.stream + o.stream, self.tp + o.tp,
            self.cp + o.cp, self.ep + o.ep, self.weight + o.weight, self.flops + o.flops,
            self.attention_flops + o.attention_flops, self.nbytes + o.nbytes,
        )  # fmt: skip

    def __mul__(self, times: float) -> BlockCost:
        return BlockCost(
            self.product * times, self.attention * times, self.stream * times, self.tp * times, self.cp * times,
            self.ep * times, self.weight * times, self.flops * times, self.attention_flops * times,
            self.nbytes * times,
        )  # fmt: skip

    def slower(self, times: float) -> BlockCost:
        """With products that take so many times as long."""
        return replace(self, product=self.product * times, weight=self.weight * times)

    def seconds(self, slowdown: float = 1.0) -> float:
        """On the GPU; tensor-core kernels slowed down by the power limit."""
        return (self.product + self.attention) * slowdown + self.stream + self.tp + self.cp + self.ep

    @property
    def compute(self) -> float:
        return self.product + self.attention + self.stream


@lru_cache(256)
def overlap_loss(gpu: Gpu) -> float:
    """What compute loses while a collective overlaps it: of large GEMMs, the usual kernels of training."""
    try:
        used = channels(gpu)
    except PresageError:
        used = round(USUALLY_HELD * gpu.sms)
    received = REACHED * (gpu.link or gpu.pcie)
    beside = contention(gpu, bytes_per_second=received, channels=used, computes=True, memory_share=DRAWN, waves=WAVES)
    return 1 - 1 / beside.compute


@dataclass(frozen=True, slots=True)
class Passes:
    """One microbatch through blocks."""

    forward: BlockCost
    backward: BlockCost
    again: BlockCost  # the part of the forward pass that the backward pass repeats

    def __add__(self, o: Passes) -> Passes:
        return Passes(self.forward + o.forward, self.backward + o.backward, self.again + o.again)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.backward * times, self.again * times)


class BlockCostModel:
    """Costs of a job's blocks: its KernelModel times kernels, its Collectives time transfers."""

    def __init__(self, job: Job, efficiency: Efficiency, paces: WorkPaces = EVEN) -> None:
        self.job, self.efficiency, self.paces = job, efficiency, paces
        self.known, self.layers = plan_cache(job, efficiency, paces), layer_key(job)
        self.kernels: KernelModel = ClosedFormKernels.of(job.platform.gpu, job.framework.attention)
        self.collectives = Collectives.of(job.platform)
        self.held = overlap_loss(job.platform.gpu)
        self.backward = 1.0 if job.precision == "fp32" else efficiency.backward

    @cached_property
    def groups(self) -> Mapping[Axis, RankGroup]:
        return communicators(self.job)

    def of_plan(self, job: Job) -> BlockCostModel:
        """That of the job with another plan."""
        other = copy(self)
        other.__dict__.pop("groups", None)
        other.job, other.layers = job, layer_key(job)
        return other

    def block_costs(self, layer: LayerGraph) -> list[tuple[LayerBlock, Passes]]:
        """One microbatch through each block of a layer, nothing of it repeated."""
        costs = self.op_costs(layer)
        return [
            (b, Passes(_sum(costs, b.forward), _sum(costs, b.backward).slower(self.backward), BlockCost()))
            for b in layer.blocks
        ]

    def op_costs(self, layer: LayerGraph) -> list[BlockCost]:
        """The cost of each op of a layer's graph."""
        times = self.kernels.op_times(layer.graph)
        return [
            self._transfer(layer, i, op, times) if op.group else self._kernel(op, t)
            for i, (op, t) in enumerate(zip(layer.graph.ops, times, strict=True))
        ]

    def _kernel(self, op: Op, t: OpTime) -> BlockCost:
        if t.family == "fused":
            return BlockCost(stream=t.seconds * self.paces.streams, nbytes=t.nbytes)
        seconds = self._compute_seconds(t)
        if t.family == "attention":
            return BlockCost(attention=seconds, attention_flops=t.flops)
        return BlockCost(product=seconds, weight=seconds if op.writes else 0.0, flops=t.flops, nbytes=t.nbytes)

    def _compute_seconds(self, t: OpTime) -> float:
        """As in training; the efficiency is that of tensor cores, which fp32 does not use."""
        if t.family == "attention":
            return t.seconds * self.paces.attention
        return t.seconds * (self.efficiency.product if t.tensor_cores else 1.0) * self.paces.products

    # ---- transfers

    def collective_seconds(self, op: str, nbytes: Bytes, axis: Axis) -> Bytes:
        """A collective by itself."""
        alone = self.collectives.seconds(op, nbytes, self.groups[axis])
        return alone if self.paces is EVEN else alone * pace_of(self.paces, self.job, axis, op)

    def _transfer(self, layer: LayerGraph, place: int, op: Op, times: Sequence[OpTime]) -> BlockCost:
        """A collective, as far as nothing hides it."""
        axis, nbytes = AXES[op.group], argument(op, "bytes")
        assert isinstance(nbytes, (int, float))
        if axis is Axis.EP:
            exposed = self.exchange_seconds(COLLECTIVES[op.name], nbytes)
        else:
            exposed = self.collective_seconds(COLLECTIVES[op.name], nbytes, axis)
        if overlap := layer.overlaps.get(place):
            exposed = self._exposed(axis, exposed, self._compute_seconds(times[overlap.compute]), overlap.whole)
        return BlockCost(**{axis.value: exposed})

    def exchange_seconds(self, op: str, nbytes: float) -> float:
        """Tokens to the ranks of their experts, or back: `nbytes` of a rank, once for each of a token's experts."""
        job, e, d = self.job, self.job.model.experts, dispatcher(self.job.dispatcher)
        cut, domain = job.parallel.expert_tp, job.platform.domain
        pace = 1.0 if op in self.paces.held else self.paces.ep
        if e is None or not d.fused:
            cuts = RankGroup(cut, min(cut, domain))
            return nccl_seconds(op, nbytes, self.groups[Axis.EP], cuts, self.collectives) * pace
        ranks = job.parallel.ep * cut
        width = float(job.model.expert_width * activation_bytes(job))
        sent = TokenExchange(nbytes / (width * e.top_k), e.top_k * cut, width, e.most_domains(ranks, domain))
        group, launched = RankGroup(ranks, min(ranks, domain)), job.framework.host != "graph"
        return fused_seconds(d, sent, group, self.collectives, launched) * pace

    def _exposed(self, axis: Axis, alone: float, cover: float, whole: bool) -> float:
        """What is left of a transfer that runs under `cover` seconds of compute: cut into as many parts as there are
        ranks, the first (or last) of which has nothing to hide under; or as a whole, holding some SMs."""
        o = self.job.overlap
        cut = o.tensor if axis is Axis.TP else o.context
        if not (cut or (whole and self.job.framework.async_backward)):
            return alone
        if not cut:
            return max(0.0, alone - cover) + self.held * min(alone, cover)
        part: float = 1 / self.groups[axis].ranks
        return max(alone * part, alone - cover * (1 - part))


def _sum(costs: Sequence[BlockCost], places: Iterable[int]) -> BlockCost:
    total = BlockCost()
    for i in places:
        total += costs[i]
    return total


# ---- The communicators of a job: along each axis of its parallel plan, how many ranks, and how many share a domain.


def communicators(job: Job) -> Mapping[Axis, RankGroup]:
    """The communicators of a job on its platform."""
    flat = job.framework.flat_gathers and job.parallel.by_layer and not job.parallel.fsdp
    return _communicators(job.parallel, job.gpus, job.platform.domain, flat)


@lru_cache(4096)
def _communicators(plan: ParallelPlan, gpus: int, domain: int, flat: bool) -> Mapping[Axis, RankGroup]:
    axes = plan.axes(gpus).items()
    found = {axis: RankGroup(ranks, max(1, min(ranks, domain // stride))) for axis, (ranks, stride) in axes}
    return found | ({Axis.SHARD: RankGroup(found[Axis.SHARD].ranks, 1)} if flat else {})
