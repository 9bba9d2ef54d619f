"""Failure rates, repeat offenders and repair times from a log of node faults, and what they say of the days to come.

Faults come at a constant rate, times a factor of the node (gamma) as far as that lasts; some repairs do not help, so
that the node fails again within days (relapses): both make repeat offenders. Repairs take Weibull times with a heavy
tail; nodes that are not back yet count as away for longer than that; repairs after a relapse are shorter. Repair times
change as a fleet and its spare parts do, so recent ones weigh more: the half-life of that weight is the one with which
the share of node time lost was predicted best from earlier days of the same log. How far those predictions were off is
how uncertain the next one is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from presage_fit.fault_log import FaultLog, by_class

Floats = NDArray[np.float64]
HALF_LIVES = (25.0, 50.0, 100.0, inf)  # days, tried
LONGEST = 90 * 24.0  # hours, assumed: whoever waits longer for a repair replaces the node
ROUNDED = 0.1  # hours: shorter repairs count as this long
USUAL_SHAPE, SHAPE_SD = 0.6, 0.5  # of Weibull repairs, and the log sd of what it may be instead
CLASS_WORTH = 1.0  # repairs of a class that those of all classes are worth
SHAPES = np.geomspace(0.2, 3.0, 120)  # tried
FIRST, EVERY, AHEAD, LEAST = 50.0, 10.0, 50.0, 25.0  # days: origins of trial predictions, and how far they reach
DRIFT, WORTH = 0.5, 4  # log sd of the share lost before it was tried (as rates of sites differ), in trials
ROUNDS, SOON = 200, 7.0  # of EM; days until a relapse, on average at most
SPLITS = (0.3, 0.4, 0.5, 0.6, 0.7)  # of the days, into early and late


@dataclass(frozen=True)
class RepairTimes:
    """Weibull repair times, none longer than `LONGEST`."""

    shape: float
    scale: float  # hours

    @property
    def mean(self) -> float:
        return float(self.spent(np.asarray(LONGEST)))

    @property
    def median(self) -> float:
        return float(self.scale * math.log(2) ** (1 / self.shape))

    def alive(self, hours: Floats) -> Floats:
        """Share of repairs that take longer."""
        return np.asarray(np.exp(-((hours / self.scale) ** self.shape)))

    def spent(self, hours: Floats) -> Floats:
        """Mean hours of repairs, those beyond `hours` cut there."""
        from scipy.special import gammainc

        top, k = np.minimum(hours, LONGEST), 1 + 1 / self.shape
        z = (top / self.scale) ** self.shape
        return np.asarray(self.scale * math.gamma(k) * gammainc(k, z) + top * np.exp(-z))

    def scaled(self, factor: float) -> RepairTimes:
        return RepairTimes(self.shape, self.scale * factor)

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...], so_far: float = 0.0) -> Floats:
        """Hours, of repairs that take longer than `so_far`."""
        z = (so_far / self.scale) ** self.shape + rng.standard_exponential(shape)
        return np.asarray(np.minimum(self.scale * z ** (1 / self.shape), max(LONGEST, so_far)))


@dataclass(frozen=True)
class FaultModel:
    """What a log says of its fleet."""

    log: FaultLog
    repair: RepairTimes  # of all classes
    half_life: float  # days, of the weight of repairs
    frailty: float  # variance of nodes' own rates, relapses apart
    relapses: Relapses
    drift: float  # log sd of the share lost in days to come about what is expected
    trials: tuple[float, ...] = ()  # log errors of trial predictions

    @property
    def rate(self) -> float:
        """Faults per day of a node in service, relapses apart."""
        return float((self.log.new & ~self.relapses.later).sum()) / float(self.log.up_days().sum())

    @cached_property
    def classes(self) -> tuple[tuple[str, int, RepairTimes], ...]:
        """Name, faults and repair times of each class; together they have the mean repair of all."""
        names = np.array(by_class(self.log))
        new, weight = self.log.new, weights(self.log, self.half_life)
        found = []
        for name in sorted(set(names[new]), key=lambda n: (-int((names[new] == n).sum()), n)):
            at = (names == name) & new
            found.append(
                (name, int(at.sum()), fit_repair(self.log.hours[at], self.log.open[at], weight[at], self.repair))
            )
        whole = sum(n * r.mean for _, n, r in found) / sum(n for _, n, _ in found)
        times = self.repair.mean / whole
        return tuple((name, n, r.scaled(times)) for name, n, r in found)

    @property
    def again(self) -> float:
        """Hours of a repair after a relapse over those of all repairs."""
        return self._relative(self.relapses.later)

    @property
    def once(self) -> float:
        """Hours of a repair that is none after a relapse over those of all repairs."""
        return self._relative(~self.relapses.later)

    def _relative(self, some: NDArray[np.bool_]) -> float:
        new = self.log.new
        known = (some & new).sum()
        mean = float(self.log.hours[new].mean())
        return float((self.log.hours[some & new].sum() + WORTH * mean) / ((known + WORTH) * mean))


def fit_faults(log: FaultLog) -> FaultModel:
    """Fit a log, the memory of repair times by trial predictions within it."""
    trials = {h: _trials(log, h) for h in HALF_LIVES}
    best = min(HALF_LIVES, key=lambda h: (sum(e**2 for e in trials[h]), -h))
    errors = trials[best]
    drift = sqrt((WORTH * DRIFT**2 + sum(e**2 for e in errors)) / (WORTH + len(errors)))
    again = fit_relapses(log)
    return FaultModel(log, _repair(log, best), best, fit_frailty(log, again.later), again, drift, errors)


def weights(log: FaultLog, half_life: float) -> Floats:
    """Weight of each fault: a half for every half-life that it began before the end."""
    return np.asarray(0.5 ** ((log.end - log.start) / half_life))


def _repair(log: FaultLog, half_life: float) -> RepairTimes:
    new = log.new
    return fit_repair(log.hours[new], log.open[new], weights(log, half_life)[new])


def _trials(log: FaultLog, half_life: float) -> tuple[float, ...]:
    """Log errors of the share lost, predicted at earlier days for those that followed, up to the end of the log."""
    out = []
    for day in np.arange(log.begin + FIRST, log.end - LEAST + 1e-9, EVERY):
        seen = log.between(log.begin, float(day))
        after = log.between(float(day), min(float(day) + AHEAD, log.end))
        if seen.new.sum() < 5 or not after.share_lost():
            continue
        expected = _expected(seen, _repair(seen, half_life), after.days)
        out.append(math.log(expected / after.share_lost()))
    return tuple(out)


def _expected(log: FaultLog, repair: RepairTimes, days: float) -> float:
    """New faults at the rate, cut at the last day, and nodes that are away already."""
    hours = 24 * days
    ends = (np.arange(64) + 0.5) / 64 * hours
    new = log.rate * log.nodes * days * float(repair.spent(ends).mean())
    so_far = log.hours[log.open]
    left = (repair.spent(so_far + hours) - repair.spent(so_far)) / np.maximum(repair.alive(so_far), 1e-6)
    return (new + float(left.sum())) / (log.nodes * hours)


def fit_repair(hours: Floats, away: NDArray[np.bool_], weight: Floats, all: RepairTimes | None = None) -> RepairTimes:
    """Weibull times by weighted likelihood; `away`: known to be longer. Few are held towards those of all classes."""
    middle, t, over = USUAL_SHAPE if all is None else all.shape, np.maximum(hours, ROUNDED), weight * ~away
    powers = t ** SHAPES[:, None]
    total, ended = powers @ weight, np.full(len(SHAPES), over.sum() + 1e-9)
    if all is not None:
        total, ended = total + CLASS_WORTH * all.scale**SHAPES, ended + CLASS_WORTH
    scales = (total / ended) ** (1 / SHAPES)  # the best for each shape
    fit = ended * np.log(SHAPES / scales**SHAPES) + (SHAPES - 1) * float(over @ np.log(t)) - total / scales**SHAPES
    i = int(np.argmax(fit - (np.log(SHAPES / middle) / SHAPE_SD) ** 2 / 2))
    return RepairTimes(float(SHAPES[i]), float(scales[i]))


@dataclass(frozen=True, eq=False)
class Relapses:
    """Nodes that fail again soon after they came back: the repair had not helped."""

    share: float  # of repairs
    days: float  # until then, on average
    later: NDArray[np.bool_]  # of each fault of the log: it is one of these


def fit_relapses(log: FaultLog) -> Relapses:
    """From the days between a node's return and its next fault: soon or at the rate of any node, by likelihood (EM)."""
    gaps, seen, row = _gaps(log)
    share, days, rate = 0.3, 1.0, log.rate
    if not seen.any():
        return Relapses(0.0, days, np.zeros(len(log.start), bool))
    up = float(log.up_days().sum())
    for _ in range(ROUNDS):
        soon = share * np.where(seen, np.exp(-gaps / days) / days, np.exp(-gaps / days))
        late = (1 - share) * np.where(seen, rate * np.exp(-gaps * rate), np.exp(-gaps * rate))
        part = soon / (soon + late)
        share, days = float(part.mean()), float(np.clip((part * gaps).sum() / max(part @ seen, 1e-9), 0.02, SOON))
        rate = (float(log.new.sum()) - float(part @ seen)) / up
    later = np.zeros(len(log.start), bool)
    later[row[seen & (part > 0.5)]] = True
    return Relapses(share, days, later)


