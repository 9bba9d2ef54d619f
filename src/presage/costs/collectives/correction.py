"""What measured curves say beyond the law: the logarithm of measured over law, on a few knots of size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import Group

__all__ = ["Correction", "Corrections", "fitted"]

Array = npt.NDArray[np.float64]
STEP = 2.0  # knots stand so many doublings apart
STIFF, TO_ZERO = 0.3, 0.05  # how much neighbouring knots pull at each other, and zero at each
OUTLIER = 0.05  # residuals beyond it count less


@dataclass(frozen=True, slots=True)
class Correction:
    """Of one curve: straight between knots on a logarithmic axis of bytes, flat outside them."""

    first: float  # log2 of bytes at the first knot
    values: tuple[float, ...]

    def at(self, nbytes: Array) -> Array:
        x = (np.log2(nbytes) - self.first) / STEP
        return np.interp(x, np.arange(len(self.values)), self.values)


def fitted(nbytes: Array, logs: Array) -> Correction:
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
        weight = np.sqrt(1 / np.maximum(np.abs(basis @ values - logs) / OUTLIER, 1.0))
    return Correction(float(first), tuple(float(v) for v in values))


@dataclass(frozen=True)
class Corrections:
    """All there are, by platform, op and group; and the fabrics of those platforms, the innermost first."""

    curves: dict[tuple[str, str, Group], Correction] = field(default_factory=dict)
    fabrics: dict[str, str] = field(default_factory=dict)

    def of(self, platform: str, fabric: str, op: str, group: Group, nbytes: Array) -> Array:
        """For any group: a platform's own curves, or those of its fabric, between the group sizes measured."""
        others = [p for p in self._alike(fabric, op, group) if p != platform]
        if not self.has(platform, op, group):
            return self._mean(others, op, group, nbytes)
        own = self._between(platform, op, group, nbytes)
        end = self._nearest(platform, op, group)
        if end == group or group.domains > 1:
            return own
        return own + self._mean(others, op, group, nbytes) - self._mean(others, op, end, nbytes)

    def _mean(self, owners: list[str], op: str, group: Group, nbytes: Array) -> Array:
        found = [self._between(o, op, group, nbytes) for o in owners]
        return np.asarray(np.mean(found, axis=0)) if found else np.zeros(len(nbytes))

    def _nearest(self, platform: str, op: str, group: Group) -> Group:
        """The group itself where it lies among those measured; the nearest of them where it lies beyond."""
        groups = self._groups(platform, op, group)
        if groups[0].ranks <= group.ranks <= groups[-1].ranks:
            return group
        return groups[0] if group.ranks < groups[0].ranks else groups[-1]

    def has(self, platform: str, op: str, group: Group) -> bool:
        """Whether a platform has curves for an op in such a group: within a domain, or across domains."""
        return bool(self._groups(platform, op, group))

    def _alike(self, fabric: str, op: str, group: Group) -> list[str]:
        """Platforms of the same fabric: the innermost, or all of them where the group spans domains."""
        tiers = slice(None) if group.domains > 1 else slice(1)
        alike = (p for p, f in self.fabrics.items() if f.split()[tiers] == fabric.split()[tiers])
        return sorted(p for p in alike if self.has(p, op, group))

    def _groups(self, platform: str, op: str, group: Group) -> list[Group]:
        found = (g for p, o, g in self.curves if p == platform and o == op and (g.domains > 1) == (group.domains > 1))
        return sorted((g for g in found if group.domains == 1 or g.per_domain == group.per_domain), key=_ranks)

    def _between(self, platform: str, op: str, group: Group, nbytes: Array) -> Array:
        """Straight in the logarithm of ranks; the nearest beyond the ends."""
        groups = self._groups(platform, op, group)
        values = np.array([self.curves[platform, op, g].at(nbytes) for g in groups])
        return _mixed(np.log2([g.ranks for g in groups]), values, math.log2(group.ranks))


def _ranks(group: Group) -> int:
    return group.ranks


def _mixed(at: Array, values: Array, x: float) -> Array:
    shares = [float(np.interp(x, at, e)) for e in np.eye(len(at))]
    return np.asarray(np.array(shares) @ values)
