"""Costs of each chunk of each pipeline stage: layers, recomputation, embedding, head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.configs.transformer import Transformer
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel, Passes
from presage.prediction.jobs.layer_graph import LayerBlock, LayerGraph
from presage.prediction.jobs.transformer_layer import (
    embedding_graph,
    feeding_graph,
    further_graph,
    head_graph,
    mixing_graph,
)
from presage.prediction.jobs.vision_tower import tower_passes

Kind = tuple[tuple[tuple[int, int], ...], bool, bool]  # layers (first of their kind, how many); has embedding, has head

# Blocks that each name of selective recomputation stands for.
MODULES = {
    "core_attn": ("core_attn",),
    "norm": ("norm1", "norm2", "norm"),
    "layernorm": ("norm1", "norm2", "norm"),
    "mla_up_proj": ("up_proj", "rope"),
    "mamba": ("conv", "scan", "gated_norm"),
    "mlp": ("mlp_up", "act", "mlp_down", "shared_up", "shared_down"),
    "moe_act": ("act",),
    "moe": ("router", "dispatch", "moe_up", "act", "moe_down", "combine"),
    "op": ("norm1", "norm2", "norm", "rope", "act", "residual"),
}


SHARED = ("shared_up", "shared_down")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a stage."""

    layers: int
    expert_layers: int
    first: bool  # has the embedding
    last: bool  # has the head
    passes: Passes
    dealt: tuple[tuple[int, int], ...] = ()  # numbers of layers, the first of each kind, and how many there are of it


NOTHING = Passes(BlockCost(), BlockCost(), BlockCost())


class LayerAssignment(NamedTuple):
    """Distinct chunk kinds (layer counts, has embedding, has head) and the kind of each [stage, chunk]."""

    kinds: tuple[Kind, ...]
    at: NDArray[np.int64]  # [stage, chunk]: the number of its kind
    counts: NDArray[np.float64]  # [stage, kind]: how many


@dataclass(frozen=True, eq=False)
class Stages:
    """The chunks of all stages: the kinds there are, and which is where."""

    kinds: tuple[Chunk, ...]
    at: NDArray[np.int64]  # as in `LayerAssignment`
    counts: NDArray[np.float64]

    def work(self, stage: int) -> tuple[BlockCost, BlockCost]:
        """Costs of a microbatch on a stage: forward with what is recomputed, and backward."""
        ahead = back = BlockCost()
        for c, n in zip(self.kinds, self.counts[stage].tolist(), strict=True):
            if n:
                ahead, back = ahead + (c.passes.forward + c.passes.again) * n, back + c.passes.backward * n
        return ahead, back

    @cached_property
    def busiest(self) -> tuple[BlockCost, BlockCost]:
        """The work of the stage that computes most."""
        each = [c.passes.forward.compute + c.passes.again.compute + c.passes.backward.compute for c in self.kinds]
        return self.work(int(np.argmax(self.counts @ each)))


def chunks(job: Job, pricer: BlockCostModel) -> Stages:
    """The chunks of every stage. Plans that differ in schedule, sharding or replicas share them."""
    key = "stages", pricer.layers, _split(job.parallel), job.recompute
    return pricer.known.get(key, lambda: _chunks(job, pricer))


def _chunks(job: Job, pricer: BlockCostModel) -> Stages:
    kinds, at, counts = dealt_layers(job.model, job.parallel, pricer)
    return Stages(tuple(_chunk(job, pricer, *kind) for kind in kinds), at, counts)


def _split(p: ParallelPlan) -> tuple[Any, ...]:
    return p.pipeline_kind.route, p.pp, p.virtual, p.layers_as, p.ends_as_layers


def dealt_layers(m: Transformer, p: ParallelPlan, pricer: BlockCostModel) -> LayerAssignment:
    """Layers to stages, once for all plans that split them so."""
    return pricer.known.get(("dealt", _split(p)), lambda: assign_layers(m, p))


def assign_layers(m: Transformer, p: ParallelPlan) -> LayerAssignment:
    """Layers to stages. Layers of one kind cost the same, and so do chunks with as many of each."""
    split = p.slot_layers(m.layers, m.predicted)
    kinds = [m.kind(i) for i in range(m.layers)]
    numbers = tuple(kinds.index(kind) for kind in kinds)  # of each layer, the first layer of its kind
    found: dict[Kind, int] = {}
    of_slot, start = np.zeros(len(split), np.int64), 0
    for slot, count in enumerate(split):
        kind = _counted(numbers[start : start + count]), slot == 0, slot == len(split) - 1
        of_slot[slot] = found.setdefault(kind, len(found))
        start += count
    at = of_slot[np.array(p.slots)]
    counts = np.array([np.bincount(row, minlength=len(found)) for row in at], np.float64)
    return LayerAssignment(tuple(found), at, counts)


