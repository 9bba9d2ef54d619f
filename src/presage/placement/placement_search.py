"""Which group of GPUs goes to which (replica, stage): starts from what the structure says, then exchanges.

Two starts: stage by stage, where the slowest groups go to the stages that respond least to being slow; and replica by
replica, where slow groups keep each other company. From the better of them (of a small placement, from each) groups
change places: all changes of the replicas that hold the step up are looked through without noise, the best of them
judged with it, until none helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from presage.placement.placement_score import LogTimeMoments, PlacementScore, slowest_quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SMALL = 16  # groups: from more starts than one
STARTS = 10
WORST_ROWS = 6  # replicas whose changes are looked at
CHANGES = 8192  # looked at without noise at a time
CHECKED = 24  # of them with noise
LEAST = 1e-10  # by which the probability has to rise for a change to be one
NEAR = 1.0003  # times the bound
BUDGET = 1e9  # tasks run in all


@dataclass(frozen=True, eq=False)
class Assignment:
    """groups[replica, stage], and the p95 of the slowest replica as the judge has it."""

    groups: Ints
    p95: float


def stage_responses(judge: PlacementScore, factor: float) -> Floats:
    """[stage]: how many times as long a replica takes when one stage's GPUs take `factor` as long."""
    stages = judge.pipeline.shape.stages
    factors = np.ones((stages + 1, stages))
    factors[np.arange(stages), np.arange(stages)] = factor
    seconds = judge.pipeline.quiet(factors)
    return np.asarray(seconds[:-1] / seconds[-1])


def assign_groups(judge: PlacementScore, values: Floats, budget: float = BUDGET) -> Assignment:
    """Groups with factors `values` to places. A large placement is good enough where it is near what none can beat."""
    starts = list(_starts(judge, values))
    if judge.pipeline.shape.stages == 1:  # replicas are alike: there is nothing to choose
        return Assignment(starts[0], judge.p95(values[starts[0]]))
    if len(values) <= SMALL:
        return min((_exchanged(judge, values, s, budget, 0.0) for s in starts), key=lambda f: f.p95)
    best = min(starts, key=lambda g: judge.p95(values[g]))
    return _exchanged(judge, values, best, budget, NEAR * p95_bound(judge, values, values[best]))


def assign_groups_worst(judge: PlacementScore, values: Floats) -> Ints:
    """The slowest groups all in one replica and where they hurt most, the next in the next."""
    response = _by_response(judge, values)[::-1]
    groups = _by_replica(values, judge.replicas, response)
    row, quiet = groups[0], judge.pipeline.quiet
    while True:
        pairs = np.array(list(combinations(range(len(row)), 2)), np.int64).reshape(-1, 2)
        swapped = np.repeat(row[None], len(pairs) + 1, axis=0)
        swapped[np.arange(len(pairs))[:, None], pairs] = row[pairs[:, ::-1]]
        seconds = quiet(values[swapped])
        if seconds.max() <= seconds[-1] * (1 + 1e-12):
            return groups
        row[:] = swapped[seconds.argmax()]


# ---- starts


def _starts(judge: PlacementScore, values: Floats) -> Iterator[Ints]:
    response = _by_response(judge, values)
    yield _by_stage(judge, values, response)
    yield _by_replica(values, judge.replicas, response)
    if len(values) <= SMALL:
        rng = np.random.default_rng(judge.seed)
        for _ in range(STARTS):
            yield rng.permutation(len(values)).reshape(judge.replicas, -1)


def _by_response(judge: PlacementScore, values: Floats) -> Ints:
    """Stages, from the one that responds least to its GPUs being slow."""
    slow = max(float(values.max() / np.median(values)), 1.02)
    return np.argsort(stage_responses(judge, slow), kind="stable")


def _by_stage(judge: PlacementScore, values: Floats, response: Ints) -> Ints:
    """The slowest groups to the stage that responds least, and so on; in it, the slowest to the quickest replica."""
    order = np.argsort(-values, kind="stable").reshape(len(response), judge.replicas)
    groups = np.zeros((judge.replicas, len(response)), np.int64)
    factors = np.full(groups.shape, float(values.min()))
    for stage, some in zip(response, order, strict=True):
        quickest = np.argsort(judge.pipeline.quiet(factors), kind="stable")
        groups[quickest, stage] = some
        factors[:, stage] = values[groups[:, stage]]
    return groups


