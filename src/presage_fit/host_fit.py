"""Fitting the host's terms to traced steps, and their level to steps measured without a profiler.

Every trace and thread has a pace of its own, which scales all its times, the profiler's cost per event among them:

    observed = pace x (sum of terms + cost per event x events)

Paces and terms are found in turn, terms by weighted least squares with large deviations weighing less (a thread that
lost its core is not an op's cost). How a name differs from its class is held near zero, the more the fewer samples it
has. Paces have geometric mean 1. The profiler's cost is what makes host times at pace 1 agree, in the mean of
the middle four fifths, with steps measured without a profiler in which the GPU waited for the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_units import named
from presage_fit.host_rows import Row

__all__ = ["Fit", "OwnTerms", "Paces", "fit", "host_us", "own_terms", "paces", "profiler_cost"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

THREADS = ("main", "autograd")
ROUNDS = 5
LEAST_US = 3.0  # below this, errors count as absolute and not as relative
HELD = 0.3  # how strongly a name is held to its class, against samples with a relative error of 1
FREE = 3e-4  # a class is hardly held, even where it comes in a few rows of milliseconds alone
OUTLIER = 0.7  # relative errors beyond this weigh less
CAPPED = 3.0  # a row counts towards its trace's pace with at most so many times its due


@dataclass(frozen=True)
class Paces:
    """How much slower than usual each thread of a traced step was."""

    main: float = 1.0
    autograd: float = 1.0


@dataclass(frozen=True)
class Fit:
    """Microseconds by term, and each step's paces."""

    us: Mapping[str, float]
    paces: Mapping[str, Paces]
    per_event: float  # microseconds that the profiler costs, at pace 1


@dataclass(frozen=True, eq=False)
class _Table:
    """Rows of several steps as columns: entries (row, term, times), and by row what was observed."""

    keys: list[str]
    row: Ints
    key: Ints
    times: Floats
    us: Floats
    events: Floats
    lane: Ints  # which step and thread

    def predicted(self, beta: Floats) -> Floats:
        return np.asarray(np.bincount(self.row, self.times * beta[self.key], len(self.us)), np.float64)


def fit(steps: Mapping[str, Sequence[Row]], per_event: float, prior: Mapping[str, float] | None = None) -> Fit:
    """The terms of some steps; with a `prior`, held to it where there is little to say otherwise, at pace 1."""
    table = _table(steps)
    first = np.array([prior.get(k, 0.0) if prior else 0.0 for k in table.keys])
    hold = np.array([HELD if named(k) or prior else FREE for k in table.keys])
    pace = np.ones(len(THREADS) * len(steps))
    weight = 1 / np.maximum(table.us, LEAST_US)
    pairs = _pairs(table)
    beta = first
    for _ in range(ROUNDS):
        net = table.us / pace[table.lane] - per_event * table.events
        beta = _solved(table, pairs, weight * pace[table.lane], net, hold, first)
        gross = table.predicted(beta) + per_event * table.events
        if prior is None:
            pace = _paces(table, gross, pace)
        expected = np.abs(pace[table.lane] * gross)
        base = 1 / np.maximum(expected, LEAST_US)
        error = np.abs(table.us - pace[table.lane] * gross) * base
        weight = base * np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(error, 1e-9)))
    by_step = pace.reshape(-1, len(THREADS))
    found = {name: Paces(*map(float, p)) for name, p in zip(steps, by_step, strict=True)}
    return Fit(dict(zip(table.keys, beta.tolist(), strict=True)), found, per_event)


def _table(steps: Mapping[str, Sequence[Row]]) -> _Table:
    keys: dict[str, int] = {}
    entries: list[tuple[int, int, float]] = []
    observed: list[tuple[float, float, int]] = []
    for s, rows in enumerate(steps.values()):
        for r in rows:
            entries += [(len(observed), keys.setdefault(k, len(keys)), v) for k, v in r.terms.items()]
            observed.append((r.us, float(r.events), len(THREADS) * s + THREADS.index(r.thread)))
    row, key, times = (np.array(c) for c in zip(*entries, strict=True))
    us, events, lane = (np.array(c) for c in zip(*observed, strict=True))
    return _Table(list(keys), row, key, times, us, events, lane)


