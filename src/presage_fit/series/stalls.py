"""Steps that something held up: how often, where along the run, for how many seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage_fit.series.drift import Curve
from presage_fit.series.recurring import Recurring, recurring

__all__ = ["Seen", "stalls_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Seen:
    """Stalls of sister runs."""

    counts: Ints  # [runs]: those that do not recur
    records: Ints  # [runs]: in which they could have been
    seconds: Floats  # of each
    where: Curve  # rate along the run, mean 1
    recurring: tuple[Recurring, ...]


def stalls_of(excess: Floats, stalled: Bools, plain: Bools, steps: Ints, clock: Floats) -> Seen:
    """Of seconds above the usual [runs, records] where `stalled`; `clock`: usual steps since the job's start."""
    again, taken = recurring(excess, stalled, plain, clock)
    alone = stalled & ~taken
    return Seen(
        alone.sum(axis=1),
        plain.sum(axis=1),
        np.maximum(excess[alone], 1e-9),
        Curve(steps.astype(np.float64), _where(alone, plain)),
        again,
    )


def _where(stalled: Bools, plain: Bools, prior: float = 3.0) -> Floats:
    """The rate around each record over the mean rate, leaning to 1 where few were seen."""
    n = stalled.shape[1]
    half = max(10, n // 10)
    hits, seen = _window(stalled.sum(0), half), _window(plain.sum(0), half)
    rate = stalled.sum() / max(1, plain.sum())
    if rate == 0 or n < 40:
        return np.ones(n)
    raw = (hits + prior) / (seen * rate + prior)
    return np.asarray(raw / raw.mean())


def _window(x: NDArray[np.int64], half: int) -> Floats:
    total = np.append(0.0, np.cumsum(x))
    at = np.arange(len(x))
    return np.asarray(total[np.minimum(len(x), at + half + 1)] - total[np.maximum(0, at - half)])
