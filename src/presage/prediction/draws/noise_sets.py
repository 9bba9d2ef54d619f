"""Noise models that the measurements allow, evenly spread over their parameters: the 90% intervals of quantiles are
taken over them.

Parameters are drawn as Latin hypercubes, so that the end of an interval does not depend on whether a heavy tail
happened to be drawn. What pipelines depend on (GPUs, operations, microbatches) is costly to draw and matters little for
the ends, what is common to all GPUs (jitter, stalls, drift) is cheap and decides them: each of few pipelines has many
noise models. Batches are independent of each other: their ends differ by as much as the ends are not known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import Belief, NoiseModel

Floats = NDArray[np.float64]
BATCHES = 4
PIPELINES, EACH = 8, 32  # of a batch: replicas that are drawn, and noise models for each of them
SETS = BATCHES * PIPELINES * EACH
OF_PIPELINES = ("spread.", "slow.", "load.")  # numbers that the slowest replica depends on
ENDS = (0.05, 0.95)


def even_noises(belief: Belief, rng: np.random.Generator) -> list[NoiseModel]:
    """Noise models with numbers from their intervals, batch by batch; none where no number has an interval."""
    out: list[NoiseModel] = []
    for _ in range(BATCHES if belief.intervals else 0):
        costly = [p for p in sorted(belief.intervals) if p.startswith(OF_PIPELINES)]
        cheap = [p for p in sorted(belief.intervals) if p not in costly]
        few = np.repeat(_hypercube(rng, PIPELINES, len(costly)), EACH, axis=0)
        many = _hypercube(rng, PIPELINES * EACH, len(cheap))
        scores = (dict(zip(costly + cheap, (*a, *b), strict=True)) for a, b in zip(few, many, strict=True))
        out += [belief.at(z) for z in scores]
    return out


def _hypercube(rng: np.random.Generator, count: int, columns: int) -> Floats:
    """[count, columns]: normal scores, one in each of `count` equally likely parts of every column."""
    from scipy.special import ndtri

    parts = rng.permuted(np.tile(np.arange(count)[:, None], (1, columns)), axis=0)
    return np.asarray(ndtri((parts + rng.random(parts.shape)) / count))


def interval_ends(values: Sequence[float] | Floats) -> tuple[tuple[float, float], tuple[float, float]]:
    """The middle 90% of a statistic over noise models, and the standard error of its two ends."""
    every = np.asarray(values, np.float64)
    low, high = (float(x) for x in np.quantile(every, ENDS))
    batches = np.quantile(every.reshape(BATCHES, -1), ENDS, axis=1)
    wrong = batches.std(axis=1, ddof=1) / np.sqrt(BATCHES)
    return (low, high), (float(wrong[0]), float(wrong[1]))
