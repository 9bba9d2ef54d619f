"""What sister runs share step by step: a smooth curve over the run, and each run's own level and slope beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage_fit.series.joint import joint

__all__ = ["FEW", "Curve", "Shared", "shared", "smooth"]

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
    """Of the middle of the residuals: the few far out say nothing of the drift."""
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
    parts = np.array_split(np.arange(len(at)), -(-len(at) // size))
    return np.array([at[p].mean() for p in parts]), np.array([np.median(y[p]) for p in parts]), float(size)


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
    """Of each point and its neighbours: a start that no spike moves."""
    padded = np.pad(y, half, mode="reflect" if len(y) > half else "edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1))


def _median(x: Floats, axis: int) -> Floats:
    """Without NaNs, and NaN (for levels: 0) where there is nothing else; no warning."""
    empty = ~np.isfinite(x).any(axis=axis)
    filled = np.where(np.expand_dims(empty, axis), 0.0, x)
    return np.where(empty, np.nan if axis == 0 else 0.0, np.nanmedian(filled, axis=axis))
