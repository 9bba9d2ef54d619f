"""What is asked of both plans: how many tokens, by when, under which conditions."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from presage.errors import PresageError
from presage.noise.priors import CONDITIONS, DEFAULT
from presage.prediction.jobs.cost import parse_tokens
from presage.ui.knobs import Wrong

__all__ = ["ASKED", "Asked", "asked_of"]

ASKED: dict[str, Any] = {"tokens": "15T", "days": 60, "noise": "production"}  # what the page begins with
DAY = 86400.0
MOST_STEPS = 1_000_000_000


@dataclass(frozen=True)
class Asked:
    """`days`: until the deadline."""

    tokens: float
    days: float | None = None
    noise: str = DEFAULT

    def steps(self, tokens_per_step: int) -> int:
        many = ceil(self.tokens / tokens_per_step)
        if many > MOST_STEPS:
            raise Wrong(f"Tokens: that is {many:,} steps, more than {MOST_STEPS:,}", ("tokens",))
        return many


def asked_of(tokens: Any, days: Any, noise: Any) -> Asked:
    """From what a page says, which may be anything."""
    if not isinstance(tokens, str | int | float) or isinstance(tokens, bool):
        raise Wrong("Tokens: write 15T, 300B or 1.5e12", ("tokens",))
    try:
        many = parse_tokens(str(tokens)[:40])
    except PresageError as e:
        raise Wrong(f"Tokens: {e}", ("tokens",)) from e
    if noise not in CONDITIONS:
        raise Wrong(f"GPUs are: choose one of {', '.join(CONDITIONS)}", ("noise",))
    return Asked(many, _days(days), str(noise))


def _days(given: Any) -> float | None:
    if given in (None, ""):
        return None
    try:
        value = float(str(given)[:40].strip().lower().removesuffix("d"))
    except ValueError:
        value = 0.0
    if isinstance(given, bool) or not isfinite(value) or not 0 < value <= 36525:
        raise Wrong("Deadline: write a number of days, such as 60, or leave it empty", ("days",))
    return value
