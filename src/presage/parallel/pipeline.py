"""Schedule: in which order the stages of a pipeline run a step's microbatches, as tasks of the engine. No times.

Sends between stages are delays on the edges they go along; or, where both stages stand still for them (`exchanges`),
tasks of their own that two lanes share. A send and the one that goes the opposite way at that moment are one exchange,
as in Megatron's send_forward_recv_backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.compiled import compiled
from presage.engine.rounds import RoundProgram, Tasks
from presage.errors import PresageError
from presage.parallel.orders import UNIT, Extent, OperationMoments, Route
from presage.parallel.schedules import WHAT, ScheduleKind, Turns, group_of, schedule_kind, turns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]
# Kinds of tasks: F, B and W of every (stage, chunk), the F of the first microbatch, exchanges by the stage before them.
FIRST, EXCHANGE = 3, 4
SEND = "send"


@dataclass(frozen=True, eq=False)
class StageOrder:
    """What one stage runs, first to last."""

    what: Ints  # 0 F, 1 B, 2 W
    chunk: Ints
    microbatch: Ints

    def __len__(self) -> int:
        return len(self.what)


@dataclass(frozen=True, eq=False)
class PipelineTasks:
    """The tasks of a step, and what each of them is."""

    stages: int
    virtual: int
    program: RoundProgram
    microbatch: Array

    @cached_property
    def what(self) -> Array:
        """0 F, 1 B, 2 W, 4 exchange."""
        what = np.minimum(self.program.waits.kind // (self.stages * self.virtual), EXCHANGE)
        return np.where(what == FIRST, 0, what)

    @cached_property
    def chunk(self) -> Array:
        return np.where(self.what == EXCHANGE, 0, self.program.waits.kind % self.virtual)

    def names(self) -> tuple[Ints, list[str]]:
        """An index for each task, and the names: F3.1 for microbatch 3 through chunk 1, F3 where there is one chunk."""
        count = int(self.microbatch.max()) + 1
        number = (self.what * count + self.microbatch) * self.virtual + self.chunk
        number = np.where(self.what == EXCHANGE, len(WHAT) * count * self.virtual, number)
        chunks = [f".{c}" for c in range(self.virtual)] if self.virtual > 1 else [""]
        names = [f"{what}{m}{chunk}" for what in WHAT for m in range(count) for chunk in chunks]
        return np.asarray(number, np.int64), [*names, SEND]


@dataclass(frozen=True)
class Schedule:
    """A schedule of a known kind (see SCHEDULES) and size. Make one with `Schedule.of`."""

    kind: str
    stages: int
    microbatches: int
    virtual: int
    group: int  # microbatches that go through a chunk before the next chunk's turn

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
        """A schedule, or an error that names what does not fit."""
        rule = schedule_kind(kind)
        for name, count in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
            if count < 1:
                raise PresageError(f"a pipeline with {name} = {count}: {name} >= 1")
        if rule.chunks == "one" and virtual > 1:
            what = f"{kind} has one chunk of layers a stage, virtual = 1, not {virtual}"
            raise PresageError(f"{what}: use {rule.with_chunks}")
        if rule.chunks == "two" and virtual != 2:
            raise PresageError(f"{kind} has two chunks of layers a stage, virtual = 2, not {virtual}")
        if misfit := rule.misfit(stages, microbatches):
            raise PresageError(misfit)
        return Schedule(kind, stages, microbatches, virtual, group_of(rule, stages, microbatches, virtual))

    @property
    def rule(self) -> ScheduleKind:
        """What kind of schedule it is."""
        return schedule_kind(self.kind)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return self.rule.splits_backward

    @property
    def passes(self) -> int:
        """Microbatches that go through each chunk."""
        return self.microbatches // self.rule.route.copies

    @property
    def operations(self) -> int:
        """Tasks of a microbatch through a chunk: F, B and, where it is apart, W."""
        return 3 if self.splits_backward else 2

    @cached_property
    def order(self) -> tuple[StageOrder, ...]:
        """What each stage runs."""
        t, lane = self.tasks(), self.tasks().program.lane
        at = [np.flatnonzero((t.what != EXCHANGE) & (lane == k)) for k in range(self.stages)]
        return tuple(StageOrder(t.what[i], t.chunk[i], t.microbatch[i]) for i in at)

    @cached_property
    def in_flight(self) -> Ints:
        """[stages]: the most (chunk, microbatch) whose activations a stage holds at once."""
        return np.rint(self.most_held(1.0)).astype(np.int64)

    def most_held(self, weights: ArrayLike) -> Floats:
        """[stages]: the most that activations take at once, where those of one microbatch take weights[stage, chunk].

        They are held from their forward to the end of their backward, or of their weight gradients where those are
        apart; what a stage holds is known from its order alone.
        """
        each = np.ascontiguousarray(np.broadcast_to(by_chunk(weights), (self.stages, self.virtual)))
        if self.rule.phased:
            return np.asarray(self.microbatches * each.sum(axis=1))
        p = self.few(min(self.filling, self.microbatches)).tasks().program  # more microbatches hold no more
        return most_held(p.waits.kind, p.lane, each.ravel(), self.stages, self.splits_backward)

    @property
    def filling(self) -> int:
        """Microbatches with which all stages are at work at once for at least a round."""
        if self.virtual == 1 or self.rule.route is not Route.LOOP:
            return self.same_rest(self.rule.filling(self.stages))
        ahead = 2 * self.stages + (self.virtual - 1) * max(self.stages, self.group)
        return self.same_rest(-(-(ahead + 4) // self.virtual) + self.group)

    @property
    def period(self) -> int:
        """So many microbatches more, and the schedule is the same with one round more."""
        return 1 if self.rule.phased else self.group

    def same_rest(self, microbatches: int, rounds: int = 1) -> int:
        """The next number of microbatches from which this schedule is a whole number of times `rounds` rounds away."""
        step = self.period * rounds
        return microbatches + (self.microbatches - microbatches) % step

    def few(self, microbatches: int) -> Schedule:
        """The same schedule with fewer microbatches."""
        group = microbatches if self.rule.phased else self.group
        return Schedule(self.kind, self.stages, microbatches, self.virtual, group)

    @property
    def meets(self) -> bool:
        """Whether stages whose sends do not overlap with compute meet to send."""
        return self.rule.rendezvous and self.virtual == 1

    def tasks(self, overlap: bool = True) -> PipelineTasks:
        """Who waits for whom; sends are tasks where stages wait for each other to send."""
        return _tasks(self, not overlap and self.meets)


def by_chunk(values: ArrayLike) -> Floats:
    """A number, or one a stage, or one a (stage, chunk), so that it can be broadcast to [stages, virtual]."""
    given = np.asarray(values, np.float64)
    return given[:, None] if given.ndim == 1 else given


@compiled
def most_held(kind: Array, lane: Array, weights: Floats, stages: int, split: bool) -> Floats:
    """The highest sum of what forwards add and last parts of backwards take away, on each lane."""
    held, most, size = np.zeros(stages), np.zeros(stages), len(weights)
    for t in range(len(kind)):
        what, place = kind[t] // size, kind[t] % size
        if what == 0 or what == FIRST:
            held[lane[t]] += weights[place]
            most[lane[t]] = max(most[lane[t]], held[lane[t]])
        elif what == (2 if split else 1):
            held[lane[t]] -= weights[place]
    return most


# ---- tasks of a schedule


@lru_cache(maxsize=256)
def _tasks(s: Schedule, exchanges: bool) -> PipelineTasks:
    """Cached: many steps differ in their times only."""
    kind, extent = s.rule, Extent(s.stages, s.microbatches, s.virtual, s.group)
    order, when = turns(kind, extent), kind.moments(extent)
    moment, lane, kinds, turn = columns = _operations(when, order, s.stages, s.virtual)
    if exchanges:
        moment, lane, kinds, turn = _joined([columns, *_exchanges(when, s.stages, s.virtual)])
    sender = np.full(len(moment), -1)
    if not exchanges:
        _set_senders(sender, order, when, kind.route)
    size = s.stages * len(order.chunk)
    phases = [slice(None), slice(size, 2 * size)] if kind.phased else [slice(None)]
    if kind.phased and s.virtual > 1:
        phases = []  # nothing that repeats
    program = RoundProgram.of(
        Tasks(moment, lane, kinds, sender), s.stages, EXCHANGE * s.stages * s.virtual, _round(s, exchanges),
        *_ends(order, when, s.stages, s.virtual), phases=phases, cascade=kind.phased and not exchanges,
    )  # fmt: skip
    in_order = np.empty(len(turn), np.int32)
    in_order[program.place] = turn
    return PipelineTasks(s.stages, s.virtual, program, order.microbatch[in_order])


def _operations(when: OperationMoments, order: Turns, stages: int, virtual: int) -> list[Ints]:
    """Moment, lane, kind and turn of every F, then every B, then every W; by stage, by turn."""
    stage, turn = np.arange(stages)[:, None], np.arange(len(order.chunk))[None, :]
    ahead, back = np.where(order.microbatch == 0, FIRST, 0), order.chunk_back
    blocks = []
    for moment, what, chunk in ((when.forward, ahead, order.chunk), (when.backward, 1, back), (when.weight, 2, back)):
        if moment.size:
            kind = what * stages * virtual + stage * virtual + chunk
            blocks.append([np.broadcast_to(x, moment.shape).ravel() for x in (moment, stage, kind, turn)])
    return _joined(blocks)


def _exchanges(when: OperationMoments, stages: int, virtual: int) -> list[list[Ints]]:
    """Those of forwards; and of backwards, where no forward goes the other way at the same moment."""
    stage, turn = (x.ravel() for x in np.indices((stages - 1, when.forward.shape[1])))
    kind = EXCHANGE * stages * virtual + stage
    down, up = (x.ravel() + UNIT // 2 for x in (when.forward[:-1], when.backward[1:]))
    alone = ~np.isin(up * stages + stage, down * stages + stage)
    return [[down, stage, kind, turn], [up[alone], stage[alone], kind[alone], turn[alone]]]


def _joined(blocks: list[list[Ints]]) -> list[Ints]:
    return [np.concatenate(column) for column in zip(*blocks, strict=True)]


def _set_senders(sender: Ints, order: Turns, when: OperationMoments, route: Route) -> None:
    """Whose end each F and B waits for: that of the neighbouring stage's output, or of the chunk before at an end."""
    ahead, back = when.forward_done, when.backward_done
    forward, backward = np.arange(2 * ahead.size).reshape(2, *ahead.shape)
    if route is Route.LOOP:
        around = np.flatnonzero(order.chunk > 0)
        sent = around - order.back[around]
        sender[forward[1:]], sender[backward[:-1]] = ahead[:-1], back[1:]
        sender[forward[0, around]], sender[backward[-1, around]] = ahead[-1, sent], back[0, sent]
        return
    down, up = order.chunk == 0, order.chunk == 1
    for chosen, to, since in ((down, slice(1, None), slice(None, -1)), (up, slice(None, -1), slice(1, None))):
        sender[forward[to, chosen]], sender[backward[since, chosen]] = ahead[since, chosen], back[to, chosen]
    if route is Route.BACK:
        sender[forward[-1, up]], sender[backward[-1, down]] = ahead[-1, down], back[-1, up]


def _round(s: Schedule, exchanges: bool) -> int:
    """Tasks of one round."""
    if s.rule.phased:
        return s.stages + (s.stages - 1) * exchanges
    chunks = s.virtual // s.rule.route.copies
    return s.group * (chunks * s.stages * s.operations + (s.stages - 1) * exchanges)


def _ends(order: Turns, when: OperationMoments, stages: int, virtual: int) -> tuple[Ints, Ints]:
    """The first forward of each (stage, chunk), and the last backward or, where split, weight gradient."""
    size, count = stages * len(order.chunk), 3 if when.weight.size else 2
    forward, final = (np.arange(k * size, (k + 1) * size).reshape(stages, -1) for k in (0, count - 1))
    chunks = np.arange(virtual)
    starts = np.array([np.flatnonzero(order.chunk == c)[0] for c in chunks])
    stops = np.array([np.flatnonzero(order.chunk_back == c)[-1] for c in chunks])
    return forward[:, starts], final[:, stops]
