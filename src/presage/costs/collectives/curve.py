"""Seconds over bytes as a table of knots: continuous and never falling, whatever it was made from."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GRID", "Curve", "rising"]

Array = npt.NDArray[np.float64]
GRID = 2.0 ** np.arange(3, 40.25, 0.5)  # bytes, from 8 B to half a terabyte


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight between knots on logarithmic axes, flat before the first, in proportion to bytes after the last."""

    log_bytes: tuple[float, ...]
    log_seconds: tuple[float, ...]

    @classmethod
    def through(cls, nbytes: Array, seconds: Array) -> Curve:
        """Through these knots; where they fall, through the mean of those that do."""
        return cls(tuple(np.log(nbytes).tolist()), tuple(rising(np.log(seconds)).tolist()))

    def at_least(self, per_byte: float) -> Curve:
        """Nowhere below so many seconds a byte."""
        least = np.array(self.log_bytes) + log(per_byte)
        return Curve(self.log_bytes, tuple(np.maximum(self.log_seconds, least).tolist()))

    def at(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        x, xs, ys = log(nbytes) if nbytes > 1 else 0.0, self.log_bytes, self.log_seconds
        if x <= xs[0]:
            return exp(ys[0])
        if x >= xs[-1]:
            return exp(ys[-1] + x - xs[-1])
        i = bisect_right(xs, x)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return exp(ys[i - 1] + share * (ys[i] - ys[i - 1]))

    def many(self, nbytes: Any) -> Array:
        """The same for an array."""
        x = np.log(np.maximum(np.asarray(nbytes, np.float64), 1.0))
        inside = np.interp(x, self.log_bytes, self.log_seconds)
        return np.exp(inside + np.maximum(x - self.log_bytes[-1], 0.0))


def rising(values: Array) -> Array:
    """The nearest sequence that never falls, by least squares: neighbours that fall are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools.pop(-2), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return np.concatenate([np.full(n, value) for value, n in pools])
