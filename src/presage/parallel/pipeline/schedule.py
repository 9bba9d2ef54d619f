"""A Schedule: in which order the stages of a pipeline run the forwards and backwards of a step's microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.compiled import compiled
from presage.errors import PresageError
from presage.parallel.pipeline.structure import EXCHANGE, FIRST, Structure, structure
from presage.parallel.schedules import ScheduleKind, group_of, schedule_kind

__all__ = ["Order", "Schedule"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Order:
    """What one stage runs, first to last."""

    what: Ints  # 0 F, 1 B, 2 W
    chunk: Ints
    microbatch: Ints

    def __len__(self) -> int:
        return len(self.what)


@dataclass(frozen=True)
class Schedule:
    """Make one with `Schedule.of`.

    `kind` is one of SCHEDULES.
    """

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
            raise PresageError(
                f"{kind} has one chunk of layers a stage, virtual = 1, not {virtual}: use {rule.with_chunks}"
            )
        return Schedule(kind, stages, microbatches, virtual, group_of(rule, stages, microbatches, virtual))

    @property
    def rule(self) -> ScheduleKind:
        """What kind of schedule it is."""
        return schedule_kind(self.kind)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return self.rule.splits_backward

    @cached_property
    def order(self) -> tuple[Order, ...]:
        """What each stage runs."""
        return _orders(self.structure())

    @cached_property
    def in_flight(self) -> Ints:
        """[stages]: the most (chunk, microbatch) whose activations a stage holds at once."""
        return np.rint(self.most_held(1.0)).astype(np.int64)

    def most_held(self, weights: ArrayLike) -> Floats:
        """[stages]: the most that activations take at once, where those of one microbatch take weights[stage, chunk].

        They are held from their forward to the end of their backward, or of their weight gradients where those are
        apart; what a stage holds is known from its order alone.
        """
        each = np.ascontiguousarray(np.broadcast_to(spread(weights), (self.stages, self.virtual)))
        if self.rule.phased:
            return np.asarray(self.microbatches * each.sum(axis=1))
        s = self.few(min(self.filling, self.microbatches)).structure()  # more microbatches hold no more
        return most_held(s.waits.kind, s.lane, each.ravel(), self.stages, self.splits_backward)

    @property
    def filling(self) -> int:
        """Microbatches with which all stages are at work at once for at least a round."""
        if self.virtual == 1:
            return 2 * self.stages + (self.stages if self.splits_backward else 0) + 2
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

    def structure(self, beside: bool = True) -> Structure:
        """Who waits for whom; messages are tasks where stages wait for each other to send them."""
        exchanges = not beside and self.meets
        return structure(self.kind, self.stages, self.microbatches, self.virtual, self.group, exchanges)

    @property
    def meets(self) -> bool:
        """Whether stages that do not send beside their work meet to send."""
        return self.rule.rendezvous and self.virtual == 1


def spread(values: ArrayLike) -> Floats:
    """A number, or one a stage, or one a (stage, chunk), so that it can be broadcast to [stages, virtual]."""
    given = np.asarray(values, np.float64)
    return given[:, None] if given.ndim == 1 else given


def _orders(s: Structure) -> tuple[Order, ...]:
    ours = s.what != EXCHANGE
    at = [np.flatnonzero(ours & (s.lane == k)) for k in range(s.stages)]
    return tuple(Order(s.what[t], s.chunk[t], s.microbatch[t]) for t in at)


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