def _gaps(log: FaultLog) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int64]]:
    """After each return of a node: days to its next fault or to the end, whether there was one, and its number."""
    gaps, seen, row = [], [], []
    for one in np.unique(log.node):
        mine = np.flatnonzero(log.node == one)
        mine = mine[np.argsort(log.start[mine])]
        for i, this in enumerate(mine):
            following = mine[i + 1] if i + 1 < len(mine) else -1
            if log.back[this] <= log.end:
                until = log.start[following] if following >= 0 else log.end
                gaps.append(max(float(until - log.back[this]), 1e-3))
                seen.append(following >= 0)
                row.append(following)
    return np.array(gaps), np.array(seen, bool), np.array(row, np.int64)


def fit_frailty(log: FaultLog, later: NDArray[np.bool_]) -> float:
    """Variance of nodes' own rates, as far as it lasts: which nodes failed early, against which failed late."""
    first = log.new & ~later
    found = []
    for share in SPLITS:
        early = log.start < log.begin + share * log.days
        a, b = (np.bincount(log.node[first & part], minlength=log.nodes) for part in (early, ~early))
        if a.sum() and b.sum():
            found.append(float((a * b).mean() / (a.mean() * b.mean()) - 1))
    return max(0.0, float(np.mean(found))) if found else 0.0