def _by_replica(values: Floats, replicas: int, response: Ints) -> Ints:
    """The slowest groups all in one replica, the next in the next; in each, the slowest where it matters least."""
    order = np.argsort(-values, kind="stable").reshape(replicas, len(response))
    groups = np.empty_like(order)
    groups[:, response] = order
    return groups


# ---- exchanges


@dataclass(frozen=True, eq=False)
class _Changes:
    """Groups that change places: (row, stage) with (other, to)."""

    row: int
    stage: Ints
    other: Ints
    to: Ints

    def __len__(self) -> int:
        return len(self.stage)

    def select(self, chosen: Ints) -> _Changes:
        return _Changes(self.row, self.stage[chosen], self.other[chosen], self.to[chosen])

    def applied(self, groups: Ints) -> tuple[Ints, Ints]:
        """[change, stage]: the row's groups after each, and the other row's."""
        at = np.arange(len(self))
        ours, theirs = np.repeat(groups[self.row : self.row + 1], len(self), axis=0), groups[self.other]
        given, taken = groups[self.row, self.stage], groups[self.other, self.to]
        same = self.other == self.row
        ours[at, self.stage] = taken
        theirs[at, self.to] = given
        ours[at[same], self.to[same]] = given[same]
        theirs[same] = ours[same]
        return ours, theirs


def _exchanged(judge: PlacementScore, values: Floats, groups: Ints, budget: float, aim: float) -> Assignment:
    groups, m = groups.copy(), judge.moments(values[groups])
    rng = np.random.default_rng(judge.seed)
    p95, spent = slowest_quantile(m), 0.0
    while spent < budget and p95 > aim:
        for row in _worst_rows(judge, m):
            changes = _changes(values, groups, int(row), m, rng)
            chosen, used = _best(judge, values, groups, m, changes, np.log(p95))
            spent += used
            if chosen is not None:
                break
        else:
            break
        both = np.unique([int(row), int(chosen.other[0])])
        ours, theirs = chosen.applied(groups)
        groups[chosen.other[0]], groups[row] = theirs[0], ours[0]
        new = judge.moments(values[groups[both]])
        m.put(both, new)
        p95 = slowest_quantile(m)
    return Assignment(groups, p95)


def _worst_rows(judge: PlacementScore, m: LogTimeMoments) -> Ints:
    worth = m.mean + judge.wide * m.sd
    count = len(worth) if worth.size <= SMALL else WORST_ROWS
    return np.argsort(-worth, kind="stable")[:count]