@lru_cache(256)
def _counted(numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(numbers).items()))


def _chunk(job: Job, pricer: BlockCostModel, layers: tuple[tuple[int, int], ...], first: bool, last: bool) -> Chunk:
    """A chunk with so many layers like each of these."""
    total = NOTHING
    for number, times in layers:
        total += layer_passes(job, pricer, number) * times
    experts = sum(times for number, times in layers if job.model.has_experts(number))
    count = sum(times for _, times in layers)
    return Chunk(count, experts, first, last, total + ends(job, pricer, first, last), layers)


def layer_passes(job: Job, pricer: BlockCostModel, number: int) -> Passes:
    """One microbatch through a layer."""
    key = ("layer", pricer.layers, job.model.kind(number), job.recompute)
    return pricer.known.get(key, lambda: _layer_passes(job, pricer, number))


def _layer_passes(job: Job, pricer: BlockCostModel, number: int) -> Passes:
    again, total, shared = BlockCost(), NOTHING, NOTHING
    for block, one in chain.from_iterable(blocks for _, blocks in layer_parts(job, pricer, number)):
        again += one.forward * recomputed_share(job.recompute, block.name, block.has_gemm)
        total += one
        if block.name in SHARED:
            shared += one
    if job.overlap.shared_experts:
        ahead, back = (
            _overlapped(pricer, total.forward, shared.forward),
            _overlapped(pricer, total.backward, shared.backward),
        )
        return Passes(ahead, back, again)
    return Passes(total.forward, total.backward, again)


Priced = list[tuple[LayerBlock, Passes]]
PartKey = tuple[Any, ...]


def layer_parts(job: Job, pricer: BlockCostModel, number: int) -> tuple[tuple[PartKey, Priced], tuple[PartKey, Priced]]:
    """The blocks of a layer in two parts, with what each depends on. What mixes tokens does not depend on where experts
    are, nor what feeds forward on how tokens are spread over samples."""
    m, p = job.model, job.parallel
    mixing = "mixing", p.tp, p.sequence_parallel, p.cp, job.micro_batch, m.mixer(number), m.has_window(number)
    feeding: PartKey = "feeding", p.tp, p.sequence_parallel, job.rank_tokens, m.feeds(number)
    if m.has_experts(number):
        feeding += p.ep, p.expert_tp, job.dispatcher
    return (
        (mixing, pricer.known.get(mixing, lambda: pricer.block_costs(mixing_graph(job, number)))),
        (feeding, pricer.known.get(feeding, lambda: pricer.block_costs(feeding_graph(job, number)))),
    )


def end_part(job: Job, pricer: BlockCostModel, graph: Callable[[Job], LayerGraph]) -> tuple[PartKey, Priced]:
    """The blocks of what comes before or after the layers."""
    key = graph, job.parallel.tp, job.parallel.sequence_parallel, job.rank_tokens
    return key, pricer.known.get(key, lambda: pricer.block_costs(graph(job)))


def _overlapped(pricer: BlockCostModel, all_: BlockCost, shared: BlockCost) -> BlockCost:
    """A pass whose exchanges with experts run beside the shared experts, as far as these take as long."""
    return replace(all_, ep=all_.ep - min(all_.ep, shared.compute) * (1 - pricer.held))


def recomputed_share(r: Recompute, name: str, has_gemm: bool) -> float:
    """The share of a block's forward pass that is computed again."""
    if r.mode == "none":
        return 0.0
    if r.mode == "full":
        return r.share
    modules = r.modules or ("core_attn",)
    if any(name in MODULES[m] for m in modules):
        return r.share
    # PyTorch's selective checkpointing by op keeps every second GEMM
    return 0.5 * r.share if "op" in modules and has_gemm else 0.0


def ends(job: Job, pricer: BlockCostModel, first: bool, last: bool) -> Passes:
    """Embedding, head and loss, where a chunk has them."""
    if not (first or last):
        return NOTHING
    key = ("ends", pricer.layers, first, last, job.recompute)
    return pricer.known.get(key, lambda: _ends(job, pricer, first, last))


def _ends(job: Job, pricer: BlockCostModel, first: bool, last: bool) -> Passes:
    total = NOTHING
    if first:
        ((_, one),) = end_part(job, pricer, embedding_graph)[1]
        total += one + tower_passes(job, pricer)
    if last:
        for _, one in end_part(job, pricer, head_graph)[1]:
            total += one
        if job.model.predicted:
            more = layer_passes(job, pricer, job.model.layers - 1)
            for _, one in end_part(job, pricer, further_graph)[1]:
                more += one
            total += more * job.model.predicted
    return total
