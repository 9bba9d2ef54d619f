"""Random streams, estimates from draws, the pace of host threads, the slowest of many replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Distribution

Floats = NDArray[np.float64]
Shape = int | tuple[int, ...] | None


class EvenGenerator(np.random.Generator):
    """A generator whose draws of one call are spread evenly over their distribution, in random order: few of them give
    steady quantiles, far in the tail too."""

    def random(self, size: Shape = None, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Uniform draws, one in each of as many equal parts."""
        n = int(np.prod(size)) if size is not None else 1
        even = (self.permutation(n) + super().random(n)) / n
        return even.reshape(size) if size is not None else float(even[0])

    def standard_normal(self, size: Shape = None, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        from scipy.special import ndtri

        return ndtri(self.random(size))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Shape = None) -> Any:  # type: ignore[override]
        return loc + scale * self.standard_normal(size)

    def lognormal(self, mean: Any = 0.0, sigma: Any = 1.0, size: Shape = None) -> Any:  # type: ignore[override]
        return np.exp(self.normal(mean, sigma, size))

    def multinomial(self, n: Any, pvals: Any, size: Any = None) -> Any:
        """Counts of two kinds, at even places of the second kind's binomial distribution."""
        if len(pvals) != 2 or not isinstance(n, int) or size is None:
            return super().multinomial(n, pvals, size)
        from scipy.special import bdtr

        second = np.searchsorted(bdtr(np.arange(n), n, pvals[1]), self.random(size))
        return np.stack([n - second, second], axis=-1)