def _changes(values: Floats, groups: Ints, row: int, m: LogTimeMoments, rng: np.random.Generator) -> _Changes:
    """Changes of a row with itself and with others: all, or the quickest and some more."""
    replicas, stages = groups.shape
    rows, most = np.arange(replicas), max(4, CHANGES // stages**2)
    if replicas > most:
        order = np.argsort(m.mean, kind="stable")
        rows = np.append(order[: most // 2], rng.choice(order[most // 2 :], most - most // 2, replace=False))
    stage, other, to = (x.ravel() for x in np.meshgrid(np.arange(stages), rows, np.arange(stages), indexing="ij"))
    differ = values[groups[row, stage]] != values[groups[other, to]]
    kept = differ & ((other != row) | (stage < to))
    return _Changes(row, stage[kept], other[kept], to[kept])


def _best(
    judge: PlacementScore, values: Floats, groups: Ints, m: LogTimeMoments, changes: _Changes, log_p95: float
) -> tuple[_Changes | None, float]:
    """The change after which the worse of its two rows is best, if it helps; and the tasks run to find it."""
    if not len(changes):
        return None, 0.0
    few = changes.select(_promising(judge, values, groups, m, changes))
    ours, theirs = few.applied(groups)
    new, other = judge.moments(values[ours]), judge.moments(values[theirs])
    same = few.other == few.row
    before = m.below(log_p95)
    gain = new.below(log_p95) - before[few.row] + np.where(same, 0.0, other.below(log_p95) - before[few.other])
    worth = np.maximum(new.mean + judge.wide * new.sd, other.mean + judge.wide * other.sd)
    spent = 2.0 * len(changes) * judge.pipeline.quick_tasks + 2.0 * len(few) * judge.work
    worth[gain <= LEAST] = np.inf
    at = int(worth.argmin())
    return (few.select(np.array([at])) if np.isfinite(worth[at]) else None), spent


def _promising(judge: PlacementScore, values: Floats, groups: Ints, m: LogTimeMoments, changes: _Changes) -> Ints:
    """The best without noise, given what noise does to the rows as they are."""
    if len(changes) <= CHECKED or groups.size <= SMALL:
        return np.arange(len(changes))
    more = m.mean + judge.wide * m.sd - m.quiet
    ours, theirs = changes.applied(groups)
    worth = np.log(judge.pipeline.quiet(values[np.concatenate([ours, theirs])]))
    worse = np.maximum(worth[: len(ours)] + more[changes.row], worth[len(ours) :] + more[changes.other])
    return np.argsort(worse, kind="stable")[:CHECKED]


# ---- What no placement of these groups can be below: so that it can be told how far from the best one is.

SUBSETS = 5000  # of stages, looked at
NOISY = 24  # of them with noise
TANGENTS = (24, 8)  # without noise, and with it: it rounds corners off
AROUND, STEP = 2e-3, 1e-6


def p95_bound(judge: PlacementScore, values: Floats, factors: Floats) -> float:
    """Seconds of the slowest replica at p95; `factors`[replica, stage] is a good placement of `values`."""
    return max(_alone(judge, np.sort(values)[::-1]), _together(judge, values, factors))


def _alone(judge: PlacementScore, slowest: Floats) -> float:
    """From the replica that has j of the slowest groups."""
    stages, found = judge.pipeline.shape.stages, 0.0
    for j in range(1, stages + 1):
        value = slowest[(j - 1) * judge.replicas]
        if comb(stages, j) <= SUBSETS and value > slowest[-1]:
            found = max(found, _least(judge, _subsets(stages, j, float(value), float(slowest[-1]))))
    return found


def _subsets(stages: int, j: int, slow: float, quick: float) -> Floats:
    """[subset, stage]: factors of a replica whose j slow groups are in any j stages."""
    chosen = np.array(list(combinations(range(stages), j)))
    factors = np.full((len(chosen), stages), quick)
    np.put_along_axis(factors, chosen, slow, axis=1)
    return factors


def _least(judge: PlacementScore, factors: Floats) -> float:
    """The least p95 of these replicas. Noise makes none quicker, so that few have to be looked at with it."""
    quiet = judge.pipeline.quiet(factors)
    order = np.argsort(quiet, kind="stable")
    seen = judge.moments(factors[order[:NOISY]])
    least = min(slowest_quantile(_one(seen, i)) for i in range(len(seen.mean)))
    return min(least, float(quiet[order[NOISY]])) if len(order) > NOISY else least


def _one(m: LogTimeMoments, i: int) -> LogTimeMoments:
    return LogTimeMoments(m.mean[i : i + 1], m.sd[i : i + 1], m.quiet[i : i + 1])


def _together(judge: PlacementScore, values: Floats, factors: Floats) -> float:
    """From replicas all alike, by tangents around the mean of a good placement."""
    center = np.log(factors).mean(axis=0)
    rng = np.random.default_rng(judge.seed)
    points = center + AROUND * rng.standard_normal((TANGENTS[judge.pipeline.varies], len(center)))
    slopes, height = _tangents(judge, points)
    sd = min(float(judge.moments(np.exp(center)[None]).sd[0]), float(judge.moments(factors).sd.min()))
    at = float((height - (slopes * points).sum(axis=1)).mean())
    return float(np.exp(at + _dealt(slopes.mean(axis=0), np.log(values), judge.replicas) + judge.wide * sd))


def _tangents(judge: PlacementScore, points: Floats) -> tuple[Floats, Floats]:
    """[point, stage]: slopes of the mean of the logarithm, and [point]: its height."""
    count, stages = points.shape
    moved = points[:, None, :] + STEP * np.vstack([np.zeros(stages), np.eye(stages)])
    mean = judge.moments(np.exp(moved).reshape(-1, stages)).mean.reshape(count, -1)
    return (mean[:, 1:] - mean[:, :1]) / STEP, mean[:, 0]


def _dealt(slopes: Floats, logs: Floats, replicas: int) -> float:
    """The least that the stages' means, weighed by the slopes, can add up to."""
    means = np.sort(logs).reshape(-1, replicas).mean(axis=1)
    return float((np.sort(slopes)[::-1] * means).sum())
