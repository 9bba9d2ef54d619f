"""`simulate(program, durations) -> Timeline`: when every task starts and ends, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine import recursion
from presage.engine.durations import Durations
from presage.engine.intervals import length, subtract, union
from presage.engine.program import LaneKind, Program

__all__ = ["LaneUse", "Timeline", "finish_times", "simulate"]

Floats = NDArray[np.float64]

# Draws per pass of the recursion: wide enough to fill vector registers, narrow enough that a pass of a large
# program stays in memory.
WIDTH = 256


@dataclass(frozen=True)
class LaneUse:
    """Seconds of a lane's span: working, waiting inside meetings for others, and empty."""

    busy: float
    wait: float
    idle: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every task, in seconds; with draws, one column a draw."""

    program: Program
    start: Floats
    end: Floats

    @property
    def finish(self) -> float | Floats:
        """When the last task ends: a number, or one per draw."""
        if not len(self.program):
            return 0.0 if self.end.ndim == 1 else np.zeros(self.end.shape[1])
        last = self.end.max(axis=0)
        return float(last) if self.end.ndim == 1 else last

    def draw(self, j: int) -> Timeline:
        """The timeline of one draw."""
        return self if self.start.ndim == 1 else Timeline(self.program, self.start[:, j], self.end[:, j])

    @cached_property
    def ready(self) -> Floats:
        """When each task could have started by itself: `start - ready` is the wait for the others of its meeting."""
        p, out = self.program, np.broadcast_to(self.program.release, self.start.T.shape).T.copy()
        if len(p.pred):
            flag = p.from_start if self.start.ndim == 1 else p.from_start[:, None]
            delay = p.delay if self.start.ndim == 1 else p.delay[:, None]
            offered = np.where(flag, self.start[p.pred], self.end[p.pred]) + delay
            has = np.flatnonzero(np.diff(p.ptr))
            out[has] = np.maximum(out[has], np.maximum.reduceat(offered, p.ptr[:-1][has], axis=0))
        return out

    @property
    def wait(self) -> Floats:
        """Seconds each task waits in its meeting for the last member."""
        return self.start - self.ready

    @cached_property
    def slack(self) -> Floats:
        """Seconds each task's end may slip before the finish does (one-draw timelines)."""
        self._one_draw("slack")
        p = self.program
        latest = np.full(len(p), self.finish)
        recursion.backward(p.order, p.group, p.ptr, p.pred, p.delay, p.from_start, self.end - self.start, latest)
        return latest - self.end

    @cached_property
    def critical_path(self) -> NDArray[np.int64]:
        """The chain of tasks that sets the finish, first to last (one-draw timelines)."""
        self._one_draw("critical path")
        if not len(self.program):
            return np.empty(0, np.int64)
        path = [int(self.end.argmax())]
        while (before := self._holder(path[-1])) >= 0:
            path.append(before)
        return np.array(path[::-1], np.int64)

    def _holder(self, task: int) -> int:
        """The task whose end (or start) set this task's start, or -1 if its release did."""
        p = self.program
        if p.group[task] >= 0:
            members = self._members[p.group[task]]
            task = int(members[self.ready[members].argmax()])
        lo, hi = p.ptr[task], p.ptr[task + 1]
        if lo == hi:
            return -1
        before = p.pred[lo:hi]
        offered = np.where(p.from_start[lo:hi], self.start[before], self.end[before]) + p.delay[lo:hi]
        best = int(offered.argmax())
        return int(before[best]) if offered[best] >= p.release[task] else -1

    @cached_property
    def _members(self) -> dict[int, NDArray[np.int64]]:
        grouped = np.flatnonzero(self.program.group >= 0)
        by_group = grouped[np.argsort(self.program.group[grouped], kind="stable")]
        ids, first = np.unique(self.program.group[by_group], return_index=True)
        return dict(zip(ids.tolist(), np.split(by_group, first[1:]), strict=True)) if len(ids) else {}

    def lane_use(self) -> list[LaneUse]:
        """How each lane spends the time from 0 to the finish (one-draw timelines)."""
        self._one_draw("lane use")
        n, on = len(self.program.lanes), self.program.lane
        busy = np.bincount(on, self.end - self.start, n)
        wait = np.bincount(on, self.wait, n)
        span = float(np.max(self.finish))
        return [LaneUse(float(b), float(w), float(span - b - w)) for b, w in zip(busy, wait, strict=True)]

    def exposed_communication(self, rank: int) -> tuple[float, float]:
        """Seconds in which this rank only (transfers, waits for others) with no compute running beside it."""
        self._one_draw("exposed communication")
        p = self.program
        comm = np.isin(p.lane, p.lanes_of(LaneKind.COMMUNICATION, rank))
        work = np.isin(p.lane, p.lanes_of(LaneKind.COMPUTE, rank))
        compute = union(self.start[work], self.end[work])
        transfer = subtract(union(self.start[comm], self.end[comm]), compute)
        both = subtract(union(self.ready[comm], self.end[comm]), compute)
        return length(transfer), length(both) - length(transfer)

    def _one_draw(self, what: str) -> None:
        if self.start.ndim != 1:
            raise ValueError(f"{what} is of one draw: take .draw(j) first")


def simulate(program: Program, durations: ArrayLike | Durations) -> Timeline:
    """Run the recursion: every task starts when its lane, its edges, its release and its meeting allow."""
    d = _matching(program, durations)
    start = np.empty((len(program), d.count))
    end = np.empty_like(start)
    for lo in range(0, d.count, WIDTH):
        hi = min(lo + WIDTH, d.count)
        s, e = np.empty((len(program), hi - lo)), np.empty((len(program), hi - lo))
        _pass(program, d, lo, s, e)
        start[:, lo:hi], end[:, lo:hi] = s, e
    if not len(d.draws):
        return Timeline(program, start[:, 0], end[:, 0])
    return Timeline(program, start, end)


def finish_times(program: Program, durations: ArrayLike | Durations, tasks: ArrayLike | None = None) -> Floats:
    """Ends of some tasks (or the finish of all) over all draws, in memory that does not grow with the draws."""
    d = _matching(program, durations)
    wanted = None if tasks is None else np.asarray(tasks, np.int64)
    out = np.empty((1 if wanted is None else len(wanted), d.count))
    for lo in range(0, d.count, WIDTH):
        hi = min(lo + WIDTH, d.count)
        s, e = np.empty((len(program), hi - lo)), np.empty((len(program), hi - lo))
        _pass(program, d, lo, s, e)
        out[:, lo:hi] = e.max(axis=0) if wanted is None else e[wanted]
    return out[0] if wanted is None else out


def _matching(program: Program, durations: ArrayLike | Durations) -> Durations:
    d = Durations.of(durations)
    if len(d) != len(program):
        raise ValueError(f"{len(program)} tasks, but {len(d)} durations")
    return d


def _pass(program: Program, d: Durations, first: int, start: Floats, end: Floats) -> None:
    p = program
    recursion.forward(
        p.order, p.group, p.ptr, p.pred, p.delay, p.from_start, p.release, d.base, d.row, d.draws, first, start, end
    )
