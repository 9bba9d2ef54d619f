"""The pipeline schedules there are: in which order each stage runs the microbatches' operations. No times.

An operation is F (forward), B (backward, or its input-gradient part) or W (its weight-gradient part) of one microbatch
through one chunk of layers. Every operation has a `moment`, an integer: operations of a stage run in the order of their
moments, and whatever an operation waits for has a smaller one. Moments are the times of a schedule whose operations
all take equally long.

A new schedule is one entry of `SCHEDULES`; nothing else asks for a schedule by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError, near

Ints = NDArray[np.int64]
WHAT = "FBW"
UNIT = 4  # between two operations of a stage; what comes between them (weight gradients, messages) has room


@dataclass(frozen=True, eq=False)
class Turns:
    """The order in which forwards go through a stage. Backwards take the same turns, with the chunks the other way."""

    microbatch: Ints
    chunk: Ints
    back: Ints  # how many turns ago the same microbatch went through the chunk before


@dataclass(frozen=True, eq=False)
class OperationMoments:
    """Moments by [stage, turn]; `weight` is empty where backwards are not split."""

    forward: Ints
    backward: Ints
    weight: Ints


class Extent(NamedTuple):
    """How large a pipeline's step is: stages, microbatches, chunks a stage, microbatches that go through a chunk before
    the next chunk's turn."""

    stages: int
    microbatches: int
    virtual: int
    group: int


MomentsOf = Callable[[Ints, Ints, Extent], tuple[Ints, Ints]]


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule: its word in job files, and what the rest of the package asks about it."""

    name: str
    about: str
    moments: MomentsOf  # of forwards and of backwards, by stage and turn
    splits_backward: bool = False  # weight gradients are operations of their own, and fill waits
    ahead: int = 1  # forwards that the first stage runs before its first backward, times the number of stages
    phased: bool = False  # all forwards come before all backwards, so all activations are held at once
    rendezvous: bool = False  # a stage whose sends do not overlap with compute waits for the receiver
    chunks: str = "any"  # of layers on each stage: one, several, any
    with_chunks: str = "interleaved"  # the schedule that is run where stages have several chunks
    searched: bool = True  # tried by a search for plans

    @property
    def interleaved(self) -> bool:
        """Whether each stage must have several chunks of layers."""
        return self.chunks == "several"

    def in_flight(self, stage: int, extent: Extent) -> int:
        """Chunks of a stage whose forward pass is done and whose backward pass is not, at most.

        Interleaved as Megatron-Core warms up: two for every later stage, and all chunks but the last of `stages`
        microbatches.
        """
        stages, microbatches, virtual, _ = extent
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

    def weight_moments(self, stage: Ints, turn: Ints, extent: Extent) -> Ints:
        """Moments of weight gradients: as many backwards late as there are stages before; none if not split."""
        if not self.splits_backward:
            return np.empty((len(stage), 0), np.int64)
        return self.moments(stage, turn + stage, extent)[1] + 1


def group_of(kind: ScheduleKind, stages: int, microbatches: int, virtual: int) -> int:
    """How many microbatches go through a chunk before the next chunk's turn.

    As many as there are stages, or the next larger number that leaves no group smaller than the stages over: Megatron's
    own rule (microbatches % group is 0 or >= stages), without which stages would wait for each other in a circle.
    """
    if kind.phased:
        return microbatches
    if virtual == 1:
        return 1
    if microbatches <= stages:
        return microbatches
    legal = (n for n in range(stages, microbatches + 1) if not microbatches % n or microbatches % n >= stages)
    return next(legal)


def turns(microbatches: int, virtual: int, group: int) -> Turns:
    """Group by group, in it chunk by chunk, in it microbatch by microbatch; the last group may be smaller."""
    turn = np.arange(microbatches * virtual)
    first = turn // (group * virtual) * group
    size = np.minimum(group, microbatches - first)
    chunk, place = np.divmod(turn - first * virtual, size)
    return Turns(first + place, chunk, size)


def moments(kind: ScheduleKind, extent: Extent) -> OperationMoments:
    """The moment of every operation."""
    turn, stage = np.arange(extent.microbatches * extent.virtual)[None, :], np.arange(extent.stages)[:, None]
    forward, backward = kind.moments(stage, turn, extent)
    return OperationMoments(forward, backward, kind.weight_moments(stage, turn, extent))


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


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "forwards and backwards in turn", one_forward_one_backward, rendezvous=True, chunks="one"),
        ScheduleKind("interleaved", "1f1b with several chunks a stage, as Megatron-Core", one_forward_one_backward,
                     chunks="several"),
        ScheduleKind("gpipe", "all forwards, then all backwards", all_forwards_first, phased=True, rendezvous=True,
                     searched=False),
        ScheduleKind("zero-bubble", "weight gradients fill waits (ZB-H1 of arXiv 2401.10241)",
                     one_forward_one_backward, splits_backward=True),
    )
}  # fmt: skip
# Schedules that software has and presage does not: what to use instead.
BACK_AND_FORTH = ("zb-v", "zbv", "zero-bubble-v", "v-half", "v-min")
INSTEAD = dict.fromkeys(BACK_AND_FORTH, 'schedule = "zero-bubble", whose bubble is larger')
INSTEAD |= dict.fromkeys(("dualpipe", "dualpipev"), 'schedule = "zero-bubble" with experts = true in [overlap]')
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
        return f"schedule {name!r} is not modelled (its chunks run through the stages and back): use {instead}"
    return f"no pipeline schedule {name!r}: choose from {', '.join(SCHEDULES)}{near(name, SCHEDULES)}"


def default_schedule(virtual: int) -> str:
    """The schedule where none is named, for so many chunks of layers a stage."""
    return SEVERAL_CHUNKS if virtual > 1 else ONE_CHUNK
