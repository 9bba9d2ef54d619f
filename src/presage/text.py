"""Formatting of numbers with units."""

from __future__ import annotations

import math
import re

# What a terminal obeys or reorders text by: C0 and C1 but for tab and newline, DEL, line separators, bidi controls.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def seconds(value: float) -> str:
    """Three or four significant digits with the unit that fits: 1.23 s, 45.6 ms, 789 us."""
    if math.isnan(value):
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0" if value == 0 else f"{value / 1e-6:.2g} us"


def known_seconds(value: float, low: float, high: float) -> str:
    """A time with no more digits than its interval allows: 35.3 ms where it may be 33.1 to 37.6 ms."""
    unit, scale = next(((u, s) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if abs(value) >= s), ("us", 1e-6))
    half = (high - low) / 2 / scale
    if not half > 0 or not math.isfinite(half):
        return seconds(value)
    digits = 1 - math.floor(math.log10(half))
    return f"{round(value / scale, digits):,.{max(digits, 0)}f} {unit}"


def percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def shorten(name: str, width: int = 60) -> str:
    """A long kernel name shortened in the middle."""
    if len(name) <= width:
        return name
    half = (width - 3) // 2
    return f"{name[: width - 3 - half]}...{name[-half:]}"


def amount(value: float) -> str:
    """A count with a decimal prefix: 950, 1.23 k, 45.6 G."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g}" if value else "-"


def size(nbytes: float) -> str:
    """Bytes with a binary prefix: 1.23 KiB, 45.6 GiB."""
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.0f} B" if nbytes else "-"


def printable(text: str) -> str:
    """The text with control characters written out, as \\x1b: names from files never reach a terminal raw."""
    return CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), text)
