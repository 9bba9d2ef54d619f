"""Work that depends on the data: lengths of documents, loads of experts. They are sampled and priced by the cost model,
so a microbatch with one long document, or with a popular expert, takes as much longer as its kernels and transfers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.configs.transformer import Experts
from presage.errors import PresageError
from presage.noise.distribution import Distribution, Empirical, Fixed
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.work_pace import EVEN, WorkPaces

Floats = NDArray[np.float64]
COUNT = 4_000  # microbatches
LAYERS = 8  # whose experts are drawn for each: what all layers of a step have is their mean
POINTS = 9
MOST_SKEW = 10.0  # beyond, one expert gets everything


def microbatch_load(job: Job, lengths: Floats | None, packed: bool, skew: float | None, seed: int = 0) -> Distribution:
    """Both together: of a microbatch's work, what it takes over the work of the job as it is written."""
    rng = np.random.default_rng((seed, 2))
    load = np.ones(COUNT)
    if lengths is not None:
        load = load * lengths_load(job, lengths, packed, rng)
    if skew is not None:
        load = load * experts_load(job, skew, rng)
    return Empirical(load) if np.ptp(load) else Fixed(float(load[0]))


def lengths_load(job: Job, lengths: Floats, packed: bool, rng: np.random.Generator) -> Floats:
    """[draw]. Packed: documents one after the other fill the sequences, attention stays within each. Else: a document a
    sequence, and all of a microbatch as long as its longest."""
    if packed:
        squares = _packed_squares(lengths, job.sequence, job.micro_batch, rng) / _own_squares(job)
        return _priced(squares, lambda x: _busy(job, WorkPaces(attention=max(x, 1e-6))))
    longest = np.minimum(rng.choice(lengths, (COUNT, job.micro_batch)).max(axis=1), job.sequence)
    return _priced(longest / job.sequence, lambda x: _busy(replace(job, sequence=max(1, round(x * job.sequence)))))


def own_load(job: Job, seed: int = 0) -> Distribution | None:
    """Work of the microbatches of a job whose sequences are packed, over that of a usual one."""
    if not job.lengths:
        return None
    return microbatch_load(job, np.array(job.lengths, np.float64), True, None, seed)


def _own_squares(job: Job) -> float:
    """The same figure of the job as it is priced."""
    return sum(n * n for n in job.documents) / job.sequence**2 if job.documents else 1.0


def _packed_squares(lengths: Floats, sequence: int, rows: int, rng: np.random.Generator) -> Floats:
    """[draw]: of a microbatch's tokens, how many are before each in its document, over those in a full sequence."""
    out = np.zeros((COUNT, rows))
    left = np.full((COUNT, rows), float(sequence))
    while (left > 0).any():
        one = np.minimum(rng.choice(lengths, left.shape), left)
        out += one**2
        left -= one
    return np.asarray(out.mean(axis=1) / sequence**2)


def experts_load(job: Job, skew: float, rng: np.random.Generator) -> Floats:
    """[draw]. Experts are as popular as exp(skew x normal), each layer's anew; all wait for the rank with most."""
    e, p = job.model.experts, job.parallel
    if e is None:
        raise PresageError("the model has no experts whose loads could differ")
    if not 0 <= skew <= MOST_SKEW:
        raise PresageError(f"experts that are as popular as exp({skew:g} x normal): 0 to {MOST_SKEW:g} can be drawn")
    tokens = job.rank_tokens * e.top_k * p.ep
    popular = np.exp(skew * rng.standard_normal((COUNT // 20, LAYERS, e.experts)))
    counts = rng.multinomial(tokens, popular / popular.sum(axis=2, keepdims=True))
    by_rank = counts.reshape(*counts.shape[:2], p.ep, -1).sum(axis=3)
    busiest = (by_rank.max(axis=2) / by_rank.mean(axis=2)).mean(axis=1)
    drawn = rng.choice(busiest, COUNT)
    return _priced(drawn, lambda x: _busy(_with_experts(job, replace(e, imbalance=x, loads=()))))


def _with_experts(job: Job, experts: Experts) -> Job:
    return replace(job, model=replace(job.model, experts=experts))


def _busy(job: Job, paces: WorkPaces = EVEN) -> float:
    """Seconds of a microbatch on the stage that works longest."""
    found = job_step(job, paces=paces)
    return float((found.forward + found.backward).sum(axis=1).max())


def _priced(values: Floats, busy: Callable[[float], float]) -> Floats:
    """What values of an input cost, over what 1 costs: priced at a few points, straight lines between them."""
    points = np.linspace(values.min(), values.max(), POINTS) if np.ptp(values) else values[:1]
    seconds = np.array([busy(float(x)) for x in points])
    return np.asarray(np.interp(values, points, seconds) / busy(1.0))
