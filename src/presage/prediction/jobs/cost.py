"""Energy, cost and days of training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError

HOUR, DAY, KWH = 3600.0, 86400.0, 3.6e6
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
KEYS = {"power_W": "power", "price_per_gpu_hour": "price", "pue": "pue"}


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Power draw and prices, in any currency."""

    power: float | None = None  # W a GPU draws at work; None: its power limit
    price: float | None = None  # of a GPU for an hour
    pue: float = 1.0  # watts of the building for each of its GPUs'

    def __post_init__(self) -> None:
        if self.power is not None and not 0 < self.power < 1e5:
            raise PresageError(f"power_W > 0: it is {self.power:g}")
        if self.price is not None and not self.price >= 0:
            raise PresageError(f"price_per_gpu_hour >= 0: it is {self.price:g}")
        if not 1 <= self.pue < 100:
            raise PresageError(f"pue >= 1: it is {self.pue:g}")


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Time, energy and cost of training on some tokens."""

    tokens: float
    steps: float
    seconds: float
    gpu_hours: float
    energy: float  # J
    cost: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def kwh(self) -> float:
        return self.energy / KWH

    @staticmethod
    def of(tokens: float, steps: float, step: float, gpus: int, watts: float, price: float | None) -> TrainingCost:
        """The cost of `steps` steps of `step` seconds; `watts` is the power of all GPUs."""
        seconds = steps * step
        hours = seconds * gpus / HOUR
        return TrainingCost(tokens, steps, seconds, hours, seconds * watts, None if price is None else hours * price)


def cost_terms(cluster: Mapping[str, Any], path: str | Path) -> CostTerms:
    """The terms that [cluster] of a job's file gives."""
    given = {name: float(cluster[key]) for key, name in KEYS.items() if cluster.get(key) is not None}
    try:
        return CostTerms(**given)
    except PresageError as e:
        raise InputError(path, str(e), "cluster") from e


def parse_tokens(text: str) -> float:
    """A number of tokens as people write it: 15T, 300B, 1.5e12."""
    found = re.fullmatch(r"([\d.,_]+(?:e[+-]?\d+)?)\s*([kmbgtp]?)", text.strip().lower())
    try:
        value = float(found[1].replace(",", "").replace("_", "")) * UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise PresageError(f"{text!r} is not a number of tokens: write 15T, 300B or 1.5e12")
    return value