# ---- the days to come, drawn fault by fault


@dataclass(frozen=True, eq=False)
class FaultForecast:
    """Draws of the days after a log: one number a draw."""

    share: Floats  # of node time lost
    rate: Floats  # faults per node-day
    away_p95: Floats  # nodes away, not exceeded on 95% of days: the spares needed
    worst_tenth: Floats  # share of faults on the tenth of nodes with most


def forecast(model: FaultModel, days: float, draws: int = 400, seed: int = 0) -> FaultForecast:
    """The next days: nodes that are away come back first, nodes that failed often fail more often."""
    rng, fleet = np.random.default_rng(seed), model.log
    n, hours = fleet.nodes, 24 * days
    half = model.drift / sqrt(2)  # of the rate, and as much of repairs
    often, long = np.exp(half * rng.standard_normal((2, draws)) - half**2 / 2)
    rates = _node_rates(model, rng, draws) * often[:, None] / 24
    clock = _still_away(model, rng, draws, long)
    lost = np.minimum(clock, hours)
    counts, noons = np.zeros((draws, n), np.int64), np.arange(12.0, hours, 24.0)
    change = np.zeros((draws, len(noons) + 1))
    _mark(change, noons, np.zeros((draws, n)), np.minimum(clock, hours), clock > 0)
    back = clock > 0
    while True:
        soon = back & (rng.random((draws, n)) < model.relapses.share)
        start = clock + rng.standard_exponential((draws, n)) * np.where(soon, 24 * model.relapses.days, 1 / rates)
        if not (start < hours).any():
            break
        some = start < hours
        takes = np.where(soon, model.again, model.once) * model.repair.sample(rng, (draws, n))
        end = start + takes * long[:, None]
        counts += some
        lost += np.where(some, np.minimum(end, hours) - start, 0.0)
        _mark(change, noons, start, end, some)
        clock, back = np.where(some, end, hours), some
    away = np.cumsum(change[:, :-1], axis=1)
    top = np.sort(counts, axis=1)[:, -max(1, round(n / 10)) :].sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    share, rate = lost.sum(axis=1) / (n * hours), counts.sum(axis=1) / (n * days)
    return FaultForecast(share, rate, np.quantile(away, 0.95, axis=1), top)


def _node_rates(model: FaultModel, rng: np.random.Generator, draws: int) -> Floats:
    """Faults per day of each node, given what each has had."""
    first = model.log.new & ~model.relapses.later
    counts = np.bincount(model.log.node[first], minlength=model.log.nodes)
    rate, days = model.rate, model.log.up_days()
    if not model.frailty:
        return np.full((draws, len(counts)), rate)
    k = 1 / model.frailty
    found = rng.standard_gamma(np.broadcast_to(k + counts, (draws, len(counts)))) / (k + rate * days)
    return np.asarray(np.maximum(found, 1e-9) * rate)


def _still_away(model: FaultModel, rng: np.random.Generator, draws: int, long: Floats) -> Floats:
    """Hours until nodes that are away now are back, given how long they have been."""
    clock = np.zeros((draws, model.log.nodes))
    for node, so_far in zip(model.log.node[model.log.open], model.log.hours[model.log.open], strict=True):
        left = model.repair.sample(rng, (draws,), float(so_far)) - so_far
        clock[:, node] = np.maximum(clock[:, node], left * long)
    return clock


def _mark(change: Floats, noons: Floats, start: Floats, end: Floats, some: NDArray[np.bool_]) -> None:
    """Count nodes as away at the noons from start to end."""
    draw = np.nonzero(some)[0]
    np.add.at(change, (draw, np.searchsorted(noons, start[some])), 1.0)
    np.add.at(change, (draw, np.searchsorted(noons, end[some])), -1.0)
