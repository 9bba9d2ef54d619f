"""A Program: tasks on lanes, edges between them, meetings of several lanes. Structure only; durations come later.

A lane runs its tasks one after another, in the order they were added. An edge lets a task start no earlier than a
given delay after another task's end (or start). A meeting (a rendezvous, as of a collective) lets all its members start
when the last of them could, and gives them one common duration: the longest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine import recursion
from presage.errors import PresageError

__all__ = ["Builder", "Deadlock", "Edges", "Lane", "LaneKind", "Program"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Deadlock(PresageError):
    """The tasks wait for each other in a circle, as when two ranks call their collectives in different orders."""


class LaneKind(Enum):
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
        b, a, d, s = np.broadcast_arrays(before, after, delay, from_start)
        return Edges(b.astype(np.int32), a.astype(np.int32), d.astype(np.float64), s.astype(np.bool_))

    @staticmethod
    def none() -> Edges:
        return Edges.of([], [], [], [])

    def __add__(self, other: Edges) -> Edges:
        pairs = ((getattr(self, k), getattr(other, k)) for k in ("before", "after", "delay", "from_start"))
        return Edges(*(np.concatenate(pair) for pair in pairs))

    def __len__(self) -> int:
        return len(self.before)

    def shifted(self, tasks: int) -> Edges:
        return Edges(self.before + np.int32(tasks), self.after + np.int32(tasks), self.delay, self.from_start)


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
        on = np.ascontiguousarray(lane, np.int32)
        n = len(on)
        edges = edges or Edges.none()
        meet = np.full(n, -1, np.int32) if group is None else np.ascontiguousarray(group, np.int32)
        rel = np.zeros(n) if release is None else np.ascontiguousarray(release, np.float64)
        label = np.zeros(n, np.int32) if name is None else np.ascontiguousarray(name, np.int32)
        _check(tuple(lanes), on, edges, meet, rel)
        csr = _predecessors(n, edges + lane_order(on, np.array([x.gap for x in lanes])))
        order = recursion.topological_order(csr[0], csr[1], meet, int(meet.max(initial=-1)) + 1)
        if len(order) < n:
            raise Deadlock(_circle(n, order, on, lanes, label, names))
        return Program(tuple(lanes), on, edges, meet, rel, label, tuple(names), *csr, order)

    def label(self, task: int) -> str:
        return self.names[self.name[task]]

    @property
    def rank(self) -> Ints:
        """The rank each task runs on."""
        return np.array([x.rank for x in self.lanes], np.int32)[self.lane]

    def lanes_of(self, kind: LaneKind, rank: int | None = None) -> list[int]:
        return [i for i, x in enumerate(self.lanes) if x.kind is kind and rank in (None, x.rank)]


def lane_order(lane: Ints, gap: Floats) -> Edges:
    """The edges that make every lane a queue."""
    by_lane = np.argsort(lane, kind="stable").astype(np.int32)
    before, after = by_lane[:-1], by_lane[1:]
    same = lane[before] == lane[after]
    return Edges.of(before[same], after[same], gap[lane[after[same]]], False)


def _predecessors(n: int, edges: Edges) -> tuple[NDArray[np.int64], Ints, Floats, NDArray[np.bool_]]:
    by_task = np.argsort(edges.after, kind="stable")
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(edges.after, minlength=n), out=ptr[1:])
    return ptr, edges.before[by_task], edges.delay[by_task], edges.from_start[by_task]


def _check(lanes: tuple[Lane, ...], lane: Ints, edges: Edges, group: Ints, release: Floats) -> None:
    n = len(lane)
    if n and not (0 <= lane.min() and lane.max() < len(lanes)):
        raise ValueError(f"a task names lane {lane.max()}, but there are {len(lanes)} lanes")
    if len(group) != n or len(release) != n:
        raise ValueError(f"{n} tasks, but {len(group)} group and {len(release)} release entries")
    ends = np.concatenate([edges.before, edges.after])
    if len(ends) and not (0 <= ends.min() and ends.max() < n):
        raise ValueError(f"an edge names task {ends.max()}, but there are {n} tasks")
    if not (np.isfinite(edges.delay).all() and np.isfinite(release).all()):
        raise ValueError("a delay or a release time is not a finite number")
    if (release < 0).any():
        raise ValueError(f"negative release time {release.min()}")


def _circle(
    n: int, order: Ints, lane: Ints, lanes: Sequence[Lane], name: Ints, names: Sequence[str], show: int = 4
) -> str:
    stuck = np.setdiff1d(np.arange(n), order)
    first = [stuck[lane[stuck] == i][0] for i in np.unique(lane[stuck])][:show]
    heads = ", ".join(f"{names[name[t]] or f'task {t}'} on {lanes[lane[t]].name}" for t in first)
    return f"{len(stuck)} tasks wait for each other in a circle; the first on each lane: {heads}"


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

    def task(
        self, lane: int, duration: float, name: str = "", after: Iterable[int] = (), release: float = 0.0
    ) -> int:
        """Add a task at the end of a lane; `after` are tasks that must have ended before."""
        t = len(self._lane)
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
