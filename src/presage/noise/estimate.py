"""What draws tell, with how well they tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCHES", "Estimate", "estimate"]

Floats = NDArray[np.float64]
BATCHES = 8  # as many as draws are made in: see `presage.prediction.draws`


@dataclass(frozen=True)
class Estimate:
    """A number from draws, its standard error by their number, and what else it may be (90%) where that is known."""

    value: float
    error: float = 0.0
    low: float | None = None  # with parameters of the noise drawn too
    high: float | None = None

    def to_json(self, times: float = 1.0) -> dict[str, float]:
        """The value and its error in another unit, of which one of its own is so many."""
        return {"value": self.value * times, "standard_error": self.error * times}


def estimate(draws: Floats, statistic: Callable[[Floats], float]) -> Estimate:
    """Of [runs, steps]: rows are independent, draws of one row need not be. The error is that of batches of rows."""
    value = float(statistic(draws))
    count = min(BATCHES, len(draws))
    if count < 2:
        return Estimate(value)
    each = [float(statistic(part)) for part in np.array_split(draws, count)]
    return Estimate(value, float(np.std(each, ddof=1) / np.sqrt(count)))
