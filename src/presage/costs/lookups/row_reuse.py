"""How often the rows of a table are used in a batch: counted from data, or expected of a skew.

The skew is that of a power law: row number r (by how often it is asked for, from 1) has the integral of x^-alpha from r
to r + 1 as its share of the lookups; alpha 0 is uniform. So one number says how rows repeat in a batch of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lgamma
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BINS = 17  # of use counts: bin k has the rows used 2^k to 2^(k+1) - 1 times, the last is open
FIRST: Array = 2.0 ** np.arange(BINS)
LAST: Array = np.append(FIRST[1:] - 1, np.inf)
EXACT, SEGMENTS = 64, 160  # row numbers taken one by one, and how many ranges the others fall into
LARGE = 6  # the first bin whose counts (64 and more) are not added up one by one
COUNTS: Array = np.arange(FIRST[LARGE - 1])[:, None]
FACTORIALS: Array = np.array([lgamma(k + 1.0) for k in COUNTS[:, 0]])[:, None]
STEEPEST = 4.0
ROUNDED = 2e-5  # shares of a histogram below this may be mere rounding


@dataclass(frozen=True, eq=False)
class Lookups:
    """Lookups of one table in one batch: rows by how often they are used."""

    count: float
    distinct: float  # rows
    rows: Array  # by bin
    uses: Array  # by bin: the mean count of its rows

    @staticmethod
    def of(count: float, rows: Array, uses: Array) -> Lookups:
        return Lookups(count, float(rows.sum()), rows, uses)

    @staticmethod
    def all_new(count: float) -> Lookups:
        """Lookups of which no row repeats."""
        rows = np.zeros(BINS)
        rows[0] = count
        return Lookups.of(count, rows, FIRST)


@dataclass(frozen=True)
class Reuse:
    """Row reuse of a table: a Zipf skew, or a histogram counted in a batch of `lookups`; either is enough."""

    alpha: float | None = None
    hist: tuple[float, ...] = ()  # share of the distinct rows, by bin
    lookups: float = 0.0  # of the batch that was counted, as are the next two
    distinct: float = 0.0
    top: float = 0.0  # uses of the most frequent row
    parts: int = 1  # of a table cut by rows, this is one part: its rows are every so many of the whole's

    def at(self, lookups: float, rows: float) -> Lookups:
        """Row uses of `lookups` into a table of `rows`: the counted histogram if it has that many, else by the skew."""
        whole, of = lookups * self.parts, rows * self.parts
        if self.hist and abs(whole - self.lookups) <= 0.02 * self.lookups:
            total = _lookups_from_histogram(self, whole, of)
        else:
            total = zipf(self.skew(of), round(of), whole)
        return Lookups(lookups, total.distinct / self.parts, total.rows / self.parts, total.uses)

    def skew(self, rows: float) -> float:
        """alpha, from the distinct rows where it is not given."""
        if self.alpha is not None:
            return self.alpha
        return fit_alpha(self.distinct, self.lookups, round(rows)) if self.lookups else 0.0


def _lookups_from_histogram(reuse: Reuse, lookups: float, rows: float) -> Lookups:
    """Rows as counted; mean counts within bins by the skew where it is known, else so that the lookups come out."""
    share = np.zeros(BINS)
    share[: len(reuse.hist)] = reuse.hist[:BINS]
    rows_by_bin = reuse.distinct * share / max(1e-12, float(share.sum()))
    top = reuse.top or lookups
    high = np.minimum(LAST, np.maximum(FIRST, top))
    if reuse.alpha is not None:
        return _by_skew(zipf(reuse.alpha, round(rows), lookups), rows_by_bin, share, high)
    if reuse.top:  # a histogram of many rows may have lost its few most frequent ones to rounding
        rows_by_bin = np.where((top >= FIRST) & (top <= LAST), np.maximum(rows_by_bin, 1.0), rows_by_bin)
    below, above = 0.0, 1.0  # how far from the lower to the upper end, on a logarithmic scale
    for _ in range(30):
        middle = (below + above) / 2
        few = float((rows_by_bin * FIRST ** (1 - middle) * high**middle).sum()) < lookups
        below, above = (middle, above) if few else (below, middle)
    return Lookups(lookups, reuse.distinct, rows_by_bin, FIRST ** (1 - below) * high**below)


def _by_skew(expected: Lookups, counted: Array, share: Array, high: Array) -> Lookups:
    """Mean counts, and rows whose shares were lost to rounding, filled in from the expectation."""
    rows = np.where(share < ROUNDED, expected.rows, counted)
    uses = np.clip(expected.uses, FIRST, np.maximum(high, expected.uses))
    more = (expected.count - rows[0]) / max(1e-12, float((rows * uses)[1:].sum()))
    return Lookups(expected.count, float(counted.sum()), rows, np.clip(uses * max(0.0, more), FIRST, LAST))


@lru_cache(16384)
def zipf(alpha: float, rows: int, lookups: float) -> Lookups:
    """Expected row uses under a Zipf skew."""
    many, share = _segments(alpha, max(1, rows))
    mean = np.maximum(1e-300, lookups * share)
    below, fewer = _cdfs(mean)
    expected_rows = np.maximum(0.0, np.diff(below, axis=0)) @ many
    used = np.maximum(0.0, np.diff(fewer, axis=0)) @ (many * mean)
    uses = np.clip(used / np.maximum(expected_rows, 1e-12), FIRST, LAST)
    return Lookups.of(lookups, expected_rows, np.where(expected_rows > 1e-9, uses, FIRST))


def missed_rows(alpha: float, rows: int, lookups: float, kept: float) -> float:
    """Expected distinct rows of a batch that are not among the `kept` most frequent ones, under a Zipf skew."""
    many, share = _segments(alpha, max(1, rows))
    ends = np.cumsum(many)
    beyond = np.clip((ends - kept) / many, 0.0, 1.0)
    return float((beyond * many) @ -np.expm1(-lookups * share))


def _segments(alpha: float, rows: int) -> tuple[Array, Array]:
    """Ranges of row ranks: number of rows, and the share of lookups of each row."""
    ones = np.arange(1.0, min(rows, EXACT) + 2)
    rest = np.geomspace(EXACT + 1, rows + 1, SEGMENTS)[1:] if rows > EXACT else np.zeros(0)
    ends = np.concatenate([ones, rest])
    total = _area(np.array(rows + 1.0), alpha)
    many = np.diff(ends)
    return many, np.diff(_area(ends, alpha)) / many / total


def _area(x: Array, alpha: float) -> Array:
    """Integral of x^-alpha from 1 to x."""
    e = 1.0 - alpha
    return np.asarray(np.log(x) if abs(e) < 1e-9 else np.expm1(e * np.log(x)) / e)


def _cdfs(mean: Array) -> tuple[Array, Array]:
    """P(a Poisson number is below a bin's first count), and below that less one; both end with certainty.

    Small counts by adding up their terms, large ones by Wilson and Hilferty's cube root.
    """
    terms = np.exp(COUNTS * np.log(mean) - mean - FACTORIALS)
    small = np.concatenate([np.zeros((2, len(mean))), np.cumsum(terms, axis=0)])  # from P(at most -2) on
    k = np.concatenate([FIRST[LARGE:] - 1, FIRST[LARGE:] - 2])[:, None]
    z = 3 * np.sqrt(k + 1) * (1 - 1 / (9 * (k + 1)) - np.cbrt(mean / (k + 1)))
    large = 0.5 * (1 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))
    one, half = np.ones((1, len(mean))), len(k) // 2
    first = FIRST[:LARGE].astype(int)
    return (
        np.concatenate([small[first + 1], large[:half], one]),
        np.concatenate([small[first], large[half:], one]),
    )


@lru_cache(16384)
def fit_alpha(distinct: float, lookups: float, rows: int) -> float:
    """The skew whose expected number of distinct rows is `distinct`."""
    if distinct >= zipf(0.0, rows, lookups).distinct:
        return 0.0
    low, high = 0.0, STEEPEST
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if zipf(middle, rows, lookups).distinct > distinct else (low, middle)
    return (low + high) / 2
