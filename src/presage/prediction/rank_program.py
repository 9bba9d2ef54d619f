"""Many ranks in one program: each rank's lanes, and collectives as meetings of their streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Lane, Program, Timeline, simulate
from presage.errors import PresageError
from presage.parallel.rank_layout import FoldedRank
from presage.prediction.step import StepProgram
from presage.prediction.step_program import STREAM, StepTasks, edges, lanes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Member:
    """One rank that represents all identical ones, and its step."""

    fold: FoldedRank
    step: StepProgram

    @property
    def tasks(self) -> StepTasks:
        return self.step.tasks

    def with_seconds(self, seconds: Floats) -> Member:
        """The rank with other task times."""
        return replace(self, step=replace(self.step, tasks=replace(self.tasks, seconds=seconds)))

    def paced(self, speed: float, host: float) -> Member:
        """The rank with this GPU speed and host-time factor."""
        on = self.tasks.lane
        factor = np.where(on < STREAM, host, 1 / speed)
        factor[[task for task, _ in self.tasks.meetings]] = 1.0
        return self.with_seconds(self.tasks.seconds * factor)


@dataclass(frozen=True, eq=False)
class RankProgram:
    """Several steps of all members as one program; tasks by member, then step."""

    members: tuple[Member, ...]
    steps: int
    program: Program
    member: Ints  # of each task
    step: NDArray[np.int32]

    @property
    def seconds(self) -> Floats:
        """Seconds of every task at the usual pace."""
        return np.concatenate([np.tile(m.tasks.seconds, self.steps) for m in self.members])

    def timeline(self) -> Timeline:
        return simulate(self.program, self.seconds)

    def with_members(self, members: Sequence[Member]) -> RankProgram:
        """The program with other task times."""
        return replace(self, members=tuple(members))


def rank_program(members: Sequence[Member], steps: int) -> RankProgram:
    """Build the program of several steps of these ranks."""
    _check_meetings(members)
    sizes = [len(m.tasks) * steps for m in members]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int).tolist()
    names: dict[str, int] = {}
    all_lanes: list[Lane] = []
    lane, name, waits = [], [], []
    for start, m in zip(starts, members, strict=True):
        lane.append(np.tile(m.tasks.lane + len(all_lanes), steps))
        all_lanes += lanes(m.tasks, m.fold.rank)
        name.append(np.tile(_labels(m, names), steps))
        waits.append(edges(m.tasks, steps, m.step.host.calls).shifted(start))
    group = _meetings(members, starts, sum(sizes), steps)
    program = Program.of(
        all_lanes, np.concatenate(lane), Edges.joined(waits), group=group, name=np.concatenate(name), names=list(names)
    )
    member = np.repeat(np.arange(len(members)), sizes)
    step = np.concatenate([np.repeat(np.arange(steps, dtype=np.int32), len(m.tasks)) for m in members])
    return RankProgram(tuple(members), steps, program, member, step)


def _labels(m: Member, names: dict[str, int]) -> Ints:
    """Each task's name as a number in `names`, which grows."""
    of_op = [names.setdefault(op.name, len(names)) for op in m.step.graph.ops]
    of_op.append(names.setdefault("(host)", len(names)))
    return np.array(of_op)[m.tasks.op]


def _meetings(members: Sequence[Member], starts: Sequence[int], tasks: int, steps: int) -> Ints:
    """The collective that each task takes part in, by number, or -1; a communicator's collectives match in order."""
    group = np.full(tasks, -1, np.int64)
    number: dict[tuple[int, str, int, int], int] = {}
    for start, m in zip(starts, members, strict=True):
        for task, name, order in _ordered(m.tasks):
            for step in range(steps):
                key = m.fold.meets.get(name, -1), name, order, step
                group[start + step * len(m.tasks) + task] = number.setdefault(key, len(number))
    return group


def _ordered(tasks: StepTasks) -> Iterator[tuple[int, str, int]]:
    """Collectives with their place in their group's order."""
    seen: dict[str, int] = {}
    for task, name in tasks.meetings:
        yield task, name, seen.get(name, 0)
        seen[name] = seen.get(name, 0) + 1


def _check_meetings(members: Sequence[Member]) -> None:
    """Refuse ranks that call a communicator unequally often."""
    calls: dict[tuple[str, int], tuple[int, int]] = {}
    for m in members:
        for name in {name for _, name in m.tasks.meetings}:
            count, key = sum(n == name for _, n in m.tasks.meetings), (name, m.fold.meets.get(name, -1))
            other, rank = calls.setdefault(key, (count, m.fold.rank))
            if other != count:
                raise PresageError(
                    f"rank {m.fold.rank} has {count} collectives in {name} and rank {rank} has {other}: they would "
                    "wait for each other for ever"
                )
