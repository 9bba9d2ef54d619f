"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["percent", "seconds", "shorten"]


def seconds(value: float) -> str:
    """Three or four significant digits with the unit that fits: 1.23 s, 45.6 ms, 789 us."""
    if math.isnan(value):
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0" if value == 0 else f"{value / 1e-6:.2g} us"


def percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def shorten(name: str, width: int = 60) -> str:
    """A long kernel name cut in the middle, where it says least."""
    if len(name) <= width:
        return name
    half = (width - 3) // 2
    return f"{name[: width - 3 - half]}...{name[-half:]}"
