"""The power limit over a step: as costs/power.py has it, in scalars.

A step's energy (so much a FLOP by type of number, so much a byte) and what the GPU draws anyway, over its time, is the
mean demand. Above the limit tensor-core kernels take `1 + slope x excess / limit` times as long; the excess falls as
they do, and the point where both agree is the root of a quadratic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

__all__ = ["Power"]


@dataclass(frozen=True)
class Power:
    """What a GPU may draw, and what its work does."""

    limit: float  # W
    base: float  # W, a busy GPU doing next to nothing
    per_byte: float  # J
    per_flop: Mapping[str, float]  # J, by type of number, and of attention's forward and backward kernels
    slope: float

    def energy(self, flops: Mapping[str, float], nbytes: float) -> float:
        """Joules above the base."""
        dearest = self.per_flop["bf16"]
        return nbytes * self.per_byte + sum(f * self.per_flop.get(kind, dearest) for kind, f in flops.items())

    def slowdown(self, energy: float, tensor: float, other: float) -> float:
        """How much longer tensor-core kernels take that have so many seconds at the full clock, beside `other` seconds
        of other kernels and of waiting."""
        if tensor <= 0.0 or self.base + energy / (tensor + other) <= self.limit:
            return 1.0
        # f - 1 = slope (base - limit + energy / (other + tensor f)) / limit, in x = other + tensor f
        c = self.slope / self.limit
        b = other + tensor + tensor * c * (self.base - self.limit)
        x = (b + sqrt(b * b + 4.0 * tensor * c * energy)) / 2.0
        return max(1.0, (x - other) / tensor)
