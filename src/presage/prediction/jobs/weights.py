"""How many parameters each chunk of each stage has on one rank: those of all ranks alike, and those of experts."""

from __future__ import annotations

from typing import Generic, NamedTuple

from presage.configs.job import Job
from presage.configs.tuning import BASES, adapter_parameters
from presage.costs.closed_form.kernels import Bytes

Dealt = tuple[tuple[int, int], ...]  # numbers of layers, the first of each kind, and how many there are of it


class Weights(NamedTuple, Generic[Bytes]):
    """Parameters of one rank."""

    shared: Bytes  # reduced over all data-parallel ranks
    experts: Bytes  # reduced over the copies of an expert

    @property
    def all(self) -> Bytes:
        return self.shared + self.experts


def weights(job: Job, dealt: Dealt, first: bool, last: bool) -> Weights[float]:
    """Parameters of a chunk with such layers. Weights that both ends use are on both ends."""
    m, p = job.model, job.parallel
    shared, experts = 0.0, 0.0
    for number, count in dealt:
        shared += count * m.outside_expert_parameters(number)
        experts += count * m.expert_parameters(number)
    shared += m.embedding_parameters + m.trained_vision_parameters if first else 0
    if last:
        alone = p.pp > 1 or p.virtual > 1
        shared += m.head_parameters + (m.vocab * m.hidden if m.tied and alone else 0)
        further = m.predicted * (m.layer_parameters(m.layers - 1) + 2 * m.hidden**2)
        shared += further if not m.experts else 0
        experts += further if m.experts else 0
    return Weights(shared / p.tp, experts / (p.ep * p.expert_tp))


def trained_weights(job: Job, dealt: Dealt, first: bool, last: bool) -> Weights[float]:
    """Those of a chunk's parameters that have gradients: all, or those of adapters."""
    if not job.tuning.frozen:
        return weights(job, dealt, first, last)
    return Weights(sum(n * adapter_parameters(job.tuning, job.model, i, job.parallel.tp) for i, n in dealt), 0.0)


def gathered_bytes(job: Job, dealt: Dealt, first: bool, last: bool) -> Weights[float]:
    """Bytes of a chunk's parameters as they are gathered: frozen ones lie packed, but not those of the ends."""
    w, each = weights(job, dealt, first, last), float(job.framework.gather_bytes)
    if not job.tuning.frozen or job.tuning.base == "16bit":
        return Weights(w.shared * each, w.experts * each)
    inner, packed = weights(job, dealt, False, False).shared, BASES[job.tuning.base]
    return Weights(inner * packed + (w.shared - inner) * each, w.experts * packed)
