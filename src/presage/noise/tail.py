"""A distribution from many draws: as they are, with a generalised Pareto beyond where they are too few to tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.noise.distribution import Distribution, Empirical, Fixed, Pareto, Spliced

__all__ = ["pareto", "smooth"]

Floats = NDArray[np.float64]
USUAL, WORTH = -0.1, 100  # the shape that Normal-like tails show this far out, and how many values that is worth
SHAPES = (-0.5, 0.5)  # what is fitted stays within: bounded, but not at once; heavy, but with a variance


def smooth(values: ArrayLike, over: float = 0.05, fewest: int = 40) -> Distribution:
    """The draws, with their largest `over` (at least `fewest`) replaced by a tail fitted to them."""
    v = np.sort(np.asarray(values, np.float64).ravel())
    top = max(int(len(v) * over), fewest)
    if v[0] == v[-1]:
        return Fixed(float(v[0]))
    if len(v) < 4 * fewest or v[-top] == v[-1]:
        return Empirical(v)
    threshold = float(v[-top - 1])
    return Spliced(Empirical(v), pareto(v[-top:], threshold), threshold, top / len(v))


def pareto(values: Floats, least: float) -> Pareto:
    """Fitted to what exceeds `least`, by probability-weighted moments (Hosking and Wallis 1987)."""
    over = np.sort(np.asarray(values, np.float64)) - least
    n = len(over)
    first = float(over.mean())
    second = float((over * (n - 1 - np.arange(n)) / max(1, n - 1)).mean())
    shape = 2 - first / (first - 2 * second) if first > 2 * second else SHAPES[1]
    shape = float(np.clip((shape * n + USUAL * WORTH) / (n + WORTH), *SHAPES))
    return Pareto(least, max(first * (1 - shape), 1e-300), shape)
