"""Memory of the layers of a pattern (Mamba-2, linear attention, attention, feed-forward alone), by stage."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.transformer import Transformer
from presage.memory.activations import layer_activations
from presage.parallel.plan import ParallelPlan


class StageKinds(NamedTuple):
    """Layers of a pattern that a stage has: parameters of a rank, and bytes a token."""

    shared: float
    experts: float
    kept: float
    working: float


def stage_kinds(job: Job) -> tuple[StageKinds, ...]:
    """Layers of a pattern by stage."""
    found: dict[tuple[object, ...], StageKinds] = {}
    out = []
    for layers in _stage_layers(job.model, job.parallel):
        kinds = [job.model.kind(i) for i in layers]
        for kind, i in zip(kinds, layers, strict=True):
            if kind not in found:
                found[kind] = _layer_kind(job, i)
        some = [found[kind] for kind in kinds]
        shared, experts, kept = (sum(k[n] for k in some) for n in range(3))
        out.append(StageKinds(shared, experts, kept, max((k.working for k in some), default=0.0)))
    return tuple(out)


def _stage_layers(m: Transformer, p: ParallelPlan) -> list[list[int]]:
    """Numbers of the layers of each stage."""
    begin = [0, *accumulate(p.slot_layers(m.layers, m.predicted))]
    return [[i for slot in own for i in range(begin[slot], begin[slot + 1])] for own in p.slots]


def _layer_kind(job: Job, layer: int) -> StageKinds:
    m = job.model
    memory = layer_activations(job, m.has_experts(layer), m.mixer(layer), bool(m.feeds(layer)))
    return StageKinds(*rank_parameters(job, layer), memory.kept, memory.working)


def rank_parameters(job: Job, layer: int) -> tuple[float, float]:
    """Parameters of a layer on one rank: shared ones, and those of its experts."""
    m, p, e = job.model, job.parallel, job.model.experts
    mixes, feeds = m.mixer(layer), m.feeds(layer)
    mixing = m.attention_parameters(p.tp) if mixes == "attention" else m.mixer_parameters(mixes) / p.tp
    shared = mixing + (bool(mixes) + bool(feeds)) * m.norm_parameters
    if feeds != "experts" or e is None:
        return shared + (m.block_parameters(m.ffn) / p.tp if feeds else 0.0), 0.0
    beside = m.block_parameters(e.shared_ffn) / p.tp if e.shared_ffn else 0.0
    return shared + m.router_parameters + beside, m.expert_parameters(layer) / (p.ep * p.expert_tp)


def routed_layers(m: Transformer, p: ParallelPlan) -> tuple[tuple[int, int], ...]:
    """Layers without and with experts, by stage."""
    each = [(len(layers), sum(m.has_experts(i) for i in layers)) for layers in _stage_layers(m, p)]
    return tuple((count - routed, routed) for count, routed in each)
