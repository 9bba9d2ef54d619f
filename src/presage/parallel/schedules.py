"""The pipeline schedules there are: in which order each stage runs the microbatches' operations. No times.

An operation is F (forward), B (backward, or its input-gradient part) or W (its weight-gradient part) of one microbatch
through one chunk of layers. Every operation has a `moment`, an integer: operations of a stage run in the order of their
moments, and whatever an operation waits for has a smaller one. Moments are the times of a schedule whose operations
all take equally long.

Moments come from a formula by turn (`by_turn`), or from the listed order of each stage (`presage.parallel.orders`).

A new schedule is one entry of `SCHEDULES`; nothing else asks for a schedule by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError, near
from presage.parallel.orders import UNIT, Extent, OperationMoments, Route, dual_pipe, dual_pipe_v, zero_bubble_v

Ints = NDArray[np.int64]
WHAT = "FBW"


ByTurn = Callable[[Ints, Ints, Extent], tuple[Ints, Ints]]
MomentsOf = Callable[[Extent], OperationMoments]


@dataclass(frozen=True, eq=False)
class Turns:
    """What goes through a stage, in the order by which its operations are numbered (and, where chunks form a loop, in
    which forwards and backwards run)."""

    microbatch: Ints
    chunk: Ints  # of forwards
    chunk_back: Ints  # of backwards
    back: Ints  # how many turns ago the same microbatch went through the chunk before


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule: its word in job files, and what the rest of the package asks about it."""

    name: str
    about: str
    moments: MomentsOf
    route: Route = Route.LOOP  # how a microbatch goes through the chunks
    splits_backward: bool = False  # weight gradients are operations of their own, and fill waits
    pairs: bool = False  # a forward runs beside a backward, and each hides the other's exchanges with experts
    ahead: int = 1  # forwards that the first stage runs before its first backward, times the number of stages
    phased: bool = False  # all forwards come before all backwards, so all activations are held at once
    rendezvous: bool = False  # a stage whose sends do not overlap with compute waits for the receiver
    least: int = 0  # microbatches, times the number of stages
    chunks: str = "any"  # of layers on each stage: one, two, several, any
    with_chunks: str = "interleaved"  # the schedule that is run where stages have several chunks
    searched: bool = True  # tried by a search for plans
    software: tuple[str, ...] = ()  # frameworks for which a search tries it; empty: for all

    @property
    def interleaved(self) -> bool:
        """Whether each stage must have several chunks of layers."""
        return self.chunks == "several"

    def virtual_of(self, given: int) -> int:
        """Chunks of layers on each stage, where so many are given and 1 stands for none."""
        return 2 if self.chunks == "two" and given == 1 else given

    def in_flight(self, stage: int, extent: Extent) -> int:
        """Chunks of a stage whose forward pass is done and whose backward pass is not, at most.

        Interleaved as Megatron-Core warms up: two for every later stage, and all chunks but the last of `stages`
        microbatches.
        """
        stages, microbatches, virtual, _ = extent
        if self.route is not Route.LOOP:
            return self._back_and_forth(stages, microbatches)
        if stages == 1:
            return virtual
        if self.phased:
            return microbatches * virtual
        if virtual > 1:
            return min((stages - stage - 1) * 2 + (virtual - 1) * stages + 1, microbatches * virtual)
        return min(microbatches, self.ahead * stages - stage)

    def filling(self, stages: int) -> int:
        """Microbatches with which all stages, with a chunk each, are at work at once for at least a round."""
        return 2 * self.ahead * stages + (stages if self.splits_backward else 0) + 2

    def misfit(self, stages: int, microbatches: int) -> str:
        """Why a pipeline of this size cannot be run so; empty where it can."""
        both = self.route is Route.BOTH_WAYS
        if both and stages % 2:
            return f"pp = 2 x n ({self.name}): {stages} is odd"
        if both and microbatches % 2:
            return f"microbatches = 2 x n ({self.name}): {microbatches} is odd; half of them start at either end"
        if microbatches < self.least * stages:
            need = f"{self.least} x {stages} = {self.least * stages}"
            return f"microbatches >= {self.least} x pp ({self.name}): {microbatches} is less than {need}"
        return ""

    def _back_and_forth(self, stages: int, microbatches: int) -> int:
        """Chunks in flight where microbatches go through the stages and back, or both ways."""
        if self.route is Route.BOTH_WAYS:
            return stages + 1
        return 2 * min(stages, microbatches) + (1 if self.pairs else 0)


def group_of(kind: ScheduleKind, stages: int, microbatches: int, virtual: int) -> int:
    """How many microbatches go through a chunk before the next chunk's turn.

    As many as there are stages, or the next larger number that leaves no group smaller than the stages over: Megatron's
    own rule (microbatches % group is 0 or >= stages), without which stages would wait for each other in a circle.
    """
    if kind.phased:
        return microbatches
    if kind.route is not Route.LOOP:
        return kind.route.copies
    if virtual == 1:
        return 1
    if microbatches <= stages:
        return microbatches
    legal = (n for n in range(stages, microbatches + 1) if not microbatches % n or microbatches % n >= stages)
    return next(legal)


