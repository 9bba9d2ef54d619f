"""The curve that runs of few records share, with the runs' levels, all at once.

A record is its run's level, plus a line, plus a curve whose bends are independent (an integrated random walk), plus
noise. How much the curve bends against the noise is what makes the records likeliest (restricted likelihood). Records
that are far too long count little: a stall in one of two runs must not be taken for a bend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Joint", "joint"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
BENDS = np.append(0.0, np.geomspace(1e-4, 1e2, 13))  # variance of a bend, of the noise's: at most ten times as wide
ROUNDS = 5
FAR = 3.0  # standard deviations
LEAST = 2e-4  # of a step: noise there always is


@dataclass(frozen=True, eq=False)
class Joint:
    levels: Floats  # [runs]
    values: Floats  # [records]: the curve
    known: float  # share of the records' noise that levels and curve go along with


def joint(x: Floats, plain: Bools) -> Joint:
    """Of records x [runs, records], of which the `plain` ones count."""
    kept = np.where(plain, x, np.nan)
    run, at = np.nonzero(plain)
    y, spread = x[plain], _spread(kept)
    level = kept - np.nanmedian(kept, axis=1, keepdims=True)
    above = (level - np.min(np.where(plain, level, np.inf), axis=0))[plain]  # the lowest run at each place
    for _ in range(ROUNDS):
        weights = 1 / (1 + (np.maximum(above, 0.0) / (FAR * spread)) ** 4)
        levels, values, known = _solved(y, run, at, weights, x.shape)
        above = y - levels[run] - values[at]
    return Joint(levels, values, known)


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
