"""A Program: tasks on lanes, edges between them, meetings of several lanes. Structure only; durations come later.

A lane runs its tasks one after another, in the order they were added. An edge lets a task start no earlier than a
given delay after another task's end (or start). A meeting (a rendezvous, as of a collective) lets all its members start
when the last of them could, and gives them one common duration: the longest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.order import Deadlock, describe_circle, find_circle, memory_slots, predecessors, topological_order
from presage.engine.recursion import Wiring

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class LaneKind(Enum):
    """What a lane does: a host's thread, a stream of kernels, or one of transfers."""

    HOST = "host"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Lane:
    """Something that does one task at a time: a host thread, a GPU stream, a pipeline stage."""

    name: str
    rank: int = 0
    kind: LaneKind = LaneKind.COMPUTE
    gap: float = 0.0  # least seconds between one task's end and the next one's start


@dataclass(frozen=True, eq=False)
class Edges:
    """`after[i]` starts no earlier than `delay[i]` seconds after the end (or the start) of `before[i]`."""

    before: Ints
    after: Ints
    delay: Floats
    from_start: NDArray[np.bool_]

    @staticmethod
    def of(before: ArrayLike, after: ArrayLike, delay: ArrayLike = 0.0, from_start: ArrayLike = False) -> Edges:
        b, a, d, s = np.broadcast_arrays(*map(np.atleast_1d, (before, after, delay, from_start)))
        return Edges(as_indices(b, "task"), as_indices(a, "task"), d.astype(np.float64), s.astype(np.bool_))

    @staticmethod
    def none() -> Edges:
        return Edges.of([], [], [], [])

    def __add__(self, other: Edges) -> Edges:
        return Edges.joined([self, other])

    @staticmethod
    def joined(parts: Sequence[Edges]) -> Edges:
        """Concatenation of many sets of edges, faster than adding them one by one."""
        columns = ([getattr(e, k) for e in parts] for k in ("before", "after", "delay", "from_start"))
        return Edges(*(np.concatenate(c) for c in columns)) if parts else Edges.none()

    def __len__(self) -> int:
        return len(self.before)

    def shifted(self, tasks: int, after: int | None = None) -> Edges:
        """The same edges between tasks `tasks` further on; `after`, where it differs, shifts where they lead to."""
        to = np.int32(tasks if after is None else after)
        return Edges(self.before + np.int32(tasks), self.after + to, self.delay, self.from_start)


@dataclass(frozen=True, eq=False)
class Program:
    """What is to be done, in what order. Build one with `Builder`, or from arrays with `Program.of`."""

    lanes: tuple[Lane, ...]
    lane: Ints
    edges: Edges
    group: Ints  # the meeting a task belongs to, or -1
    release: Floats  # no task starts before its release
    name: Ints  # index into `names`
    names: tuple[str, ...]
    # derived: predecessors by task (lane order included), and an order in which every predecessor comes first
    ptr: NDArray[np.int64] = field(repr=False)
    pred: Ints = field(repr=False)
    delay: Floats = field(repr=False)
    from_start: NDArray[np.bool_] = field(repr=False)
    order: Ints = field(repr=False)

    def __len__(self) -> int:
        return len(self.lane)

    @staticmethod
    def of(
        lanes: Sequence[Lane],
        lane: ArrayLike,
        edges: Edges | None = None,
        *,
        group: ArrayLike | None = None,
        release: ArrayLike | None = None,
        name: ArrayLike | None = None,
        names: Sequence[str] = ("",),
    ) -> Program:
        on = as_indices(lane, "lane")
        n = len(on)
        edges = edges or Edges.none()
        meet = np.full(n, -1, np.int32) if group is None else _meetings(group)
        rel = np.zeros(n) if release is None else np.array(release, np.float64, ndmin=1)
        label = np.zeros(n, np.int32) if name is None else as_indices(name, "name")
        _check_tasks(tuple(lanes), on, meet, rel, label, names)
        _check_edges(n, edges)
        csr = _predecessors(lanes, on, edges)
        order = topological_order(csr[0], csr[1], meet, int(meet.max(initial=-1)) + 1)
        program = Program(tuple(lanes), on, edges, meet, rel, label, tuple(names), *csr, order)
        if len(order) < n:
            circle = find_circle(order, meet, csr[0], csr[1])
            raise Deadlock(describe_circle(circle, n - len(order), program._place), circle)
        return program

    def label(self, task: int) -> str:
        return self.names[int(self.name[task])]

    def _place(self, task: int) -> str:
        return f"{self.label(task) or f'task {task}'} on {self.lanes[self.lane[task]].name}"

    @cached_property
    def wiring(self) -> Wiring:
        """Who waits for whom, as the recursion takes it."""
        return Wiring(self.order, self.group, self.ptr, self.pred, self.delay, self.from_start, self.release)

    @cached_property
    def slots(self) -> tuple[Ints, int]:
        """Where a pass that keeps no timeline holds each task's times, and how many such places there are."""
        return memory_slots(self.order, self.group, self.ptr, self.pred)

    @property
    def rank(self) -> Ints:
        """The rank each task runs on."""
        return np.array([x.rank for x in self.lanes], np.int32)[self.lane]

    def lanes_of(self, kind: LaneKind, rank: int | None = None) -> list[int]:
        return [i for i, x in enumerate(self.lanes) if x.kind is kind and rank in (None, x.rank)]


