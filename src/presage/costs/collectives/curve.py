"""Seconds over bytes as a table of knots: continuous and never falling, whatever it was made from."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import RankGroup

Array = npt.NDArray[np.float64]
GRID = 2.0 ** np.arange(3, 40.25, 0.5)  # bytes, from 8 B to half a terabyte


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Straight between knots on logarithmic axes, flat before the first, in proportion to bytes after the last."""

    log_bytes: tuple[float, ...]
    log_seconds: tuple[float, ...]

    @classmethod
    def through(cls, nbytes: Array, seconds: Array) -> TimeCurve:
        """A curve through these knots; knots that fall are replaced by their mean."""
        return cls(tuple(np.log(nbytes).tolist()), tuple(rising(np.log(seconds)).tolist()))

    def at_least(self, per_byte: float) -> TimeCurve:
        """The curve raised to at least this many seconds per byte."""
        least = np.array(self.log_bytes) + log(per_byte)
        return TimeCurve(self.log_bytes, tuple(np.maximum(self.log_seconds, least).tolist()))

    def at(self, nbytes: float) -> float:
        """Seconds for this many bytes."""
        x, xs, ys = log(nbytes) if nbytes > 1 else 0.0, self.log_bytes, self.log_seconds
        if x <= xs[0]:
            return exp(ys[0])
        if x >= xs[-1]:
            return exp(ys[-1] + x - xs[-1])
        i = bisect_right(xs, x)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return exp(ys[i - 1] + share * (ys[i] - ys[i - 1]))

    def many(self, nbytes: Any) -> Array:
        """Seconds for an array of sizes."""
        x = np.log(np.maximum(np.asarray(nbytes, np.float64), 1.0))
        inside = np.interp(x, self.log_bytes, self.log_seconds)
        return np.exp(inside + np.maximum(x - self.log_bytes[-1], 0.0))


def rising(values: Array) -> Array:
    """The nearest sequence that never falls, by least squares: neighbours that fall are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools.pop(-2), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return np.concatenate([np.full(n, value) for value, n in pools])


# ---- corrections: the logarithm of measured over law, on a few knots of size

STEP = 2.0  # knots stand so many doublings apart


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction of one curve: straight between knots on a logarithmic axis of bytes, flat outside them."""

    first: float  # log2 of bytes at the first knot
    values: tuple[float, ...]

    def at(self, nbytes: Array) -> Array:
        x = (np.log2(nbytes) - self.first) / STEP
        return np.interp(x, np.arange(len(self.values)), self.values)


STIFF, TO_ZERO = 0.3, 0.05  # how much neighbouring knots pull at each other, and zero at each
CURVE_OUTLIER = 0.05  # residuals beyond it count less


def fit_curve(nbytes: Array, logs: Array) -> Correction:
    """The smooth correction through log ratios, by ridge; single measurements far off count little."""
    x = np.log2(nbytes)
    first = math.floor(x.min())
    count = max(math.ceil((x.max() - first) / STEP) + 1, 2)
    place = (x - first) / STEP
    basis = np.maximum(1 - np.abs(place[:, None] - np.arange(count)), 0.0)
    ridge = np.concatenate([STIFF * np.diff(np.eye(count), axis=0), TO_ZERO * np.eye(count)])
    weight = np.ones(len(x))
    for _ in range(6):
        rows = np.concatenate([basis * weight[:, None], ridge])
        goal = np.concatenate([logs * weight, np.zeros(len(ridge))])
        values = np.linalg.lstsq(rows, goal, rcond=None)[0]
        weight = np.sqrt(1 / np.maximum(np.abs(basis @ values - logs) / CURVE_OUTLIER, 1.0))
    return Correction(float(first), tuple(float(v) for v in values))


@dataclass(frozen=True)
class Corrections:
    """Corrections by platform, op and group, and the fabrics of those platforms, innermost first."""

    curves: dict[tuple[str, str, RankGroup], Correction] = field(default_factory=dict)
    fabrics: dict[str, str] = field(default_factory=dict)

    def of(self, platform: str, fabric: str, op: str, group: RankGroup, nbytes: Array) -> Array:
        """For any group: a platform's own curves, or those of its fabric, between the group sizes measured."""
        others = [p for p in self.alike(fabric, op, group) if p != platform]
        if not self.has(platform, op, group):
            return self._mean(others, op, group, nbytes)
        own = self._between(platform, op, group, nbytes)
        end = self._nearest(platform, op, group)
        if end == group or group.domains > 1:
            return own
        return own + self._mean(others, op, group, nbytes) - self._mean(others, op, end, nbytes)

    def _mean(self, owners: list[str], op: str, group: RankGroup, nbytes: Array) -> Array:
        curves = [self._between(o, op, group, nbytes) for o in owners]
        return np.asarray(np.mean(curves, axis=0)) if curves else np.zeros(len(nbytes))

    def _nearest(self, platform: str, op: str, group: RankGroup) -> RankGroup:
        """The group itself if its size is within the measured range, else the nearest measured group."""
        groups = self._groups(platform, op, group)
        if groups[0].ranks <= group.ranks <= groups[-1].ranks:
            return group
        return groups[0] if group.ranks < groups[0].ranks else groups[-1]

    def has(self, platform: str, op: str, group: RankGroup) -> bool:
        """Whether a platform has curves for an op in such a group: within a domain, or across domains."""
        return bool(self._groups(platform, op, group))

    def alike(self, fabric: str, op: str, group: RankGroup) -> list[str]:
        """Platforms of the same fabric: the innermost, or all of them where the group spans domains."""
        tiers = slice(None) if group.domains > 1 else slice(1)
        alike = (p for p, f in self.fabrics.items() if f.split()[tiers] == fabric.split()[tiers])
        return sorted(p for p in alike if self.has(p, op, group))

    def _groups(self, platform: str, op: str, group: RankGroup) -> list[RankGroup]:
        """Measured groups to lean on: within a domain, or across with as many ranks in each, or the next best."""
        groups = [g for p, o, g in self.curves if p == platform and o == op and (g.domains > 1) == (group.domains > 1)]
        if group.domains > 1 and groups:
            near = min((g.per_domain for g in groups), key=lambda n: abs(math.log2(n / group.per_domain)))
            groups = [g for g in groups if g.per_domain == near]
        return sorted(groups, key=_ranks)

    def _between(self, platform: str, op: str, group: RankGroup, nbytes: Array) -> Array:
        """Straight in the logarithm of ranks; the nearest beyond the ends. Across domains, at as many bytes a card."""
        groups = self._groups(platform, op, group)
        scale = groups[0].per_domain / group.per_domain if group.domains > 1 else 1.0
        values = np.array([self.curves[platform, op, g].at(nbytes * scale) for g in groups])
        ranks = [g.domains * group.per_domain if group.domains > 1 else g.ranks for g in groups]
        return _mixed(np.log2(ranks), values, math.log2(group.ranks))


def _ranks(group: RankGroup) -> int:
    return group.ranks


def _mixed(at: Array, values: Array, x: float) -> Array:
    shares = [float(np.interp(x, at, e)) for e in np.eye(len(at))]
    return np.asarray(np.array(shares) @ values)