def turns(kind: ScheduleKind, extent: Extent) -> Turns:
    """Group by group, in it chunk by chunk, in it microbatch by microbatch, the last group may be smaller; or, where
    chunks form no loop, chunk by chunk."""
    _, microbatches, virtual, group = extent
    if kind.route is not Route.LOOP:
        each = microbatches // kind.route.copies
        chunk, place = np.divmod(np.arange(each * virtual), each)
        microbatch = place if kind.route.copies == 1 else place + chunk * each
        return Turns(microbatch, chunk, chunk, np.full(len(chunk), each))
    turn = np.arange(microbatches * virtual)
    first = turn // (group * virtual) * group
    size = np.minimum(group, microbatches - first)
    chunk, place = np.divmod(turn - first * virtual, size)
    return Turns(first + place, chunk, virtual - 1 - chunk, size)


def by_turn(rule: ByTurn, split: bool = False) -> MomentsOf:
    """Moments of forwards and of backwards by stage and turn; split, weight gradients come as many backwards late as
    there are stages before."""

    def moments(extent: Extent) -> OperationMoments:
        turn, stage = np.arange(extent.microbatches * extent.virtual)[None, :], np.arange(extent.stages)[:, None]
        forward, backward = rule(stage, turn, extent)
        weight = rule(stage, turn + stage, extent)[1] + 1 if split else np.empty((extent.stages, 0), np.int64)
        size = forward.size
        return OperationMoments(forward, backward, weight, *np.arange(2 * size).reshape(2, *forward.shape))

    return moments


def one_forward_one_backward(stage: Ints, turn: Ints, extent: Extent) -> tuple[Ints, Ints]:
    """Forwards and backwards in turn, as early as the stages behind allow."""
    if extent.virtual > 1:
        return _interleaved(stage, turn, extent)
    return UNIT * (stage + 2 * turn), UNIT * (2 * extent.stages - 1 - stage + 2 * turn)


def _interleaved(stage: Ints, turn: Ints, extent: Extent) -> tuple[Ints, Ints]:
    """Ahead by 2 forwards for every stage behind, and by a group for every chunk but one."""
    stages, _, virtual, group = extent
    stretch = np.maximum(stages - group, 0) * (turn // group)  # fewer microbatches than stages: there is one group
    ahead = 2 * (stages - 1) + (virtual - 1) * max(stages, group)
    forward, backward = turn + stretch + stage, turn + stretch + ahead - stage
    return 2 * UNIT * forward, 2 * UNIT * backward + UNIT


def all_forwards_first(stage: Ints, turn: Ints, extent: Extent) -> tuple[Ints, Ints]:
    """All forwards, then all backwards."""
    stages, microbatches, virtual, _ = extent
    chunk, microbatch = np.divmod(turn, microbatches)
    wave = 2 * microbatch + 2 * max(microbatches, stages) * chunk
    last = 2 * max(microbatches, stages) * virtual + stages
    return UNIT * (stage + wave), UNIT * (last + stages - 1 - stage + wave)


TITAN = ("torchtitan", "torchtitan-eager")
SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "forwards and backwards in turn", by_turn(one_forward_one_backward), rendezvous=True,
                     chunks="one"),
        ScheduleKind("interleaved", "1f1b with several chunks a stage, as Megatron-Core",
                     by_turn(one_forward_one_backward), chunks="several"),
        ScheduleKind("gpipe", "all forwards, then all backwards", by_turn(all_forwards_first), phased=True,
                     rendezvous=True, searched=False),
        ScheduleKind("zero-bubble", "weight gradients fill waits (ZB-H1 of arXiv 2401.10241)",
                     by_turn(one_forward_one_backward, split=True), splits_backward=True),
        ScheduleKind("zb-v", "through the stages and back, weight gradients fill waits (ZB-V of arXiv 2401.10241)",
                     zero_bubble_v, Route.BACK, splits_backward=True, chunks="two", with_chunks="zb-v",
                     software=TITAN),
        ScheduleKind("dualpipev", "through the stages and back, forwards beside backwards (DualPipeV)",
                     dual_pipe_v, Route.BACK, splits_backward=True, pairs=True, least=2, chunks="two",
                     with_chunks="dualpipev", software=TITAN),
        ScheduleKind("dualpipe", "from both ends, forwards beside backwards, each stage twice (DualPipe)",
                     dual_pipe, Route.BOTH_WAYS, splits_backward=True, pairs=True, least=2, chunks="two",
                     with_chunks="dualpipe", software=("dualpipe",)),
    )
}  # fmt: skip
# Schedules that software has and presage does not: what to use instead.
INSTEAD = dict.fromkeys(("v-half", "v-min"), 'schedule = "zb-v", which holds more activations')
# Other names of those there are.
ALIASES = {"zbv": "zb-v", "zero-bubble-v": "zb-v", "zbvzerobubble": "zb-v", "zb-h1": "zero-bubble"}
ONE_CHUNK, SEVERAL_CHUNKS = "1f1b", "interleaved"  # what is run where a job names no schedule


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule of this name."""
    if name not in SCHEDULES:
        raise PresageError(unknown_schedule(name))
    return SCHEDULES[name]


def unknown_schedule(name: str) -> str:
    """Why a schedule is refused, and what to use."""
    instead = INSTEAD.get(name.lower())
    if instead:
        return f"schedule {name!r} is not modelled: use {instead}"
    return f"no pipeline schedule {name!r}: choose from {', '.join(SCHEDULES)}{near(name, SCHEDULES)}"


def schedule_name(name: str) -> str:
    """The name of a schedule, from it or from another that software has for it."""
    return ALIASES.get(name.lower(), name)


def default_schedule(virtual: int) -> str:
    """The schedule where none is named, for so many chunks of layers a stage."""
    return SEVERAL_CHUNKS if virtual > 1 else ONE_CHUNK
