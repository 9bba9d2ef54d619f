"""The pace of host threads: how much longer than usual they take, run by run and step by step.

Each thread sits on a core of its own, so each has its own pace. It is lognormal with median 1: one factor for a whole
run, times one for each step that goes with the step before it (a first-order process). The few steps that are drawn
stand for the many of a run, over which the steps' own factors even out: they have mean 1 (of the logarithm, 0) exactly.
Ranks of one job share most of it: on three nodes of eight, ranks' paces in a step were 0.5%, 2.3% and 4.4% apart
(standard deviation), where runs on different machines are 19%. They wait for each other, so of equal ranks only the
slowest is drawn. Factors of whole runs are spread evenly over their distribution, in random order: few draws give
steady quantiles.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["RANK_SD", "factors", "step_paces"]

Floats = NDArray[np.float64]
_NORMAL = NormalDist()
RANK_SD = 0.03  # between ranks of a job


def factors(rng: np.random.Generator, sd: float, draws: int, ranks: int = 1) -> Floats:
    """One factor a draw with median 1; of several ranks, the largest of theirs."""
    even = [_NORMAL.inv_cdf(((k + 0.5) / draws) ** (1 / ranks)) for k in range(draws)]
    return np.exp(sd * rng.permutation(np.array(even)))


def step_paces(
    rng: np.random.Generator, run_sd: float, step_sd: float, correlation: float, steps: int, draws: int
) -> Floats:
    """The pace of one thread in each step of each draw: (steps, draws)."""
    run = factors(rng, run_sd, draws)
    state = rng.standard_normal((steps, draws))
    for k in range(1, steps):
        state[k] = correlation * state[k - 1] + np.sqrt(1 - correlation**2) * state[k]
    return np.asarray(run * np.exp(step_sd * (state - state.mean(axis=0))))