def as_indices(values: ArrayLike, what: str) -> Ints:
    """Indices as int32, or an error that names the one that is no index: a silent wrap would run another task."""
    given = np.atleast_1d(values)
    if given.dtype.kind not in "iub" and given.size:
        bad = given[given != np.floor(given)] if given.dtype.kind == "f" else given
        if bad.size:
            raise ValueError(f"a {what} is a whole number, not {bad[0]!r}")
    if given.dtype != np.int32 and given.size and (abs(int(given.min())) >> 31 or abs(int(given.max())) >> 31):
        raise ValueError(f"a {what} is out of range: {max(given.min(), given.max(), key=abs)}")
    return given.astype(np.int32)


def _meetings(group: ArrayLike) -> Ints:
    """Meeting ids, renumbered where they are too sparse to count by."""
    given = np.atleast_1d(group)
    if given.size and given.max() >= len(given):
        _, index = np.unique(np.maximum(given, -1), return_inverse=True)
        given = index.reshape(-1) - int(given.min() < 0)
    return np.maximum(as_indices(given, "meeting"), np.int32(-1))


def _predecessors(
    lanes: Sequence[Lane], lane: Ints, edges: Edges
) -> tuple[NDArray[np.int64], Ints, Floats, NDArray[np.bool_]]:
    gap = np.array([x.gap for x in lanes], np.float64)
    before, after = (np.ascontiguousarray(x, np.int32) for x in (edges.before, edges.after))
    delay, from_start = np.ascontiguousarray(edges.delay, np.float64), np.ascontiguousarray(edges.from_start, np.bool_)
    return predecessors(lane, gap, before, after, delay, from_start)


def _check_tasks(
    lanes: tuple[Lane, ...], lane: Ints, group: Ints, release: Floats, name: Ints, names: Sequence[str]
) -> None:
    n = len(lane)
    for what, column in (("meeting", group), ("release", release), ("name", name)):
        if column.shape != (n,):
            raise ValueError(f"{n} tasks, but {what} entries of shape {column.shape}")
    for what, column, count in (("lane", lane, len(lanes)), ("name", name, len(names))):
        if (bad := _outside(column, count)) is not None:
            raise ValueError(f"a task has {what} {bad}, but there are {count} {what}s")
    for x in lanes:
        if not 0 <= x.gap < np.inf:
            raise ValueError(f"lane {x.name!r} has gap {x.gap}: not a number of seconds from 0 on")
    if n and not (release.min() >= 0 and release.max() < np.inf):
        bad_release = release[~((release >= 0) & (release < np.inf))][0]
        raise ValueError(f"release time {bad_release}: not a number of seconds from 0 on")


def _check_edges(n: int, edges: Edges) -> None:
    shapes = {np.shape(x) for x in (edges.before, edges.after, edges.delay, edges.from_start)}
    if shapes != {(len(edges.before),)}:
        raise ValueError(f"edges with columns of different shapes: {sorted(shapes)}")
    for ends in (edges.before, edges.after):
        if (bad := _outside(ends, n)) is not None:
            raise ValueError(f"an edge names task {bad}, but there are {n} tasks")
    if len(edges) and not np.isfinite(edges.delay).all():
        raise ValueError(f"an edge has delay {edges.delay[~np.isfinite(edges.delay)][0]}")


def _outside(index: Ints, count: int) -> int | None:
    """An index that is not one of 0..count-1."""
    if not len(index) or (index.min() >= 0 and index.max() < count):
        return None
    return int(index.min() if index.min() < 0 else index.max())


class Builder:
    """Collects tasks one by one; `build()` gives the Program and `durations` the seconds that were given."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._lane: list[int] = []
        self._duration: list[float] = []
        self._release: list[float] = []
        self._name: list[int] = []
        self._names: dict[str, int] = {}
        self._edges: list[tuple[int, int, float, bool]] = []
        self._group: list[int] = []
        self._groups = 0

    def lane(self, name: str, rank: int = 0, kind: LaneKind = LaneKind.COMPUTE, gap: float = 0.0) -> int:
        self.lanes.append(Lane(name, rank, kind, gap))
        return len(self.lanes) - 1

    def task(self, lane: int, duration: float, name: str = "", after: Iterable[int] = (), release: float = 0.0) -> int:
        """Add a task at the end of a lane; `after` are tasks that must have ended before."""
        t = len(self._lane)
        if not 0 <= lane < len(self.lanes):
            raise ValueError(f"no lane {lane}: there are {len(self.lanes)}")
        if not 0 <= duration < np.inf:
            raise ValueError(f"duration {duration}: not a number of seconds from 0 on")
        self._lane.append(lane)
        self._duration.append(duration)
        self._release.append(release)
        self._name.append(self._names.setdefault(name, len(self._names)))
        self._group.append(-1)
        for before in after:
            self.edge(before, t)
        return t

    def edge(self, before: int, after: int, delay: float = 0.0, from_start: bool = False) -> None:
        self._edges.append((before, after, delay, from_start))

    def meet(self, tasks: Iterable[int]) -> None:
        """These tasks start together, when the last of them can, and share one duration."""
        for t in tasks:
            if not 0 <= t < len(self):
                raise ValueError(f"no task {t} to meet: there are {len(self)}")
            if self._group[t] not in (-1, self._groups):
                raise ValueError(f"task {t} is in a meeting already")
            self._group[t] = self._groups
        self._groups += 1

    def __len__(self) -> int:
        return len(self._lane)

    @property
    def durations(self) -> Floats:
        return np.array(self._duration, np.float64)

    def build(self) -> Program:
        columns: list[Any] = [list(c) for c in zip(*self._edges, strict=True)] or [[], [], [], []]
        return Program.of(
            self.lanes,
            np.array(self._lane, np.int32),
            Edges.of(*columns),
            group=np.array(self._group, np.int32),
            release=np.array(self._release, np.float64),
            name=np.array(self._name, np.int32),
            names=list(self._names) or [""],
        )
