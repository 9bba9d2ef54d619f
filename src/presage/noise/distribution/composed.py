"""Distributions made of others: scaled, added, mixed, spliced, the largest of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from presage.errors import PresageError
from presage.noise.distribution.families import Distribution, Empirical, Fixed, Floats, Pareto, Shape, positive


@dataclass(frozen=True)
class Scaled(Distribution):
    base: Distribution
    factor: float
    shift: float

    @property
    def mean(self) -> float:
        return self.base.mean * self.factor + self.shift

    @property
    def sd(self) -> float:
        return self.base.sd * abs(self.factor)

    def cdf(self, x: ArrayLike) -> Floats:
        if self.factor == 0:
            return Fixed(self.shift).cdf(x)
        below = self.base.cdf((np.asarray(x, np.float64) - self.shift) / self.factor)
        return below if self.factor > 0 else 1 - below

    def quantile(self, p: ArrayLike) -> Floats:
        p = np.asarray(p, np.float64)
        return self.base.quantile(p if self.factor >= 0 else 1 - p) * self.factor + self.shift

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return self.base.sample(rng, shape) * self.factor + self.shift


@dataclass(frozen=True)
class Largest(Distribution):
    """The largest of n independent draws."""

    base: Distribution
    n: int

    def __post_init__(self) -> None:
        positive("how many draws the largest is of", self.n)

    def cdf(self, x: ArrayLike) -> Floats:
        return self.base.cdf(x) ** self.n

    def quantile(self, p: ArrayLike) -> Floats:
        return self.base.quantile(np.asarray(p, np.float64) ** (1 / self.n))


@dataclass(frozen=True)
class Mixture(Distribution):
    """One of several, each with its share."""

    parts: tuple[Distribution, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.shares) or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-9:
            raise PresageError("a mixture needs a share for each part, all together 1")

    @property
    def mean(self) -> float:
        return sum(s * d.mean for s, d in zip(self.shares, self.parts, strict=True))

    @property
    def sd(self) -> float:
        square = sum(s * (d.sd**2 + d.mean**2) for s, d in zip(self.shares, self.parts, strict=True))
        return float(np.sqrt(max(0.0, square - self.mean**2)))

    def cdf(self, x: ArrayLike) -> Floats:
        return np.asarray(sum(s * d.cdf(x) for s, d in zip(self.shares, self.parts, strict=True)))

    def quantile(self, p: ArrayLike) -> Floats:
        p = np.asarray(p, np.float64)
        ends = np.array([d.quantile(p) for s, d in zip(self.shares, self.parts, strict=True) if s])
        return _inverse(self.cdf, p, ends.min(axis=0), ends.max(axis=0))

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        which = rng.choice(len(self.parts), shape, p=self.shares)
        return np.choose(which, [d.sample(rng, shape) for d in self.parts])


@dataclass(frozen=True)
class Spliced(Distribution):
    """A body up to a threshold and a tail of its own above it: `over` of the draws are the tail's."""

    body: Distribution
    tail: Distribution  # of what is above the threshold
    threshold: float
    over: float = field(metadata={"limits": (0.0, 1.0)})

    def cdf(self, x: ArrayLike) -> Floats:
        x = np.asarray(x, np.float64)
        low = self.body.cdf(np.minimum(x, self.threshold)) / max(float(self.body.cdf(self.threshold)), 1e-300)
        return np.where(x <= self.threshold, (1 - self.over) * low, 1 - self.over + self.over * self.tail.cdf(x))

    def quantile(self, p: ArrayLike) -> Floats:
        p = np.asarray(p, np.float64)
        under = np.minimum(p / (1 - self.over), 1.0) * float(self.body.cdf(self.threshold))
        above = np.clip((p - 1 + self.over) / self.over if self.over else np.zeros(p.shape), 0.0, 1.0)
        low = np.minimum(self.body.quantile(under), self.threshold)
        return np.where(p <= 1 - self.over, low, self.tail.quantile(above))


@dataclass(frozen=True)
class Sum(Distribution):
    """Independent parts, added. Quantiles from evenly spaced quantiles of the parts, put together in random order."""

    parts: tuple[Distribution, ...]

    @property
    def mean(self) -> float:
        return sum(d.mean for d in self.parts)

    @property
    def sd(self) -> float:
        return float(np.sqrt(sum(d.sd**2 for d in self.parts)))

    @cached_property
    def _drawn(self) -> Empirical:
        rng = np.random.default_rng(0)
        each = [rng.permutation(np.tile(d.grid, 16)) for d in self.parts]
        return Empirical(np.sum(each, axis=0))

    def cdf(self, x: ArrayLike) -> Floats:
        return self._drawn.cdf(x)

    def quantile(self, p: ArrayLike) -> Floats:
        return self._drawn.quantile(p)

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return np.asarray(sum(d.sample(rng, shape) for d in self.parts))


def _inverse(cdf: Callable[[Floats], Floats], p: Floats, low: Floats, high: Floats) -> Floats:
    """By halving: 60 times is below any rounding."""
    low, high = np.array(low, np.float64), np.array(high, np.float64)
    for _ in range(60):
        middle = (low + high) / 2
        below = cdf(middle) < p
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.asarray(high)


USUAL, WORTH = -0.1, 100  # the shape that Normal-like tails show this far out, and how many values that is worth
SHAPES = (-0.5, 0.5)  # what is fitted stays within: bounded, but not at once; heavy, but with a variance


def smooth_distribution(values: ArrayLike, over: float = 0.05, fewest: int = 40) -> Distribution:
    """The draws, with their largest `over` (at least `fewest`) replaced by a generalised Pareto tail fitted to them."""
    v = np.sort(np.asarray(values, np.float64).ravel())
    top = max(int(len(v) * over), fewest)
    if v[0] == v[-1]:
        return Fixed(float(v[0]))
    if len(v) < 4 * fewest or v[-top] == v[-1]:
        return Empirical(v)
    threshold = float(v[-top - 1])
    return Spliced(Empirical(v), fit_pareto(v[-top:], threshold), threshold, top / len(v))


def fit_pareto(values: Floats, least: float) -> Pareto:
    """The generalised Pareto of what exceeds `least`, by probability-weighted moments (Hosking and Wallis 1987)."""
    over = np.sort(np.asarray(values, np.float64)) - least
    n = len(over)
    first = float(over.mean())
    second = float((over * (n - 1 - np.arange(n)) / max(1, n - 1)).mean())
    shape = 2 - first / (first - 2 * second) if first > 2 * second else SHAPES[1]
    shape = float(np.clip((shape * n + USUAL * WORTH) / (n + WORTH), *SHAPES))
    return Pareto(least, max(first * (1 - shape), 1e-300), shape)
