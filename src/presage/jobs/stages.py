"""What each chunk of each pipeline stage costs: layers, recomputation, embedding, head, host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from presage.jobs.cost import Cost, Pricer
from presage.jobs.ends import embedding_block, further_blocks, head_blocks
from presage.jobs.job import Job, Recompute
from presage.jobs.layer import layer_blocks
from presage.jobs.ops import Block, Product

__all__ = ["Chunk", "Passes", "chunks"]

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


def chunks(job: Job, pricer: Pricer) -> list[list[Chunk]]:
    """Of every stage. Layers of one kind cost the same."""
    p, split, m = job.parallel, job.stage_layers(), job.model
    known: dict[tuple[bool, bool], Passes] = {}
    out: list[list[Chunk]] = [[] for _ in range(p.pp)]
    start = 0
    for chunk in range(p.virtual):
        for stage in range(p.pp):
            count = split[stage][chunk]
            kinds = Counter((m.has_experts(i), m.has_window(i)) for i in range(start, start + count))
            total = NOTHING
            for kind, times in kinds.items():
                if kind not in known:
                    number = next(i for i in range(start, m.layers) if (m.has_experts(i), m.has_window(i)) == kind)
                    known[kind] = layer_passes(job, pricer, number)
                total += known[kind] * times
            first, last = stage == chunk == 0, stage == p.pp - 1 and chunk == p.virtual - 1
            experts = sum(times for (has, _), times in kinds.items() if has)
            out[stage].append(Chunk(count, experts, first, last, total + ends(job, pricer, first, last)))
            start += count
    return out


def layer_passes(job: Job, pricer: Pricer, number: int) -> Passes:
    blocks = layer_blocks(job, number)
    done = [passes(pricer, b) for b in blocks]
    again = Cost()
    for block, one in zip(blocks, done, strict=True):
        again += one.forward * repeated(job.recompute, block)
    total = NOTHING
    for one in done:
        total += one
    return Passes(total.forward, total.backward, again)


def passes(pricer: Pricer, block: Block) -> Passes:
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
