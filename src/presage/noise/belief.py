"""A noise model with how well each of its numbers is known, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from presage.noise.noise import Noise

__all__ = ["LOGS", "WIDEST", "Belief", "Interval"]

LOGS = frozenset({"rank", "step", "own", "sd", "drift", "drift_sd", "run_sd", "log_sd", "cv", "shape"})  # numbers that
WIDEST = 10.0  # are at most this: steps 20,000 times as long as others are no noise, and soon no number
NINETY = 2 * 1.6448536269514722  # standard deviations that the middle 90% of a Normal span


@dataclass(frozen=True)
class Interval:
    """The middle 90% of what a number may be."""

    low: float
    high: float

    def drawn(self, value: float, z: float) -> float:
        """The number z standard deviations off; by ratio where all of it is above 0, and never across 0."""
        if self.low > 0 and value > 0:
            return float(value * np.exp(np.log(self.high / self.low) / NINETY * z))
        moved = value + (self.high - self.low) / NINETY * z
        return float(moved if self.low < 0 else max(0.0, moved))


@dataclass(frozen=True)
class Belief:
    """What is believed of the noise: the values, their intervals and their sources, by path (see `Noise.numbers`)."""

    noise: Noise
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # a path, or the start of several

    def drawn(self, rng: np.random.Generator) -> Noise:
        """The noise with each number drawn from its interval: what it may be as well."""
        numbers = self.noise.numbers()
        values = {p: i.drawn(numbers[p], rng.standard_normal()) for p, i in sorted(self.intervals.items())}
        return self.noise.changed({p: _possible(p, v) for p, v in values.items()})


def _possible(path: str, value: float) -> float:
    """Shares, correlations and spreads have an upper end."""
    last = path.split(".")[-1]
    if last in LOGS:
        return min(value, WIDEST)
    return min(value, 0.99) if last in ("share", "correlation", "over") else value
