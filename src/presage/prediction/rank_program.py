"""Many ranks in one program: each rank's lanes, and collectives as meetings of their streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.engine import Deadlock, Edges, Lane, Program, Timeline, simulate
from presage.errors import PresageError
from presage.graph.work import collective, collective_bytes
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
    of_task, waiting = np.concatenate(name), Edges.joined(waits)
    try:
        program = Program.of(all_lanes, np.concatenate(lane), waiting, group=group, name=of_task, names=list(names))
    except Deadlock as e:
        raise _orders_differ(e, members, starts) or e from e
    member = np.repeat(np.arange(len(members)), sizes)
    step = np.concatenate([np.repeat(np.arange(steps, dtype=np.int32), len(m.tasks)) for m in members])
    return RankProgram(tuple(members), steps, program, member, step)


def _orders_differ(e: Deadlock, members: Sequence[Member], starts: Sequence[int]) -> PresageError | None:
    """The calls of a circle in which ranks wait for each other, with their lines."""
    calls = []
    for task in e.tasks:
        k = int(np.searchsorted(starts, task, "right")) - 1
        m = members[k]
        at = (task - starts[k]) % len(m.tasks)
        group = dict(m.tasks.meetings).get(at)
        if group is not None:
            kind, line = _described(m, int(m.tasks.op[at]))
            calls.append(f"rank {m.fold.rank} waits in {kind} in {group} ({line})")
    if len(set(calls)) < 2:
        return None
    listed = "; ".join(list(dict.fromkeys(calls))[:4])
    return PresageError(
        f"deadlock: {listed}: the ranks call them in different orders, and would wait for each other for ever"
    )


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
    """Refuse ranks whose collectives in a communicator do not match: they would wait for each other for ever."""
    calls: dict[tuple[str, int], tuple[list[int], Member]] = {}
    for m in members:
        by_group: dict[str, list[int]] = {}
        for task, name in m.tasks.meetings:
            by_group.setdefault(name, []).append(int(m.tasks.op[task]))
        for name in by_group:
            mine, key = by_group[name], (name, m.fold.meets.get(name, -1))
            theirs, other = calls.setdefault(key, (mine, m))
            if other is not m:
                _check_order(name, (m, mine), (other, theirs))


def _check_order(name: str, one: tuple[Member, list[int]], two: tuple[Member, list[int]]) -> None:
    """Refuse two ranks of a communicator that call it differently often, or for different things."""
    (m, mine), (other, theirs) = one, two
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        first, second = _described(m, a), _described(other, b)
        if first[0] != second[0]:
            raise PresageError(
                f"deadlock: call {i + 1} in {name} is {first[0]} on rank {m.fold.rank} ({first[1]}) and {second[0]} on "
                f"rank {other.fold.rank} ({second[1]}): they would wait for each other for ever"
            )
    if len(mine) != len(theirs):
        longer, ops = (m, mine) if len(mine) > len(theirs) else (other, theirs)
        extra = _described(longer, ops[min(len(mine), len(theirs))])
        raise PresageError(
            f"deadlock: rank {m.fold.rank} has {len(mine)} collectives in {name} and rank {other.fold.rank} has "
            f"{len(theirs)}, of which {extra[0]} of rank {longer.fold.rank} ({extra[1]}) has no match: they would wait "
            "for each other for ever"
        )


def _described(m: Member, op: int) -> tuple[str, str]:
    """What a rank calls, as far as others must do the same, and where."""
    graph = m.step.graph
    found, kind = graph.ops[op], collective(graph.ops[op])
    size = "" if kind in (None, "all_to_all") else f" of {collective_bytes(graph, found):,} bytes"
    return f"{kind}{size}", found.line or found.module or "no line known"
