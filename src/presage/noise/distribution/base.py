"""What every distribution can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import PresageError

__all__ = ["Distribution", "Floats", "Shape", "positive"]

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