def _pairs(table: _Table) -> tuple[Ints, Ints, Floats]:
    """Products of all two entries of a row: (row, place in the square matrix of terms, product)."""
    starts = np.searchsorted(table.row, np.arange(len(table.us) + 1))
    length = np.diff(starts)
    left = np.repeat(np.arange(len(table.row)), length[table.row])
    nth = np.arange(len(left)) - np.repeat(np.cumsum(length[table.row]) - length[table.row], length[table.row])
    right = starts[table.row[left]] + nth
    return table.row[left], table.key[left] * len(table.keys) + table.key[right], table.times[left] * table.times[right]


def _solved(
    table: _Table, pairs: tuple[Ints, Ints, Floats], weight: Floats, net: Floats, hold: Floats, first: Floats
) -> Floats:
    """Weighted least squares with every term held to its first value."""
    n, (row, place, product) = len(table.keys), pairs
    square = np.asarray(np.bincount(place, product * weight[row] ** 2, n * n), np.float64).reshape(n, n)
    right = np.bincount(table.key, table.times * (weight**2 * net)[table.row], n)
    square[np.diag_indices(n)] += hold**2
    return np.asarray(np.linalg.solve(square, right + hold**2 * first))


def _paces(table: _Table, gross: Floats, before: Floats) -> Floats:
    """Observed over expected, of each step and thread; single rows far above their due are capped."""
    due = np.maximum(gross, LEAST_US) * before[table.lane]
    lanes = len(before)
    seen = np.bincount(table.lane, np.minimum(table.us, CAPPED * due), lanes)
    expected = np.bincount(table.lane, np.maximum(gross, 0.0), lanes)
    found = np.where(expected > 0, seen / np.maximum(expected, 1e-9), 1.0)
    return np.asarray(found / np.exp(np.log(np.maximum(found, 1e-9)).mean()))


def paces(rows: Sequence[Row], us: Mapping[str, float], per_event: float) -> Paces:
    """How fast the host of one traced step was beside a model's."""
    seen, due = dict.fromkeys(THREADS, 0.0), dict.fromkeys(THREADS, 0.0)
    for r in rows:
        seen[r.thread] += r.us
        due[r.thread] += sum(us.get(k, 0.0) * v for k, v in r.terms.items()) + per_event * r.events
    return Paces(*(seen[t] / due[t] if due[t] > 0 else 1.0 for t in THREADS))


@dataclass(frozen=True)
class OwnTerms:
    """What one trace says of its own workload: microseconds by term at pace 1, and how fast its threads were."""

    us: Mapping[str, float]
    paces: Paces


def own_terms(rows: Sequence[Row], us: Mapping[str, float], per_event: float) -> OwnTerms:
    """A model's terms, moved to what one trace shows."""
    found = paces(rows, us, per_event)
    even = [replace(r, us=r.us / getattr(found, r.thread)) for r in rows]
    return OwnTerms({**us, **fit({"own": even}, per_event, prior=us).us}, found)


def host_us(rows: Sequence[Row], us: Mapping[str, float]) -> dict[str, float]:
    """Host microseconds of a step at pace 1 without a profiler, by thread."""
    out = dict.fromkeys(THREADS, 0.0)
    for r in rows:
        out[r.thread] += sum(us.get(k, 0.0) * v for k, v in r.terms.items())
    return out


def profiler_cost(
    steps: Mapping[str, Sequence[Row]], unprofiled_us: Mapping[str, float], most: float = 4.0, rounds: int = 7
) -> float:
    """The cost per event with which the fitted host times agree with the unprofiled ones, by halving."""
    low, high = 0.0, most
    for _ in range(rounds):
        middle = (low + high) / 2
        us = fit(steps, middle).us
        z = np.sort([np.log(u / sum(host_us(steps[n], us).values())) for n, u in unprofiled_us.items()])
        cut = len(z) // 10
        low, high = (low, middle) if z[cut : len(z) - cut].mean() > 0 else (middle, high)
    return (low + high) / 2