@dataclass(frozen=True)
class RandomStreams:
    """Generators by name: each source of noise has its own, so that leaving one out moves no other."""

    seed: int = 0
    block: int = 0
    evenly: bool = False  # `even` gives generators of even draws
    _held: dict[tuple[str, str, tuple[int, ...]], Floats] = field(default_factory=dict, repr=False, compare=False)

    def child(self, block: int) -> RandomStreams:
        """The streams of a block."""
        return RandomStreams(self.seed, block, self.evenly)

    def __call__(self, name: str) -> np.random.Generator:
        """A generator that depends on the seed, the block and the name alone."""
        return np.random.default_rng(self._seeds(name))

    def even(self, name: str) -> np.random.Generator:
        """The generator of a source that is drawn once a step or once a run."""
        return EvenGenerator(np.random.PCG64(self._seeds(name))) if self.evenly else self(name)

    def uniform(self, name: str, size: tuple[int, ...]) -> Floats:
        """The first uniform draws of `even(name)`, which noise models that are drawn together share."""
        return self._first("random", name, size)

    def normal(self, name: str, size: tuple[int, ...]) -> Floats:
        """The first standard normal draws of `even(name)`."""
        return self._first("standard_normal", name, size)

    def _first(self, kind: str, name: str, size: tuple[int, ...]) -> Floats:
        key = kind, name, size
        if key not in self._held:
            found = self._held[key] = np.asarray(getattr(self.even(name), kind)(size))
            found.flags.writeable = False
        return self._held[key]

    def _seeds(self, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence((self.seed, self.block, crc32(name.encode())))


BATCHES = 8  # as many as draws are made in: see `presage.prediction.draws`


@dataclass(frozen=True)
class Estimate:
    """A number from draws, its standard error by their number, and what else it may be (90%) where that is known."""

    value: float
    error: float = 0.0
    low: float | None = None  # with parameters of the noise drawn too
    high: float | None = None
    end_errors: tuple[float, float] | None = None  # standard errors of low and high

    def to_json(self, times: float = 1.0) -> dict[str, float]:
        """The value and its standard error, multiplied by `times` to change units."""
        return {"value": self.value * times, "standard_error": self.error * times}


def estimate(draws: Floats, statistic: Callable[[Floats], float]) -> Estimate:
    """A statistic of draws [runs, steps]. Runs are independent, steps of a run need not be: the error is of
    batches of runs."""
    value = float(statistic(draws))
    count = min(BATCHES, len(draws))
    if count < 2:
        return Estimate(value)
    each = [float(statistic(part)) for part in np.array_split(draws, count)]
    return Estimate(value, float(np.std(each, ddof=1) / np.sqrt(count)))


# The pace of host threads: how much longer than usual they take. Each thread sits on a core of its own, so each has its
# own pace: lognormal with median 1, one factor for a whole run times one for each step (a first-order process). The few
# steps drawn stand for the many of a run, over which the steps' factors average out: their mean logarithm is 0. Ranks
# of one job share most of it: on three nodes of eight, ranks' paces in a step were 0.5%, 2.3% and 4.4% apart (standard
# deviation), where runs on different machines are 19%. They wait for each other, so of equal ranks only the slowest is
# drawn. Factors of runs are spread evenly over their distribution, in random order: few draws give steady quantiles.
_NORMAL = NormalDist()
RANK_SD = 0.03  # between ranks of a job


def pace_factors(rng: np.random.Generator, sd: float, draws: int, ranks: int = 1) -> Floats:
    """One factor a draw with median 1; of several ranks, the largest of theirs."""
    even = [_NORMAL.inv_cdf(((k + 0.5) / draws) ** (1 / ranks)) for k in range(draws)]
    return np.exp(sd * rng.permutation(np.array(even)))


def step_paces(
    rng: np.random.Generator, run_sd: float, step_sd: float, correlation: float, steps: int, draws: int
) -> Floats:
    """The pace of one thread in each step of each draw: (steps, draws)."""
    run = pace_factors(rng, run_sd, draws)
    state = rng.standard_normal((steps, draws))
    for k in range(1, steps):
        state[k] = correlation * state[k - 1] + np.sqrt(1 - correlation**2) * state[k]
    return np.asarray(run * np.exp(step_sd * (state - state.mean(axis=0))))


# The slowest of many replicas, by order statistics. A replica takes a factor of the whole run times one drawn anew in
# every step. How many replicas of a run fall into each part of the run factor's distribution is drawn, then of each
# part the largest step factor: the largest of n independent draws is the quantile of U**(1/n). Parts become finer
# towards the top, so the work does not grow with the number of replicas. What all share is applied to the result.
Ints = NDArray[np.int64]
Rng = np.random.Generator
USUAL = (0.0, 0.5, 0.9, 0.99, 0.999)  # of strata, cut at whether there are any or not: the same draws either way
EVEN = 64  # parts of equal probability; the last is cut further
PER_HALVING, HALVINGS = 2, 24  # into so many for each halving of the probability above


@dataclass(frozen=True)
class Replicas:
    """Replicas of a kind. What varies from step to step depends on how slow the rest is (a replica with one slow stage
    waits for that stage alone), so there is a distribution of it for each part of the run factor."""

    run_factor: Distribution
    step_factors: tuple[Distribution, ...]  # of each stratum
    strata: tuple[float, ...] = (0.0,)  # where each begins, as a share of replicas
    share: float = 1.0  # of all replicas, those of this kind


def slowest_replica(
    kinds: tuple[Replicas, ...], count: int, runs: int, steps: int, by_run: Rng, by_step: Rng
) -> Floats:
    """[runs, steps]: the largest of run factor x step factor over `count` replicas; slow ones stay slow in a run."""
    counts = by_run.multinomial(count, [k.share for k in kinds], runs)
    rngs = zip(by_run.spawn(len(kinds)), by_step.spawn(len(kinds)), strict=True)  # a kind less moves no other
    each = [_slowest(kind, n, steps, *two) for kind, n, two in zip(kinds, counts.T, rngs, strict=True)]
    return np.asarray(np.max(each, axis=0))


def _slowest(r: Replicas, count: Ints, steps: int, by_run: Rng, by_step: Rng) -> Floats:
    """The slowest of one kind, of which each run has `count`."""
    edges = _edges(int(count.max()), r.strata)
    counts = by_run.multinomial(count, np.diff(edges))
    power = 1 / np.maximum(counts, 1)
    place = edges[:-1] + np.diff(edges) * by_run.random(counts.shape)
    level = np.where(counts > 0, r.run_factor.quantile(place), 0.0)
    stratum = np.searchsorted(r.strata, edges[:-1], side="right") - 1
    out = np.zeros((len(count), steps))
    for k in range(steps):
        u = by_step.random(counts.shape) ** power
        for s, factor in enumerate(r.step_factors):
            at = stratum == s
            np.maximum(out[:, k], (level[:, at] * factor.quantile(u[:, at])).max(axis=1, initial=0.0), out=out[:, k])
    return out


def _edges(count: int, strata: tuple[float, ...]) -> Floats:
    """Edges of the parts from 0 to 1, with those of strata; a single replica needs no others."""
    even, above = np.arange(EVEN) / EVEN, 0.5 ** (np.arange(PER_HALVING * HALVINGS + 1) / PER_HALVING)
    fine = np.concatenate([even, 1 - above[above < 1 / EVEN]]) if count > 1 else np.zeros(1)
    return np.unique(np.concatenate([fine, USUAL, strata, [1.0]]))
