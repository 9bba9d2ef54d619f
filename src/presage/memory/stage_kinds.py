"""Memory of the layers of a pattern (Mamba-2, linear attention, attention, feed-forward alone), by stage."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.memory.activations import layer_activations


class StageKinds(NamedTuple):
    """Layers of a pattern that a stage has: parameters of a rank, and bytes a token."""

    shared: float
    experts: float
    kept: float
    working: float


def stage_kinds(job: Job) -> tuple[StageKinds, ...]:
    """Layers of a pattern by stage."""
    split, m, start = job.stage_layers(), job.model, 0
    found: dict[tuple[object, ...], StageKinds] = {}
    out: list[list[StageKinds]] = [[] for _ in split]
    for chunk in range(len(split[0])):
        for stage, counts in enumerate(split):
            for layer in range(start, start + counts[chunk]):
                out[stage].append(found.setdefault(m.kind(layer), _layer_kind(job, layer)))
            start += counts[chunk]
    return tuple(
        StageKinds(
            sum(k.shared for k in s), sum(k.experts for k in s), sum(k.kept for k in s), max(k.working for k in s)
        )
        for s in out
    )


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
    return shared + m.hidden * e.experts + beside, m.expert_parameters(layer) / (p.ep * p.expert_tp)


def routed_layers(job: Job) -> tuple[tuple[int, int], ...]:
    """Layers without and with experts, by stage."""
    split, m, start = job.stage_layers(), job.model, 0
    out = [[0, 0] for _ in split]
    for chunk in range(len(split[0])):
        for stage, counts in enumerate(split):
            for layer in range(start, start + counts[chunk]):
                out[stage][m.has_experts(layer)] += 1
            start += counts[chunk]
    return tuple((without, routed) for without, routed in out)
