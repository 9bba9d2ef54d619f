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

import numpy as np
from numpy.typing import NDArray

from presage.placement.placement_bound import bound
from presage.placement.placement_score import Judge, Moments, level

__all__ = ["Found", "assign", "assign_worst", "responses"]

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
class Found:
    """groups[replica, stage], and the p95 of the slowest replica as the judge has it."""

    groups: Ints
    p95: float


def responses(judge: Judge, factor: float) -> Floats:
    """[stage]: how many times as long a replica takes when one stage's GPUs take `factor` as long."""
    stages = judge.pipeline.shape.stages
    factors = np.ones((stages + 1, stages))
    factors[np.arange(stages), np.arange(stages)] = factor
    seconds = judge.pipeline.quiet(factors)
    return np.asarray(seconds[:-1] / seconds[-1])


def assign(judge: Judge, values: Floats, budget: float = BUDGET) -> Found:
    """Groups with factors `values` to places. A large placement is good enough where it is near what none can beat."""
    starts = list(_starts(judge, values))
    if judge.pipeline.shape.stages == 1:  # replicas are alike: there is nothing to choose
        return Found(starts[0], judge.p95(values[starts[0]]))
    if len(values) <= SMALL:
        return min((_exchanged(judge, values, s, budget, 0.0) for s in starts), key=lambda f: f.p95)
    best = min(starts, key=lambda g: judge.p95(values[g]))
    return _exchanged(judge, values, best, budget, NEAR * bound(judge, values, values[best]))


def assign_worst(judge: Judge, values: Floats) -> Ints:
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


def _starts(judge: Judge, values: Floats) -> Iterator[Ints]:
    response = _by_response(judge, values)
    yield _by_stage(judge, values, response)
    yield _by_replica(values, judge.replicas, response)
    if len(values) <= SMALL:
        rng = np.random.default_rng(judge.seed)
        for _ in range(STARTS):
            yield rng.permutation(len(values)).reshape(judge.replicas, -1)


def _by_response(judge: Judge, values: Floats) -> Ints:
    """Stages, from the one that responds least to its GPUs being slow."""
    slow = max(float(values.max() / np.median(values)), 1.02)
    return np.argsort(responses(judge, slow), kind="stable")


def _by_stage(judge: Judge, values: Floats, response: Ints) -> Ints:
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

    def some(self, chosen: Ints) -> _Changes:
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


def _exchanged(judge: Judge, values: Floats, groups: Ints, budget: float, aim: float) -> Found:
    groups, m = groups.copy(), judge.moments(values[groups])
    rng = np.random.default_rng(judge.seed)
    p95, spent = level(m), 0.0
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
        p95 = level(m)
    return Found(groups, p95)


def _worst_rows(judge: Judge, m: Moments) -> Ints:
    worth = m.mean + judge.wide * m.sd
    count = len(worth) if worth.size <= SMALL else WORST_ROWS
    return np.argsort(-worth, kind="stable")[:count]


def _changes(values: Floats, groups: Ints, row: int, m: Moments, rng: np.random.Generator) -> _Changes:
    """Of a row with itself and with others: all, or the quickest and some more."""
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
    judge: Judge, values: Floats, groups: Ints, m: Moments, changes: _Changes, log_p95: float
) -> tuple[_Changes | None, float]:
    """The change after which the worse of its two rows is best, if it helps; and the tasks run to find it."""
    if not len(changes):
        return None, 0.0
    few = changes.some(_promising(judge, values, groups, m, changes))
    ours, theirs = few.applied(groups)
    new, other = judge.moments(values[ours]), judge.moments(values[theirs])
    same = few.other == few.row
    before = m.below(log_p95)
    gain = new.below(log_p95) - before[few.row] + np.where(same, 0.0, other.below(log_p95) - before[few.other])
    worth = np.maximum(new.mean + judge.wide * new.sd, other.mean + judge.wide * other.sd)
    spent = 2.0 * len(changes) * judge.pipeline.quick_tasks + 2.0 * len(few) * judge.work
    worth[gain <= LEAST] = np.inf
    at = int(worth.argmin())
    return (few.some(np.array([at])) if np.isfinite(worth[at]) else None), spent


def _promising(judge: Judge, values: Floats, groups: Ints, m: Moments, changes: _Changes) -> Ints:
    """The best without noise, given what noise does to the rows as they are."""
    if len(changes) <= CHECKED or groups.size <= SMALL:
        return np.arange(len(changes))
    more = m.mean + judge.wide * m.sd - m.quiet
    ours, theirs = changes.applied(groups)
    worth = np.log(judge.pipeline.quiet(values[np.concatenate([ours, theirs])]))
    worse = np.maximum(worth[: len(ours)] + more[changes.row], worth[len(ours) :] + more[changes.other])
    return np.argsort(worse, kind="stable")[:CHECKED]
