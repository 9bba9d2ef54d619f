"""What each chunk of each pipeline stage costs: layers, recomputation, embedding, head, host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.configs.transformer import Transformer
from presage.prediction.jobs.block_cost import Cost, Pricer
from presage.prediction.jobs.embedding_head import embedding_block, further_blocks, head_blocks
from presage.prediction.jobs.ops import Block, Product
from presage.prediction.jobs.transformer_layer import layer_blocks

__all__ = ["MODULES", "Chunk", "Passes", "Stages", "chunks", "dealt", "repeated"]

Kind = tuple[tuple[tuple[int, int], ...], bool, bool]  # layers (first of their kind, how many); has embedding, has head

# Blocks that each name of selective recomputation stands for.
MODULES = {
    "core_attn": ("core_attn",),
    "norm": ("norm1", "norm2", "norm"),
    "layernorm": ("norm1", "norm2", "norm"),
    "mla_up_proj": ("up_proj", "rope"),
    "mlp": ("mlp_up", "act", "mlp_down", "shared_up", "shared_down"),
    "moe_act": ("act",),
    "moe": ("router", "dispatch", "moe_up", "act", "moe_down", "combine"),
    "op": ("norm1", "norm2", "norm", "rope", "act", "residual"),
}


@dataclass(frozen=True, slots=True)
class Passes:
    """One microbatch through some blocks."""

    forward: Cost
    backward: Cost
    again: Cost  # the part of the forward pass that the backward pass repeats

    def __add__(self, o: Passes) -> Passes:
        return Passes(self.forward + o.forward, self.backward + o.backward, self.again + o.again)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.backward * times, self.again * times)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a stage."""

    layers: int
    expert_layers: int
    first: bool  # has the embedding
    last: bool  # has the head
    passes: Passes


NOTHING = Passes(Cost(), Cost(), Cost())


class Dealt(NamedTuple):
    """Which chunks are alike: the layers (number of the first of their kind, how many) and ends of each kind, and where
    each is."""

    kinds: tuple[Kind, ...]
    at: NDArray[np.int64]  # [stage, chunk]: the number of its kind
    counts: NDArray[np.float64]  # [stage, kind]: how many


@dataclass(frozen=True, eq=False)
class Stages:
    """The chunks of all stages: the kinds there are, and which is where."""

    kinds: tuple[Chunk, ...]
    at: NDArray[np.int64]  # as in `Dealt`
    counts: NDArray[np.float64]

    def work(self, stage: int) -> tuple[Cost, Cost]:
        """Of a microbatch on a stage: forward with what is done again, and backward."""
        ahead = back = Cost()
        for c, n in zip(self.kinds, self.counts[stage].tolist(), strict=True):
            if n:
                ahead, back = ahead + (c.passes.forward + c.passes.again) * n, back + c.passes.backward * n
        return ahead, back

    @cached_property
    def busiest(self) -> tuple[Cost, Cost]:
        """The work of the stage that computes most."""
        each = [c.passes.forward.compute + c.passes.again.compute + c.passes.backward.compute for c in self.kinds]
        return self.work(int(np.argmax(self.counts @ each)))


def chunks(job: Job, pricer: Pricer) -> Stages:
    """Of every stage. Plans that differ in schedule, sharding or replicas have the same."""
    p = job.parallel
    split = (p.pp, p.virtual, p.layers_as, p.ends_as_layers)
    return pricer.known.get(("stages", pricer.layers, split, job.recompute), lambda: _chunks(job, pricer, split))


def _chunks(job: Job, pricer: Pricer, split: tuple[Any, ...]) -> Stages:
    kinds, at, counts = pricer.known.get(("dealt", split), lambda: dealt(job))
    return Stages(tuple(_chunk(job, pricer, *kind) for kind in kinds), at, counts)


def dealt(job: Job) -> Dealt:
    """Layers of one kind cost the same, and so do chunks with as many of each."""
    p, split, m = job.parallel, job.stage_layers(), job.model
    numbers = {_kind(m, i): i for i in reversed(range(m.layers))}
    found: dict[Kind, int] = {}
    at = np.zeros((p.pp, p.virtual), np.int64)
    start = 0
    for chunk in range(p.virtual):
        for stage in range(p.pp):
            end = start + split[stage][chunk]
            kinds = Counter(numbers[_kind(m, i)] for i in range(start, end))
            first, last = stage == chunk == 0, stage == p.pp - 1 and chunk == p.virtual - 1
            at[stage, chunk] = found.setdefault((tuple(sorted(kinds.items())), first, last), len(found))
            start = end
    counts = np.array([np.bincount(row, minlength=len(found)) for row in at], np.float64)
    return Dealt(tuple(found), at, counts)


def _chunk(job: Job, pricer: Pricer, layers: tuple[tuple[int, int], ...], first: bool, last: bool) -> Chunk:
    """Of so many layers like each of these."""
    total = NOTHING
    for number, times in layers:
        total += layer_passes(job, pricer, number) * times
    experts = sum(times for number, times in layers if job.model.has_experts(number))
    return Chunk(sum(times for _, times in layers), experts, first, last, total + ends(job, pricer, first, last))


def _kind(m: Transformer, layer: int) -> tuple[bool, bool]:
    return m.has_experts(layer), m.has_window(layer)


def layer_passes(job: Job, pricer: Pricer, number: int) -> Passes:
    """One microbatch through a layer."""
    key = ("layer", pricer.layers, _kind(job.model, number), job.recompute)
    return pricer.known.get(key, lambda: _layer_passes(job, pricer, number))


def _layer_passes(job: Job, pricer: Pricer, number: int) -> Passes:
    key = ("blocks", pricer.layers, _kind(job.model, number))
    again, total = Cost(), NOTHING
    for block, one in pricer.known.get(key, lambda: [(b, passes(pricer, b)) for b in layer_blocks(job, number)]):
        again += one.forward * repeated(job.recompute, block)
        total += one
    return Passes(total.forward, total.backward, again)


def passes(pricer: Pricer, block: Block) -> Passes:
    """One microbatch through a block, nothing of it repeated."""
    return Passes(pricer.cost(block.forward), pricer.cost(block.backward).slower(pricer.backward), Cost())


def repeated(r: Recompute, block: Block) -> float:
    """The share of a block's forward pass that is done again."""
    if r.mode == "none":
        return 0.0
    if r.mode == "full":
        return r.share
    modules = r.modules or ("core_attn",)
    if any(block.name in MODULES[m] for m in modules):
        return r.share
    # PyTorch's selective checkpointing by op keeps every second product
    return 0.5 * r.share if "op" in modules and any(isinstance(o, Product) for o in block.forward) else 0.0


def ends(job: Job, pricer: Pricer, first: bool, last: bool) -> Passes:
    """Embedding, head and loss, where a chunk has them."""
    if not (first or last):
        return NOTHING
    key = ("ends", pricer.layers, first, last, job.recompute)
    return pricer.known.get(key, lambda: _ends(job, pricer, first, last))


def _ends(job: Job, pricer: Pricer, first: bool, last: bool) -> Passes:
    total = NOTHING
    if first:
        total += passes(pricer, embedding_block(job))
    if last:
        for block in head_blocks(job):
            total += passes(pricer, block)
        if job.model.predicted:
            more = layer_passes(job, pricer, job.model.layers - 1)
            for block in (*further_blocks(job), *head_blocks(job)):
                more += passes(pricer, block)
            total += more * job.model.predicted
    return total
