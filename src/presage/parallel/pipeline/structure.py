"""A schedule as tasks that wait for each other: everything about a pipeline's step but how long things take.

Messages between stages are delays on the edges they go along; or, where both stages stand still for them (`exchanges`),
tasks of their own that two lanes share. A message and the one that goes the opposite way at that moment are one
exchange, as in Megatron's send_forward_recv_backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine.compiled import compiled
from presage.engine.pairs import Pairs
from presage.parallel.pipeline.pace import Stretch
from presage.parallel.schedules import UNIT, Extent, Moments, ScheduleKind, Turns, moments, schedule_kind, turns

__all__ = ["EXCHANGE", "FIRST", "Structure", "structure"]

Array = NDArray[Any]
Ints = NDArray[np.int64]
# Kinds of tasks: F, B and W of every (stage, chunk), the F of the first microbatch, exchanges by the stage before them.
FIRST, EXCHANGE = 3, 4


@dataclass(frozen=True, eq=False)
class Structure:
    """Tasks in an order in which what is waited for comes first."""

    stages: int
    virtual: int
    waits: Pairs
    lane: Array  # the stage (of an exchange, the one before it)
    turn: Array  # which forward, backward ... of its stage a task is
    turns: Turns
    round: int  # tasks of one group of microbatches, once all stages are at work
    regular: Array  # [phase, 2]: from which task to which one each does what the one a round before it did
    window: Array  # [phase]: how many tasks before the end of that stretch later ones wait for
    cascade: bool  # stages wait for later ones only (backwards of GPipe): their paces differ
    first: Array  # [stages, virtual]: a chunk's first forward
    last: Array  # [stages, virtual]: the task after which a chunk's gradients are complete

    @cached_property
    def stretch(self) -> Stretch:
        """Where it repeats itself."""
        return Stretch(self.round, self.regular, self.window, self.lane, self.cascade)

    @cached_property
    def what(self) -> Array:
        """0 F, 1 B, 2 W, 4 exchange."""
        what = np.minimum(self.waits.kind // (self.stages * self.virtual), EXCHANGE)
        return np.where(what == FIRST, 0, what)

    @cached_property
    def chunk(self) -> Array:
        return np.where(self.what == EXCHANGE, 0, self.waits.kind % self.virtual)

    @cached_property
    def microbatch(self) -> Array:
        return self.turns.microbatch[self.turn]


@lru_cache(maxsize=256)
def structure(kind: str, stages: int, microbatches: int, virtual: int, group: int, exchanges: bool) -> Structure:
    """Of one schedule. Kept: many steps differ in their times only."""
    rule = schedule_kind(kind)
    order, when = turns(microbatches, virtual, group), moments(rule, Extent(stages, microbatches, virtual, group))
    columns = _operations(when, order, stages, virtual)
    if exchanges:
        columns = _joined([columns, *_exchanges(when, stages, virtual)])
    place = _places(columns[0])
    n = len(place)
    second = np.full(n, n, np.int32)
    if not exchanges:
        _set_senders(second, place, order, stages)
    lane, kinds, turn = (_moved(c, place) for c in columns[1:])
    first = _lane_waits(lane, kinds, EXCHANGE * stages * virtual, stages, second)
    waits = Pairs(first, second, kinds)
    round_ = _round(rule, stages, virtual, group, exchanges)
    foldable = not rule.phased or virtual == 1
    cuts = _cuts(rule, place, stages * microbatches * virtual) if foldable else []
    regular = np.array([_regular(waits, round_, lo, hi) for lo, hi in cuts], np.int64).reshape(-1, 2)
    window = np.array([_window(waits, hi) for _, hi in regular], np.int64)
    ends = _ends(place, order, when, stages, virtual)
    cascade = rule.phased and not exchanges
    return Structure(stages, virtual, waits, lane, turn, order, round_, regular, window, cascade, *ends)


def _operations(when: Moments, order: Turns, stages: int, virtual: int) -> list[Ints]:
    """Moment, lane, kind and turn of every F, then every B, then every W; by stage, by turn."""
    stage, turn = np.arange(stages)[:, None], np.arange(len(order.chunk))[None, :]
    ahead = np.where(order.microbatch == 0, FIRST, 0)
    back = virtual - 1 - order.chunk
    blocks = []
    for moment, what, chunk in ((when.forward, ahead, order.chunk), (when.backward, 1, back), (when.weight, 2, back)):
        if moment.size:
            kind = what * stages * virtual + stage * virtual + chunk
            blocks.append([np.broadcast_to(x, moment.shape).ravel() for x in (moment, stage, kind, turn)])
    return _joined(blocks)


def _exchanges(when: Moments, stages: int, virtual: int) -> list[list[Ints]]:
    """Those of forwards; and of backwards, where no forward goes the other way at the same moment."""
    stage, turn = (x.ravel() for x in np.indices((stages - 1, when.forward.shape[1])))
    kind = EXCHANGE * stages * virtual + stage
    down, up = (x.ravel() + UNIT // 2 for x in (when.forward[:-1], when.backward[1:]))
    alone = ~np.isin(up * stages + stage, down * stages + stage)
    return [[down, stage, kind, turn], [up[alone], stage[alone], kind[alone], turn[alone]]]


def _joined(blocks: list[list[Ints]]) -> list[Ints]:
    return [np.concatenate(column) for column in zip(*blocks, strict=True)]


@compiled
def _places(moment: Array) -> Array:
    """The place of each task when all are sorted by their moments."""
    start = np.zeros(moment.max() + 2, np.int32)
    for m in moment:
        start[m + 1] += 1
    for m in range(len(start) - 1):
        start[m + 1] += start[m]
    place = np.empty(len(moment), np.int32)
    for i in range(len(moment)):
        place[i] = start[moment[i]]
        start[moment[i]] += 1
    return place


def _moved(column: Ints, place: Array) -> Array:
    moved = np.empty(len(place), np.int32)
    moved[place] = column
    return moved


def _set_senders(second: Array, place: Array, order: Turns, stages: int) -> None:
    """Whose output each F and B needs: that of the neighbouring stage, or of the chunk before at the other end."""
    size = stages * len(order.chunk)
    forward, backward = (place[k * size : (k + 1) * size].reshape(stages, -1) for k in (0, 1))
    around = np.flatnonzero(order.chunk > 0)
    sent = around - order.back[around]
    second[forward[1:]] = forward[:-1]
    second[forward[0, around]] = forward[-1, sent]
    second[backward[:-1]] = backward[1:]
    second[backward[-1, around]] = backward[0, sent]


@compiled
def _lane_waits(lane: Array, kind: Array, exchange: int, stages: int, second: Array) -> Array:
    """The task before each on its lane; an exchange is on two lanes, and waits for both."""
    n = len(lane)
    last, first = np.full(stages, n, np.int32), np.empty(n, np.int32)
    for t in range(n):
        first[t] = last[lane[t]]
        last[lane[t]] = t
        if kind[t] >= exchange:
            second[t] = last[lane[t] + 1]
            last[lane[t] + 1] = t
    return first


def _round(kind: ScheduleKind, stages: int, virtual: int, group: int, exchanges: bool) -> int:
    one_way = stages + (stages - 1) * exchanges
    if kind.phased:
        return one_way
    return group * virtual * stages * (3 if kind.splits_backward else 2) + group * (stages - 1) * exchanges


def _cuts(kind: ScheduleKind, place: Array, size: int) -> list[tuple[int, int]]:
    """The phases of a schedule, as stretches of tasks."""
    if not kind.phased:
        return [(0, len(place))]
    turning = int(place[size : 2 * size].min())
    return [(0, turning), (turning, len(place))]


def _regular(w: Pairs, round_: int, lo: int, hi: int) -> tuple[int, int]:
    """The longest stretch in which every task but the first round's is one of the round before, moved on."""
    if hi - lo <= round_:
        return lo, lo
    same = np.ones(hi - lo - round_, np.bool_)
    task, nobody = np.arange(lo, hi), len(w.first)
    for column in (w.first[lo:hi], w.second[lo:hi]):
        back = np.where(column == nobody, 0, task - column)
        same &= back[round_:] == back[:-round_]
    same &= w.kind[lo + round_ : hi] == w.kind[lo : hi - round_]
    at, stop = _longest(same)
    return lo + at, lo + (stop + round_ if stop > at else at)


