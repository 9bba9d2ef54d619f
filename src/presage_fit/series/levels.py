"""How far apart the levels of sister runs are: most are close, now and then one is slower as a whole.

A run's level is its group's base, plus a Normal of standard deviation s, plus, with probability `odd`, a Gamma of shape
2 and mean `slower` (an odd run stands apart: hardly slower ones are the Normal's). Two runs that agree say that s is
small; they say little about how likely an odd run is: that comes from other groups. All of it is known as weights on a
grid of (base, s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["LevelPrior", "Levels", "evidence", "learn_levels", "levels_of"]

Floats = NDArray[np.float64]
SDS = np.geomspace(2e-5, 4e-2, 20)
ODD = np.array([0.02, 0.06, 0.1, 0.14, 0.18, 0.22, 0.26, 0.3, 0.34])  # even steps: each share as likely beforehand
SLOWER = np.array([0.001, 0.002, 0.004, 0.008, 0.016, 0.032])
AROUND = np.linspace(-4, 4, 13)
ALIKE = 0.5  # what a group counts: several are of one machine, and machines have odd runs more or less often


def _usual() -> Floats:
    """About 0.15%, known within a factor of 3."""
    weight = np.exp(-0.5 * (np.log(SDS / 0.0015) / np.log(3.0)) ** 2)
    return np.asarray(weight / weight.sum())


def _any() -> Floats:
    """[s, odd, slower]: odd runs of any share and size."""
    return np.asarray(_usual()[:, None, None] * np.full((1, len(ODD), len(SLOWER)), 1 / (len(ODD) * len(SLOWER))))


@dataclass(frozen=True, eq=False)
class LevelPrior:
    weights: Floats = field(default_factory=_any)  # [s, odd, slower]: how likely each is


@dataclass(frozen=True, eq=False)
class Levels:
    """What is believed of a group: weights on (base, s, odd, slower)."""

    base: Floats
    sd: Floats
    odd: Floats
    slower: Floats
    weight: Floats

    def next_run(self, rng: np.random.Generator, draws: int) -> Floats:
        """Levels of further runs."""
        at = np.searchsorted(np.cumsum(self.weight), _even(rng, draws)).clip(max=len(self.weight) - 1)
        long = -self.slower[at] / 2 * (np.log1p(-_even(rng, draws)) + np.log1p(-_even(rng, draws)))
        late = np.where(_even(rng, draws) < self.odd[at], long, 0.0)
        return np.asarray(self.base[at] + self.sd[at] * rng.standard_normal(draws) + late)

    def spread(self) -> tuple[float, float, float]:
        """Standard deviation between runs, odd ones and all: the middle of what it may be, and its 90% interval."""
        sd = np.sqrt(self.sd**2 + self.odd * (1.5 - self.odd) * self.slower**2)
        order = np.argsort(sd)
        low, middle, high = np.interp((0.05, 0.5, 0.95), np.cumsum(self.weight[order]), sd[order])
        return float(middle), float(low), float(high)


def _even(rng: np.random.Generator, draws: int) -> Floats:
    """Uniform draws, one in each of as many equal parts, in random order: few of them give steady quantiles."""
    return np.asarray(rng.permutation((np.arange(draws) + rng.random(draws)) / draws))


def levels_of(levels: Floats, prior: LevelPrior) -> Levels:
    found = []
    for s, p in zip(SDS, prior.weights, strict=True):
        base, width = _bases(levels, s)
        weight = _likelihood(levels, base, s) + np.log(width)[:, None, None] + np.log(p + 1e-12)
        grid = np.meshgrid(base, ODD, SLOWER, indexing="ij")
        found.append(np.stack([grid[0], np.full(grid[0].shape, s), grid[1], grid[2], weight]).reshape(5, -1))
    base, sd, odd, slower, weight = np.concatenate(found, axis=1)
    weight = np.exp(weight - weight.max())
    return Levels(base, sd, odd, slower, weight / weight.sum())


def _bases(levels: Floats, s: float) -> tuple[Floats, Floats]:
    """Places where the base may be, and how wide each stands for: near the runs, and below all of them."""
    below = levels.min() - np.geomspace(s, max(0.05, 2 * s), 16)
    at = np.unique(np.concatenate([(levels[:, None] + s * AROUND).ravel(), below]))
    return at, np.maximum(np.gradient(at) if len(at) > 1 else np.ones(1), 1e-12)


def _likelihood(levels: Floats, base: Floats, s: float) -> Floats:
    """Log likelihood [base, odd, slower] of the runs' levels."""
    off = (levels[None, :] - base[:, None])[..., None]
    near = -0.5 * (off / s) ** 2 - np.log(s * np.sqrt(2 * np.pi))
    half = SLOWER / 2
    far = s**2 / (2 * half**2) - off / half + _log_above(off / s - s / half) + np.log(s / half**2)
    top = np.maximum(near, far.max(axis=2, keepdims=True))
    near, far = np.exp(near - top)[:, :, None], np.exp(far - top)[:, :, None]
    both = near * (1 - ODD)[:, None] + far * ODD[:, None]  # [base, run, odd, slower]
    return np.asarray(np.log(np.maximum(both, 1e-30)).sum(axis=1) + top.sum(axis=1)[..., None])


def _log_above(z: Floats) -> Floats:
    """Log of the mean of a Normal about z, where what is below 0 counts as 0."""
    from scipy.special import log_ndtr

    bell = -0.5 * z**2 - np.log(np.sqrt(2 * np.pi))
    near = np.maximum(z, -8.0)
    exact = np.log(near * np.exp(log_ndtr(near)) + np.exp(-0.5 * near**2) / np.sqrt(2 * np.pi))
    return np.asarray(np.where(z > -8, exact, bell - 2 * np.log(np.maximum(-z, 1.0))))


def evidence(levels: Floats) -> Floats:
    """Log likelihood [s, odd, slower] of a group, over all bases: what `learn_levels` needs of it."""
    found = []
    for s in SDS:
        base, width = _bases(levels, s)
        found.append(np.logaddexp.reduce(_likelihood(levels, base, s) + np.log(width)[:, None, None], axis=0))
    return np.array(found)


def learn_levels(groups: Sequence[Floats]) -> LevelPrior:
    """How likely each (s, odd, slower) is for another group: s from its spread over groups, the two others shared."""
    if len(groups) < 3:
        return LevelPrior()
    logs = np.array(groups)  # [group, s, odd, slower]
    scale = logs.max(axis=1, keepdims=True)
    each, start = np.exp(logs - scale), _usual()[:, None, None]
    weights = np.broadcast_to(start, each.shape[1:]).copy()
    for _ in range(20):
        posterior = each * weights
        posterior /= posterior.sum(axis=1, keepdims=True)
        weights = (posterior.sum(axis=0) + 2 * start) / (len(groups) + 2)
    fit = (np.log((each * weights).sum(axis=1)) + scale[:, 0]).sum(axis=0)
    shared = np.exp(ALIKE * (fit - fit.max()))
    return LevelPrior(np.asarray(weights * (shared / shared.sum())))
