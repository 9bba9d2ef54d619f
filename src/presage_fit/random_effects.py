"""Random effects by moments: how large the effects of ranks, steps and what is left are, and how well that is known.

A mean square with `dof` degrees of freedom is chi-square distributed about its expectation: that gives the 90% interval
of every standard deviation that is fitted, be it of runs, ranks, steps, GPUs or residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import CredibleInterval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EffectEstimate:
    """A number, the middle 90% of what it may be, and how many values it is from."""

    value: float
    low: float
    high: float
    n: int = 0

    @property
    def interval(self) -> CredibleInterval:
        return CredibleInterval(self.low, self.high)

    def scaled(self, factor: float) -> EffectEstimate:
        return EffectEstimate(self.value * factor, self.low * factor, self.high * factor, self.n)


def estimate_of(draws: Floats) -> EffectEstimate:
    """The median of equally likely values, and their middle 90%."""
    low, middle, high = (float(x) for x in np.quantile(draws, (0.05, 0.5, 0.95)))
    return EffectEstimate(middle, low, high, len(draws))


def sd_estimate(square: float, dof: float, within: float = 0.0, times: float = 1.0) -> EffectEstimate:
    """A standard deviation from a mean square, of which `within` is not its own and the rest counts `times` over."""
    from scipy.special import chdtri

    ends = (square * dof / float(chdtri(dof, p)) for p in (0.05, 0.95))
    sd, low, high = (float(np.sqrt(max(x - within, 0.0) / times)) for x in (square, *ends))
    return EffectEstimate(sd, low, high, round(dof) + 1)


def two_way(logs: Floats) -> dict[str, EffectEstimate]:
    """Effects of rank, of step and of neither ("own") in a table [rank, step], by sums of squares."""
    ranks, steps = logs.shape
    middle = logs.mean()
    by_rank, by_step = logs.mean(axis=1) - middle, logs.mean(axis=0) - middle
    left = logs - middle - by_rank[:, None] - by_step
    free = (ranks - 1) * (steps - 1)
    rest = float(np.sum(left**2)) / free
    return {
        "rank": sd_estimate(steps * float(by_rank @ by_rank) / (ranks - 1), ranks - 1, rest, steps),
        "step": sd_estimate(ranks * float(by_step @ by_step) / (steps - 1), steps - 1, rest, ranks),
        "own": sd_estimate(rest, free),
    }