@compiled
def _longest(same: Array) -> tuple[int, int]:
    """The longest run of True, the last of those as long."""
    at, stop, begin = 0, 0, 0
    for i in range(len(same)):
        if not same[i]:
            begin = i + 1
        elif i + 1 - begin >= stop - at:
            at, stop = begin, i + 1
    return at, stop


def _window(w: Pairs, stop: int) -> int:
    """How far before `stop` lie the tasks that those from `stop` on wait for; or, within a round, those of a round."""
    least = min(int(w.first[stop:].min(initial=stop)), int(w.second[stop:].min(initial=stop)))
    task = np.arange(stop)
    reach = [np.where(c[:stop] == len(w.first), 0, task - c[:stop]).max(initial=0) for c in (w.first, w.second)]
    return max(stop - least, *map(int, reach))


def _ends(place: Array, order: Turns, when: Moments, stages: int, virtual: int) -> tuple[Array, Array]:
    """The first forward of each (stage, chunk), and the last backward or, where split, weight gradient."""
    size, count = stages * len(order.chunk), 3 if when.weight.size else 2
    forward, final = (place[k * size : (k + 1) * size].reshape(stages, -1) for k in (0, count - 1))
    chunks = np.arange(virtual)
    starts = np.array([np.flatnonzero(order.chunk == c)[0] for c in chunks])
    stops = np.array([np.flatnonzero(order.chunk == virtual - 1 - c)[-1] for c in chunks])
    return np.ascontiguousarray(forward[:, starts]), np.ascontiguousarray(final[:, stops])
