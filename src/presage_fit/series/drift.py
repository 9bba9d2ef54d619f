"""What sister runs share step by step: a smooth curve over the run, and each run's own level and slope beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage_fit.step_logs import LogEvent, StepLog

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NODES = 800  # more records than this are binned before smoothing
SHORT = 16  # fewer records than this are not smoothed where MANY runs tell each place its own value
MANY = 5
LINE = 4  # records: of fewer no line is taken
FEW = 40  # records: runs of fewer are fitted at once


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of the step number, straight between its points; past its last it goes on at half its last slope."""

    steps: Floats
    values: Floats

    def __call__(self, steps: NDArray[np.int64] | Floats) -> Floats:
        inside = np.interp(steps, self.steps, self.values)
        return np.asarray(inside + self._slope * np.maximum(0.0, np.asarray(steps, np.float64) - self.steps[-1]) / 2)

    @property
    def _slope(self) -> float:
        quarter = len(self.steps) // 4
        if quarter < 5:
            return 0.0
        return float(np.polyfit(self.steps[-quarter:], self.values[-quarter:], 1)[0])


@dataclass(frozen=True, eq=False)
class Shared:
    levels: Floats  # [runs]
    slopes: Floats  # [runs]: over the whole run, beside the curve's
    curve: Curve
    known: float  # share of the records' noise that the curve goes along with
    own: float  # and that the runs' levels and slopes go along with
    few: bool  # too few records to tell runs' own widths apart
    left: Floats  # [runs, records]: what is left


def shared(x: Floats, plain: Bools, steps: NDArray[np.int64]) -> Shared:
    """Levels, slopes and curve of records x [runs, records]; only `plain` records count."""
    kept, place = np.where(plain, x, np.nan), _place(steps)
    few, at_once = x.shape[1] < FEW, _for_joint(plain)
    levels, values, known = _at_once(x, plain) if at_once else _by_turns(kept)
    least = LINE if at_once else 2 * SHORT
    slopes = np.array([_slope(place, row, least) for row in kept - levels[:, None] - values])
    left = x - levels[:, None] - slopes[:, None] * place - values
    own = (len(x) + float(np.count_nonzero(slopes))) / max(1, int(plain.sum()))
    return Shared(levels, slopes, Curve(steps.astype(np.float64), values), known, min(own, 0.5), few, left)


def _for_joint(plain: Bools) -> bool:
    """Few records of few runs, yet enough for a curve."""
    runs, n = plain.shape
    own = n < SHORT and runs >= MANY
    return not own and n < FEW and bool((plain.sum(axis=1) >= LINE).all())


def _at_once(x: Floats, plain: Bools) -> tuple[Floats, Floats, float]:
    found = joint(x, plain)
    return found.levels, found.values, max(0.0, found.known - len(x) / int(plain.sum()))


def _by_turns(kept: Floats) -> tuple[Floats, Floats, float]:
    levels = _median(kept, axis=1)
    values, width = np.zeros(kept.shape[1]), 1.0
    for _ in range(3):
        values, width = smooth(_median(kept - levels[:, None], axis=0), len(kept))
        levels = levels + _median(kept - levels[:, None] - values, axis=1)
    return levels, values, 1 / (len(kept) * width)


def _place(steps: NDArray[np.int64]) -> Floats:
    """From -1/2 at the first step to 1/2 at the last."""
    span = max(1, int(steps[-1] - steps[0]))
    return np.asarray((steps - steps[0]) / span - 0.5)


def _slope(place: Floats, row: Floats, least: int) -> float:
    """Slope of the central residuals: outliers carry no information on the drift."""
    ok = np.isfinite(row)
    if ok.sum() < least:
        return 0.0
    spread = 3 * 1.4826 * float(np.median(np.abs(row[ok] - np.median(row[ok]))))
    y, p = np.clip(row[ok], -spread, spread), place[ok]
    return float(np.cov(p, y)[0, 1] / max(float(np.var(p, ddof=1)), 1e-12))


def smooth(values: Floats, runs: int = 1) -> tuple[Floats, float]:
    """A robust local line through each point, narrow at the start of the run; NaNs are filled. And its width.

    Of few records, each its own value if it is one of many runs; else none but a level where a line says nothing.
    """
    n = len(values)
    at = np.arange(n, dtype=np.float64)
    ok = np.isfinite(values)
    if not ok.any():
        return np.zeros(n), 1.0
    if n < SHORT and runs >= MANY:
        return np.interp(at, at[ok], values[ok]), 1.0
    if ok.sum() < 2 * MANY:
        return np.full(n, float(np.median(values[ok]))), float(ok.sum())
    nodes, y, size = _binned(at[ok], values[ok])
    half = np.clip(3 + nodes / size / 4, 3, 12 + len(nodes) / 40) * size
    fitted = _local_lines(nodes, y, half)
    return np.interp(at, nodes, fitted), float(np.median(half))


