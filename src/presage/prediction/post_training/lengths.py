"""Draws of response lengths: log-normal with a given mean and cut off at the longest, or from lengths seen."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from presage.configs.post_training import ResponseLengths

Floats = NDArray[np.float64]
SMALLEST, LARGEST = -20.0, 40.0  # of the log-normal's mu


def draw_lengths(lengths: ResponseLengths, count: int, rng: np.random.Generator) -> Floats:
    """So many response lengths in whole tokens, each 1 or more."""
    if lengths.seen:
        return np.maximum(1.0, np.round(rng.choice(np.array(lengths.seen), count)))
    if not lengths.sigma:
        return np.full(count, float(round(lengths.mean)))
    mu = _mu(lengths.mean, lengths.longest, lengths.sigma)
    drawn = np.exp(mu + lengths.sigma * rng.standard_normal(count))
    return np.clip(np.round(drawn), 1.0, float(lengths.longest))


@lru_cache(256)
def _mu(mean: float, longest: int, sigma: float) -> float:
    """Location of the log-normal that has this mean once what is longer is cut off at the longest."""
    low, high = SMALLEST, LARGEST
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, longest) < mean else (low, middle)
    return (low + high) / 2


def _cut_mean(mu: float, sigma: float, longest: float) -> float:
    """Mean of min(x, longest) for a log-normal x."""
    z = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _normal(z - sigma) + longest * _normal(-z)


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
