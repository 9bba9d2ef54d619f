"""Distributions as small values: a mean, quantiles, draws; they add, scale, mix, and take the largest of many.

`a + b` is the sum of two independent draws, `2 * a` and `a + 1` are plain, `a.largest(n)` is the largest of n
independent ones. What is shared between draws must be drawn first and only the rest taken to a power: see `largest`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import PresageError

__all__ = [
    "Distribution",
    "Empirical",
    "Fixed",
    "Gamma",
    "Largest",
    "LogNormal",
    "Mixture",
    "Normal",
    "Pareto",
    "Scaled",
    "Spliced",
    "Sum",
]

Floats = NDArray[np.float64]
Shape = int | tuple[int, ...]
GRID = 4096  # evenly spaced probabilities that stand for a distribution where no formula does


class Distribution(ABC):
    """Of a real number."""

    @abstractmethod
    def cdf(self, x: ArrayLike) -> Floats:
        """The probability of at most x."""

    @abstractmethod
    def quantile(self, p: ArrayLike) -> Floats:
        """What is not exceeded with probability p."""

    @property
    def mean(self) -> float:
        return float(self._grid.mean())

    @property
    def sd(self) -> float:
        return float(self._grid.std())

    @cached_property
    def _grid(self) -> Floats:
        return self.quantile((np.arange(GRID) + 0.5) / GRID)

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        """Independent draws."""
        return self.quantile(rng.random(shape))

    def largest(self, n: int) -> Distribution:
        """The largest of n independent draws; for draws that share something, use it on what they do not share."""
        return self if n == 1 else Largest(self, n)

    def __mul__(self, factor: float) -> Distribution:
        return Scaled(self, float(factor), 0.0)

    __rmul__ = __mul__

    def __add__(self, other: Distribution | float) -> Distribution:
        return Sum((self, other)) if isinstance(other, Distribution) else Scaled(self, 1.0, float(other))

    __radd__ = __add__


@dataclass(frozen=True)
class Fixed(Distribution):
    """No spread."""

    value: float

    @property
    def mean(self) -> float:
        return self.value

    @property
    def sd(self) -> float:
        return 0.0

    def cdf(self, x: ArrayLike) -> Floats:
        return (np.asarray(x, np.float64) >= self.value).astype(np.float64)

    def quantile(self, p: ArrayLike) -> Floats:
        return np.full(np.shape(p), self.value)


@dataclass(frozen=True)
class Normal(Distribution):
    center: float
    width: float  # standard deviation

    def __post_init__(self) -> None:
        _positive("a Normal's width", self.width, zero=True)

    @property
    def mean(self) -> float:
        return self.center

    @property
    def sd(self) -> float:
        return self.width

    def cdf(self, x: ArrayLike) -> Floats:
        return _ndtr(_standard(np.asarray(x, np.float64), self.center, self.width))

    def quantile(self, p: ArrayLike) -> Floats:
        return self.center + (self.width * _ndtri(p) if self.width else np.zeros(np.shape(p)))

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return rng.normal(self.center, self.width, shape)


@dataclass(frozen=True)
class LogNormal(Distribution):
    median: float
    log_sd: float

    def __post_init__(self) -> None:
        _positive("a LogNormal's median", self.median)
        _positive("a LogNormal's log_sd", self.log_sd, zero=True)

    @property
    def mean(self) -> float:
        return float(self.median * np.exp(self.log_sd**2 / 2))

    @property
    def sd(self) -> float:
        return float(self.mean * np.sqrt(np.expm1(self.log_sd**2)))

    def cdf(self, x: ArrayLike) -> Floats:
        x = np.asarray(x, np.float64)
        logs = np.log(np.maximum(x, np.finfo(float).tiny))
        return np.where(x > 0, _ndtr(_standard(logs, np.log(self.median), self.log_sd)), 0.0)

    def quantile(self, p: ArrayLike) -> Floats:
        return np.asarray(self.median * np.exp(self.log_sd * _ndtri(p) if self.log_sd else np.zeros(np.shape(p))))

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return rng.lognormal(np.log(self.median), self.log_sd, shape)


@dataclass(frozen=True)
class Gamma(Distribution):
    average: float
    cv: float  # standard deviation over mean

    def __post_init__(self) -> None:
        _positive("a Gamma's average", self.average)
        _positive("a Gamma's cv", self.cv)

    @property
    def mean(self) -> float:
        return self.average

    @property
    def sd(self) -> float:
        return self.average * self.cv

    def cdf(self, x: ArrayLike) -> Floats:
        from scipy.special import gammainc

        shape = self.cv**-2
        return np.asarray(gammainc(shape, np.maximum(np.asarray(x, np.float64), 0.0) * shape / self.average))

    def quantile(self, p: ArrayLike) -> Floats:
        from scipy.special import gammaincinv

        shape = self.cv**-2
        return np.asarray(gammaincinv(shape, np.asarray(p, np.float64)) * self.average / shape)

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return rng.gamma(self.cv**-2, self.average * self.cv**2, shape)


@dataclass(frozen=True)
class Pareto(Distribution):
    """Generalised Pareto: what exceeds a high threshold looks like this, whatever is below it."""

    least: float
    scale: float
    shape: float  # 0: exponential; above 0: heavy; below 0: bounded

    def __post_init__(self) -> None:
        _positive("a Pareto's scale", self.scale)

    @property
    def mean(self) -> float:
        return self.least + self.scale / (1 - self.shape) if self.shape < 1 else float("inf")

    def cdf(self, x: ArrayLike) -> Floats:
        over = np.maximum(np.asarray(x, np.float64) - self.least, 0.0) / self.scale
        if abs(self.shape) < 1e-9:
            return -np.expm1(-over)
        return np.asarray(1 - np.maximum(1 + self.shape * over, 0.0) ** (-1 / self.shape))

    def quantile(self, p: ArrayLike) -> Floats:
        left = np.log1p(-np.asarray(p, np.float64))
        if abs(self.shape) < 1e-9:
            return np.asarray(self.least - self.scale * left)
        return np.asarray(self.least + self.scale * np.expm1(-self.shape * left) / self.shape)


@dataclass(frozen=True, eq=False)
class Empirical(Distribution):
    """Measured values as they are, with straight lines between neighbours."""

    values: Floats

    def __post_init__(self) -> None:
        v = np.sort(np.asarray(self.values, np.float64).ravel())
        if not len(v) or not np.isfinite(v).all():
            raise PresageError("an empirical distribution needs finite values, at least one")
        object.__setattr__(self, "values", v)

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def sd(self) -> float:
        return float(self.values.std())

    def cdf(self, x: ArrayLike) -> Floats:
        n = len(self.values)
        x = np.asarray(x, np.float64)
        inside = np.interp(x, self.values, (np.arange(n) + 0.5) / n)
        return np.where(x < self.values[0], 0.0, np.where(x >= self.values[-1], 1.0, inside))

    def quantile(self, p: ArrayLike) -> Floats:
        n = len(self.values)
        return np.interp(np.asarray(p, np.float64), (np.arange(n) + 0.5) / n, self.values)

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        return self.values[rng.integers(0, len(self.values), shape)]


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
        _positive("how many draws the largest is of", self.n)

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
    over: float

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
        each = [rng.permutation(np.tile(d._grid, 16)) for d in self.parts]
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


def _standard(x: Floats, center: float, width: float) -> Floats:
    return (x - center) / width if width else np.where(x >= center, np.inf, -np.inf)


def _ndtr(x: ArrayLike) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(x))


def _ndtri(p: ArrayLike) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(p))


def _positive(what: str, value: float, zero: bool = False) -> None:
    if not (value > 0 or (zero and value == 0)) or not np.isfinite(value):
        raise PresageError(f"{what} must be {'0 or ' if zero else ''}above 0, not {value}")
