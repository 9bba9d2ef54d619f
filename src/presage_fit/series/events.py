"""Stalls that come again in sister runs: at the same step number, or at the same time after the job's start.

Work that falls due at a step (a checkpoint nobody logged) goes by step numbers; timers (of file systems, of
credentials) go by the clock, and runs of different pace meet them at different steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage_fit.series.drift import Curve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NEAR = 2.0  # records: stalls of sister runs this close to each other are at the same place
MOST = 0.6  # of the runs
CHANCE = 0.02  # places where sister runs meet are believed where so few are expected by chance


@dataclass(frozen=True, eq=False)
class Recurring:
    by_clock: bool
    place: float  # a record's number, or seconds since the job's start in usual steps
    probability: float
    shapes: tuple[Floats, ...]  # of each run that had it: seconds of consecutive records
    offsets: tuple[float, ...]  # of each: where its first record is, from `place`


def recurring(excess: Floats, stalled: Bools, plain: Bools, clock: Floats) -> tuple[tuple[Recurring, ...], Bools]:
    """Places where most runs stall, though by chance hardly any such place would be; and which records those are.

    `excess` in seconds and `clock` in usual steps since the job's start, both [runs, records].
    """
    numbers = np.broadcast_to(np.arange(float(stalled.shape[1])), stalled.shape)
    by_step, taken = _found(excess, stalled, plain, numbers, by_clock=False)
    by_clock, more = _found(excess, stalled & ~taken, plain, clock, by_clock=True)
    return by_step + by_clock, taken | more


def _found(
    excess: Floats, stalled: Bools, plain: Bools, where: Floats, by_clock: bool
) -> tuple[tuple[Recurring, ...], Bools]:
    runs, n = stalled.shape
    taken = np.zeros_like(stalled)
    found: list[Recurring] = []
    for place in np.sort(where[stalled]) if runs > 1 else ():
        here = stalled & ~taken & (np.abs(where - place) <= NEAR)
        longest = np.where(here, excess, 0.0).max(axis=1)
        who = np.flatnonzero(longest > 0)
        if len(who) < 2 or len(who) / runs < MOST:
            continue
        alike = int((stalled & (excess > longest[who].min() / 2)).sum())  # about as long, here and elsewhere
        rate = (alike - len(who) + 0.5) / max(1, int(plain.sum()))
        if _by_chance(rate, 2 * NEAR + 1, runs, len(who), n) <= CHANCE:
            found.append(_event_place(excess, here, where, who, float(place), by_clock))
            taken |= here
    return tuple(found), taken


def _by_chance(rate: float, width: float, runs: int, hits: int, records: int) -> float:
    """How many places with so many runs stalled are expected, if stalls fall anywhere."""
    from math import comb

    p = 1 - float((1 - rate) ** width)
    return records / width * float(sum(comb(runs, h) * p**h * (1 - p) ** (runs - h) for h in range(hits, runs + 1)))


def _event_place(excess: Floats, here: Bools, where: Floats, who: Ints, place: float, by_clock: bool) -> Recurring:
    shapes, offsets = [], []
    for r in who:
        at = np.flatnonzero(here[r])
        shapes.append(np.where(here[r], excess[r], 0.0)[at[0] : at[-1] + 1])
        offsets.append(float(where[r, at[0]] - place))
    return Recurring(by_clock, place, (len(who) + 0.5) / (len(here) + 1), tuple(shapes), tuple(offsets))


def place_recurring(events: Sequence[Recurring], numbers: Floats, clock: Floats, rng: np.random.Generator) -> Floats:
    """Seconds they add, in runs whose records have these numbers [records] and end at these times [draws, records]."""
    added = np.zeros(clock.shape)
    draws, records = clock.shape
    for e in events:
        which = np.asarray(rng.integers(0, len(e.shapes), draws))
        sizes = np.exp(0.3 * rng.standard_normal(draws))
        for d in np.flatnonzero(rng.random(draws) < e.probability).tolist():
            start = int(np.searchsorted(clock[d] if e.by_clock else numbers, e.place + e.offsets[which[d]] - 1e-6))
            row = e.shapes[which[d]][: max(0, records - start)]
            added[d, start : start + len(row)] += sizes[d] * row
    return added


# Steps that something held up: how often, where along the run, for how many seconds.


@dataclass(frozen=True, eq=False)
class SeenStalls:
    """Stalls of sister runs."""

    counts: Ints  # [runs]: those that do not recur
    records: Ints  # [runs]: in which they could have been
    seconds: Floats  # of each
    where: Curve  # rate along the run, mean 1
    recurring: tuple[Recurring, ...]


def stalls_of(excess: Floats, stalled: Bools, plain: Bools, steps: Ints, clock: Floats) -> SeenStalls:
    """Stalls from excess seconds [runs, records] where `stalled`; `clock`: usual steps since the job's start."""
    again, taken = recurring(excess, stalled, plain, clock)
    alone = stalled & ~taken
    return SeenStalls(
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
