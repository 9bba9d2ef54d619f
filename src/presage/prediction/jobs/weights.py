"""How many parameters each chunk of each stage has on one rank: those of all ranks alike, and those of experts."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job


class Weights(NamedTuple):
    """Parameters of one rank."""

    shared: float  # reduced over all data-parallel ranks
    experts: float  # reduced over the copies of an expert

    @property
    def all(self) -> float:
        return self.shared + self.experts


def weights(job: Job, layers: int, expert_layers: int, first: bool, last: bool) -> Weights:
    """Parameters of a chunk. Weights that both ends use are on both ends."""
    m, p = job.model, job.parallel
    shared, experts = 0.0, 0.0
    if layers > expert_layers:
        shared += (layers - expert_layers) * m.outside_expert_parameters(_dense_layer(job))
    if expert_layers:
        number = m.experts.dense_layers if m.experts else 0
        shared += expert_layers * m.outside_expert_parameters(number)
        experts += expert_layers * m.expert_parameters(number)
    shared += m.embedding_parameters if first else 0
    if last:
        alone = p.pp > 1 or p.virtual > 1
        shared += m.head_parameters + (m.vocab * m.hidden if m.tied and alone else 0)
        further = m.predicted * (m.layer_parameters(m.layers - 1) + 2 * m.hidden**2)
        shared += further if not m.experts else 0
        experts += further if m.experts else 0
    return Weights(shared / p.tp, experts / (p.ep * p.expert_tp))


def _dense_layer(job: Job) -> int:
    """The number of a layer without experts."""
    return next((i for i in range(job.model.layers) if not job.model.has_experts(i)), 0)
