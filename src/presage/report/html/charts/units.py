"""The unit that an axis of times is read in."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

__all__ = ["Unit", "time_unit"]


class Unit(NamedTuple):
    """Its name, and how many seconds (or bytes, or whatever is drawn) it has."""

    name: str
    size: float

    def told(self, value: float) -> str:
        """A value with four digits: 4.916 s, 41,200 days."""
        many = value / self.size
        return f"{many:,.0f} {self.name}" if abs(many) >= 1e4 else f"{many:.4g} {self.name}"


TIMES = (
    Unit("days", 86400.0), Unit("hours", 3600.0), Unit("minutes", 60.0), Unit("s", 1.0), Unit("ms", 1e-3),
    Unit("us", 1e-6),
)  # fmt: skip


def time_unit(typical: float) -> Unit:
    """The largest that a typical value in seconds has two or more of; seconds and below change at one."""
    if not isfinite(typical) or typical <= 0:
        return Unit("s", 1.0)
    return next((u for u in TIMES if typical >= u.size * (2 if u.size > 1 else 1)), TIMES[-1])
