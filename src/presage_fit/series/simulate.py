"""Consecutive steps drawn from a noise model that says nothing of single GPUs: what a job's log may look like."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import Belief, NoiseModel
from presage_fit.series.bulk import latent

__all__ = ["believed_steps", "steps_of"]

Floats = NDArray[np.float64]


def steps_of(
    noise: NoiseModel, seconds: float, nodes: float, steps: int, rng: np.random.Generator, runs: int = 1, first: int = 0
) -> Floats:
    """[runs, steps]: plain steps (nothing scheduled) of runs that differ; `first` steps before them are not drawn."""
    c = noise.common
    place = np.linspace(-0.5, 0.5, first + steps)[first:]
    factor = c.run_sd * rng.standard_normal((runs, 1))
    factor = factor + (c.drift + c.drift_sd * rng.standard_normal((runs, 1))) * place
    factor = factor + c.sd * latent(rng, np.full(runs, c.correlation), np.ones(runs), steps)
    hits = rng.poisson(noise.stalls.per_step(nodes, seconds), (runs, steps))
    held = np.zeros((runs, steps))
    np.add.at(held, np.nonzero(hits), noise.stalls.seconds.sample(rng, int((hits > 0).sum())))
    return np.asarray(seconds * np.exp(factor) + c.jitter.sample(rng, (runs, steps)) + held)


def believed_steps(
    belief: Belief, seconds: float, nodes: float, steps: int, rng: np.random.Generator, groups: int, runs: int
) -> Floats:
    """[groups, runs, steps]: each group with numbers drawn from what is believed of them."""
    return np.array([steps_of(belief.drawn(rng), seconds, nodes, steps, rng, runs) for _ in range(groups)])
