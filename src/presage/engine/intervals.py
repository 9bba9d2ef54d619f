"""Sets of time as sorted, disjoint (start, end) rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["intersect", "length", "subtract", "union"]

Intervals = NDArray[np.float64]  # shape (n, 2)


def union(start: NDArray[np.float64], end: NDArray[np.float64]) -> Intervals:
    """The time covered by any of the given spans."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([start[first], reach[last]])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The time in both."""
    return _sweep(a, b, 2)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The time in a but not in b."""
    if not len(a) or not len(b):
        return a
    lo, hi = min(a[0, 0], b[0, 0]) - 1.0, max(a[-1, 1], b[-1, 1]) + 1.0
    edges = np.concatenate([[lo], b.ravel(), [hi]])
    return intersect(a, edges.reshape(-1, 2))


def length(a: Intervals) -> float:
    return float((a[:, 1] - a[:, 0]).sum())


def _sweep(a: Intervals, b: Intervals, depth: int) -> Intervals:
    """Where at least `depth` of the two sets cover the time."""
    at = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    step = np.repeat([1, -1], len(a) + len(b))
    order = np.lexsort((step, at))  # at one instant, ends come before starts
    covered = np.cumsum(step[order]) >= depth
    at = at[order]
    inside = covered[:-1] & (at[1:] > at[:-1])
    return union(at[:-1][inside], at[1:][inside])
