"""The Distribution interface, parametric families, and empirical distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import PresageError

Floats = NDArray[np.float64]
Shape = int | tuple[int, ...]
BOUNDED = {"limits": (-10.0, 10.0)}  # of a parameter in a noise file
GRID = 4096  # evenly spaced probabilities that stand for a distribution where no formula does


class Distribution(ABC):
    """Distribution of a real number."""

    @abstractmethod
    def cdf(self, x: ArrayLike) -> Floats:
        """The probability of at most x."""

    @abstractmethod
    def quantile(self, p: ArrayLike) -> Floats:
        """The p-quantile."""

    @property
    def mean(self) -> float:
        return float(self.grid.mean())

    @property
    def sd(self) -> float:
        return float(self.grid.std())

    @cached_property
    def grid(self) -> Floats:
        """Its quantiles at evenly spaced probabilities."""
        return self.quantile((np.arange(GRID) + 0.5) / GRID)

    def sample(self, rng: np.random.Generator, shape: Shape) -> Floats:
        """Independent draws."""
        return self.quantile(rng.random(shape))

    def largest(self, n: int) -> Distribution:
        """The largest of n independent draws; for draws that share something, use it on what they do not share."""
        from presage.noise.distribution.composed import Largest

        return self if n == 1 else Largest(self, n)

    def __mul__(self, factor: float) -> Distribution:
        from presage.noise.distribution.composed import Scaled

        return Scaled(self, float(factor), 0.0)

    __rmul__ = __mul__

    def __add__(self, other: Distribution | float) -> Distribution:
        from presage.noise.distribution.composed import Scaled, Sum

        return Sum((self, other)) if isinstance(other, Distribution) else Scaled(self, 1.0, float(other))

    __radd__ = __add__


def positive(what: str, value: float, zero: bool = False) -> None:
    if not (value > 0 or (zero and value == 0)) or not np.isfinite(value):
        raise PresageError(f"{what} must be {'0 or ' if zero else ''}above 0, not {value}")


@dataclass(frozen=True)
class Fixed(Distribution):
    """A constant."""

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
        positive("a Normal's width", self.width, zero=True)

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
    log_sd: float = field(metadata=BOUNDED)

    def __post_init__(self) -> None:
        positive("a LogNormal's median", self.median)
        positive("a LogNormal's log_sd", self.log_sd, zero=True)

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
    cv: float = field(metadata=BOUNDED)  # standard deviation over mean

    def __post_init__(self) -> None:
        positive("a Gamma's average", self.average)
        positive("a Gamma's cv", self.cv)

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
    """Generalised Pareto: the limit distribution of exceedances over a high threshold."""

    least: float
    scale: float
    shape: float = field(metadata=BOUNDED)  # 0: exponential; above 0: heavy; below 0: bounded

    def __post_init__(self) -> None:
        positive("a Pareto's scale", self.scale)

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


def _standard(x: Floats, center: float, width: float) -> Floats:
    return (x - center) / width if width else np.where(x >= center, np.inf, -np.inf)


def _ndtr(x: ArrayLike) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(x))


def _ndtri(p: ArrayLike) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(p))
