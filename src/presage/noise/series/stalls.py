"""Steps that something held up: how often, where along the run, for how many seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.noise.series.drift import Curve

__all__ = ["Recurring", "Seen", "placed", "stalls_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NEAR = 2  # records: stalls of sister runs this close to each other are at the same place
MOST = 0.6  # of the runs
CHANCE = 0.02  # places where sister runs meet are believed where so few are expected by chance


@dataclass(frozen=True, eq=False)
class Recurring:
    """A stall that comes at the same place in sister runs."""

    step: int  # where its first record is, in the middle run
    probability: float
    shapes: tuple[Floats, ...]  # of each run that had it: seconds of consecutive records
    offsets: tuple[int, ...]  # in records


@dataclass(frozen=True, eq=False)
class Seen:
    """Stalls of sister runs."""

    counts: Ints  # [runs]: those that do not recur
    records: Ints  # [runs]: in which they could have been
    seconds: Floats  # of each
    where: Curve  # rate along the run, mean 1
    recurring: tuple[Recurring, ...]


def stalls_of(excess: Floats, stalled: Bools, plain: Bools, steps: Ints) -> Seen:
    """Of seconds above the usual [runs, records] where `stalled`."""
    recurring, taken = _recurring(excess, stalled, plain, steps)
    alone = stalled & ~taken
    return Seen(
        alone.sum(axis=1),
        plain.sum(axis=1),
        np.maximum(excess[alone], 1e-9),
        Curve(steps.astype(np.float64), _where(alone, plain)),
        recurring,
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


def _recurring(excess: Floats, stalled: Bools, plain: Bools, steps: Ints) -> tuple[tuple[Recurring, ...], Bools]:
    """Places where most runs stall, though by chance hardly any such place would be."""
    runs, n = stalled.shape
    taken = np.zeros_like(stalled)
    found: list[Recurring] = []
    for k in map(int, np.flatnonzero(stalled.any(axis=0) & (runs > 1))):
        near = slice(max(0, k - NEAR), min(n, k + NEAR + 1))
        longest = np.where(stalled & ~taken, excess, 0.0)[:, near].max(axis=1)
        who = np.flatnonzero(longest > 0)
        if len(who) < 2 or len(who) / runs < MOST:
            continue
        alike = int((stalled & (excess > longest[who].min() / 2)).sum())  # about as long, here and elsewhere
        rate = (alike - len(who) + 0.5) / max(1, int(plain.sum()))
        if _by_chance(rate, near.stop - near.start, runs, len(who), n) <= CHANCE:
            found.append(_place(excess, stalled & ~taken, who, k, near, int(steps[k])))
            taken[who, near] |= stalled[who, near]
    return tuple(found), taken


def _by_chance(rate: float, width: int, runs: int, hits: int, places: int) -> float:
    """How many places with so many runs stalled are expected, if stalls fall anywhere."""
    from math import comb

    p = 1 - (1 - rate) ** width
    return places / width * sum(comb(runs, h) * p**h * (1 - p) ** (runs - h) for h in range(hits, runs + 1))


def _place(excess: Floats, stalled: Bools, who: Ints, k: int, near: slice, step: int) -> Recurring:
    shapes, offsets = [], []
    for r in who:
        at = near.start + np.flatnonzero(stalled[r, near])
        shapes.append(np.where(stalled[r], excess[r], 0.0)[at[0] : at[-1] + 1])
        offsets.append(int(at[0] - k))
    return Recurring(step, (len(who) + 0.5) / (len(stalled) + 1), tuple(shapes), tuple(offsets))


def placed(events: Sequence[Recurring], steps: Ints, rng: np.random.Generator, draws: int) -> Floats:
    """Seconds that recurring stalls add, [draws, records]."""
    added = np.zeros((draws, len(steps)))
    for e in events:
        at = int(np.searchsorted(steps, e.step))
        if at >= len(steps):
            continue
        which = rng.integers(0, len(e.shapes), draws)
        where = rng.integers(0, len(e.offsets), draws)
        size = np.exp(0.3 * rng.standard_normal(draws))
        happens = rng.random(draws) < e.probability
        for d in np.flatnonzero(happens):
            start = max(0, at + e.offsets[where[d]])
            row = e.shapes[which[d]][: len(steps) - start]
            added[d, start : start + len(row)] += size[d] * row
    return added