def _binned(at: Floats, y: Floats) -> tuple[Floats, Floats, float]:
    size = -(-len(at) // NODES)
    if size == 1:
        return at, y, 1.0
    count = -(-len(at) // size)
    last = np.r_[0, np.cumsum(np.full(count, len(at) // count) + (np.arange(count) < len(at) % count))]
    inside = last[:-1, None] + np.arange(size)  # parts are equal but for one record
    inside = np.where(inside < last[1:, None], inside, -1)
    mean, middle = (np.where(inside < 0, np.nan, x[inside]) for x in (at, y))
    return np.nanmean(mean, axis=1), np.nanmedian(middle, axis=1), float(size)


def _local_lines(at: Floats, y: Floats, half: Floats) -> Floats:
    away = at[None, :] - at[:, None]
    near = np.maximum(0.0, 1 - np.abs(away / half[:, None]) ** 3) ** 3
    fitted = _running_median(y)
    for _ in range(3):
        off = y - fitted
        spread = 6 * float(np.median(np.abs(off))) + 1e-6 * float(np.std(y)) + 1e-300
        w = near * np.maximum(1e-6, 1 - np.minimum(1.0, np.abs(off) / spread) ** 2) ** 2
        s0, s1, s2 = w.sum(1), (w * away).sum(1), (w * away**2).sum(1)
        t0, t1 = w @ y, (w * away) @ y
        det = s0 * s2 - s1**2
        fitted = np.where(
            det > 1e-9 * s0 * s2, (s2 * t0 - s1 * t1) / np.where(det > 0, det, 1), t0 / np.maximum(s0, 1e-30)
        )
    return np.asarray(fitted)


def _running_median(y: Floats, half: int = 5) -> Floats:
    """Median of each point and its neighbours: a start that no spike moves."""
    padded = np.pad(y, half, mode="reflect" if len(y) > half else "edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1))


def _median(x: Floats, axis: int) -> Floats:
    """Without NaNs, and NaN (for levels: 0) where there is nothing else; no warning."""
    empty = ~np.isfinite(x).any(axis=axis)
    filled = np.where(np.expand_dims(empty, axis), 0.0, x)
    return np.where(empty, np.nan if axis == 0 else 0.0, np.nanmedian(filled, axis=axis))


# The curve that runs of few records share, with the runs' levels, all at once.
#
# A record is its run's level, plus a line, plus a curve whose bends are independent (an integrated random walk), plus
# noise. How much the curve bends against the noise is what makes the records likeliest (restricted likelihood). Records
# that are far too long count little: a stall in one of two runs must not be taken for a bend.

BENDS = np.append(0.0, np.geomspace(1e-4, 1e2, 13))  # variance of a bend, of the noise's: at most ten times as wide
ROUNDS = 5
FAR = 3.0  # standard deviations
LEAST = 2e-4  # of a step: noise there always is


@dataclass(frozen=True, eq=False)
class JointFit:
    levels: Floats  # [runs]
    values: Floats  # [records]: the curve
    known: float  # share of the records' noise that levels and curve go along with


def joint(x: Floats, plain: Bools) -> JointFit:
    """Joint fit of records x [runs, records], of which the `plain` ones count."""
    kept = np.where(plain, x, np.nan)
    run, at = np.nonzero(plain)
    y, spread = x[plain], _spread(kept)
    level = kept - np.nanmedian(kept, axis=1, keepdims=True)
    above = (level - np.min(np.where(plain, level, np.inf), axis=0))[plain]  # the lowest run at each place
    for _ in range(ROUNDS):
        weights = 1 / (1 + (np.maximum(above, 0.0) / (FAR * spread)) ** 4)
        levels, values, known = _solved(y, run, at, weights, x.shape)
        above = y - levels[run] - values[at]
    return JointFit(levels, values, known)


def _spread(kept: Floats) -> float:
    """The usual noise, from what no curve is in: differences between runs; of a single run, from its bends."""
    level = kept - np.nanmedian(kept, axis=1, keepdims=True)
    many = np.isfinite(level).sum(axis=0)
    mean = np.nansum(level, axis=0) / np.maximum(many, 1)
    off = (level - mean)[:, many > 1] * np.sqrt(len(kept) / max(1, len(kept) - 1))
    seen = off[np.isfinite(off)] if len(kept) > 1 else np.diff(level[0][many > 0], 2) / np.sqrt(6)
    return LEAST + 1.4826 * float(np.median(np.abs(seen))) if len(seen) else 1.0


def _solved(
    y: Floats, run: NDArray[np.int64], at: NDArray[np.int64], weights: Floats, shape: tuple[int, ...]
) -> tuple[Floats, Floats, float]:
    """Levels, curve and how much of the noise they take, for the bends that are likeliest."""
    place = np.linspace(-0.5, 0.5, shape[1])
    fixed = np.column_stack([*(run == r for r in range(shape[0])), place[at]]).astype(np.float64)
    bends = _bends(shape[1])
    fits = [_restricted(y, fixed, np.diag(1 / weights) + b * bends[np.ix_(at, at)]) for b in BENDS]
    best = int(np.argmax([f[0] for f in fits]))
    _, numbers, inverse = fits[best]
    curve = numbers[-1] * place + BENDS[best] * bends[:, at] @ inverse @ (y - fixed @ numbers)
    taken = inverse @ fixed
    left = inverse - taken @ np.linalg.solve(fixed.T @ taken, taken.T)
    known = 1 - float(np.trace(left / weights[:, None])) / len(y)
    middle = float(np.average(curve[at], weights=weights))
    return numbers[:-1] + middle, curve - middle, known


def _bends(n: int) -> Floats:
    """Covariance of an integrated random walk whose steps get smaller: runs settle at their start."""
    sums = np.maximum(0.0, np.arange(n)[:, None] - np.arange(n)[None, :])
    return np.asarray((sums / (1 + np.arange(n))) @ sums.T)


def _restricted(y: Floats, fixed: Floats, cov: Floats) -> tuple[float, Floats, Floats]:
    """Log likelihood whatever the noise's size is, the fixed numbers, and the inverse covariance."""
    inverse = np.linalg.inv(cov)
    inner = fixed.T @ inverse @ fixed + 1e-9 * np.eye(fixed.shape[1])
    numbers = np.linalg.solve(inner, fixed.T @ inverse @ y)
    off = y - fixed @ numbers
    free = max(1, len(y) - fixed.shape[1])
    logs = np.linalg.slogdet(cov)[1] + np.linalg.slogdet(inner)[1]
    fit = -0.5 * (logs + free * np.log(float(off @ inverse @ off) + 1e-16))
    return float(fit), np.asarray(numbers, np.float64), np.asarray(inverse, np.float64)


# Sister runs side by side: one row a run, one column a step number, and which steps the schedule makes slow.

Ints = NDArray[np.int64]
LEAD = 5  # single steps at the start of a run that are named one by one


@dataclass(frozen=True, eq=False)
class SisterRuns:
    steps: Ints  # [records]
    seconds: Floats  # [runs, records], NaN where a run has no such record
    counts: Ints  # [records]: steps in each
    clock: Floats  # [runs, records]: seconds from the job's start to the record's end
    kinds: tuple[tuple[str, ...], ...]  # [runs][records]: '' for a plain step, else what makes it slow
    shared_events: bool = False  # events are at the same records in all runs: a curve through these knows them

    @cached_property
    def plain(self) -> NDArray[np.bool_]:
        """Records that are there and that nothing in the schedule makes slow."""
        return np.asarray(np.isfinite(self.seconds) & np.array([[k == "" for k in row] for row in self.kinds]))


def lead_of(log: StepLog) -> int:
    """How many records at the start are named one by one: a mean of many steps hides all but the first."""
    return LEAD if log.single else 1


def kinds_of(steps: Ints, events: Sequence[LogEvent], lead: int) -> tuple[str, ...]:
    """What makes each record slow: its place at the start of the run, an event just before it (or in it), or nothing.

    In a mean of many steps (`lead` is 1) only the first event of a name can be seen.
    """
    kinds = [f"step {i + 1} of a run" if i < lead else "" for i in range(len(steps))]
    seen: set[str] = set()
    for e in sorted(events, key=lambda e: e.after_step):
        later, next_one = e.name in seen, int(np.searchsorted(steps, e.after_step, "right"))
        seen.add(e.name)
        if next_one < len(steps) and not (later and lead == 1):
            kinds[next_one] = f"after {'a later' if later else 'the first'} {e.name}"
    return tuple(kinds)


def table_of(logs: Sequence[StepLog]) -> SisterRuns:
    if not logs:
        raise PresageError("a series needs the log of at least one run")
    if len({x.kind for x in logs}) > 1:
        found = ", ".join(sorted({x.kind for x in logs}))
        raise PresageError(f"{logs[0].group}: logs of {found} cannot be fitted together")
    steps = np.unique(np.concatenate([x.steps for x in logs]))
    seconds, clock = (np.full((len(logs), len(steps)), np.nan) for _ in range(2))
    counts = np.ones(len(steps), np.int64)
    kinds = [[""] * len(steps) for _ in logs]
    alike = _alike(logs, len(steps))
    for r, log in enumerate(logs):
        at = np.searchsorted(steps, log.steps)
        seconds[r, at], counts[at], clock[r, at] = log.seconds, log.counts, log.clock
        for k, kind in zip(at, kinds_of(log.steps, () if alike else log.events, lead_of(log)), strict=True):
            kinds[r][k] = kind
    return SisterRuns(steps, seconds, counts, clock, tuple(map(tuple, kinds)), alike)


def _alike(logs: Sequence[StepLog], records: int) -> bool:
    """Few means, each event in the same record of all runs."""
    if logs[0].single or records >= FEW:
        return False
    least = min(len(x.steps) for x in logs)
    where = [{int(np.searchsorted(x.steps, e.after_step, "right")) for e in x.events} for x in logs]
    return len({frozenset(k for k in w if k < least) for w in where}) == 1
