"""Checks that numbers from users are finite and of a plausible size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError

MOST = 10**18  # FLOPs of a step are more; counts, sizes and times that people write down are not


def finite(value: float, name: str) -> float:
    """The number of an option, checked."""
    if wrong := _wrong(value):
        raise PresageError(f"{name} {wrong}")
    return value


def check_finite(path: str | Path, value: Any, field: str = "") -> None:
    """Check every number in the contents of a file, at any depth; raises for the first that is not finite."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_finite(path, inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_finite(path, inner, f"{field}[{i}]")
    elif isinstance(value, int | float) and (wrong := _wrong(value)):
        raise InputError(path, wrong, field or None)


def _wrong(value: float) -> str:
    """What is wrong with a number; empty if nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}: it should be a finite number"
    if abs(value) > MOST:
        shown = (
            f"a number of {int(value.bit_length() * 0.30103) + 1} digits" if isinstance(value, int) else f"{value:g}"
        )
        return f"is {shown}: nothing presage knows of is above 1e18"
    return ""
