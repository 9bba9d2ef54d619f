"""The pace of host threads: how much longer than usual they take, run by run and step by step.

Each thread sits on a core of its own, so each has its own pace. It is lognormal with median 1: one factor for a whole
run, times one for each step that goes with the step before it (a first-order process).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["factors", "step_paces"]

Floats = NDArray[np.float64]


def factors(rng: np.random.Generator, sd: float, draws: int) -> Floats:
    """One factor a draw with median 1."""
    return np.exp(sd * rng.standard_normal(draws))


def step_paces(
    rng: np.random.Generator, run_sd: float, step_sd: float, correlation: float, steps: int, draws: int
) -> Floats:
    """The pace of one thread in each step of each draw: (steps, draws)."""
    run = run_sd * rng.standard_normal(draws)
    fresh = rng.standard_normal((steps, draws))
    state = np.empty((steps, draws))
    for k in range(steps):
        state[k] = fresh[k] if k == 0 else correlation * state[k - 1] + np.sqrt(1 - correlation**2) * fresh[k]
    return np.asarray(np.exp(run + step_sd * state))
