"""ModelError: how far presage's own step times are off, by kind of prediction, from its accuracy tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from presage.hardware.facts import load_toml

FILE = Path(__file__).resolve().parent.parent / "data" / "model_error.toml"
NORMAL_90 = 2 * 1.6448536  # width of a normal distribution's 90% interval, in standard deviations


@dataclass(frozen=True)
class ModelError:
    """Measured over predicted step time: 5th and 95th percentile over published runs that nothing was fitted to."""

    what: str
    low: float
    high: float
    runs: int
    sources: int
    coverage: float | None = None  # of sources that were left out

    @property
    def sd(self) -> float:
        """Standard deviation of log(measured / predicted), from the width of the interval."""
        return math.log(self.high / self.low) / NORMAL_90

    @property
    def note(self) -> str:
        """Where the interval is from, in a line."""
        return (
            f"90% interval: presage's error on {self.runs:,} published runs of {self.what}, from {self.sources} sources"
        )

    def interval(self, median: float, spread: float = 1.0) -> tuple[float, float]:
        """90% interval around a predicted median; `spread` is p95 over p50 of what varies besides, run to run."""
        low, high = min(self.low, 1.0), max(self.high, 1.0)
        own = math.log(spread)
        return median * math.exp(-math.hypot(math.log(low), own)), median * math.exp(math.hypot(math.log(high), own))


@cache
def model_error(kind: str) -> ModelError:
    """The error of a kind of prediction: dense, moe, recommendation."""
    return ModelError(**load_toml(FILE)[kind])
