"""`simulate(program, durations) -> Timeline`: when every task starts and ends, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine import recursion
from presage.engine.durations import Durations
from presage.engine.program import Edges, LaneKind, Program, as_indices

Floats = NDArray[np.float64]

# A pass over many draws is fastest when its rows stay in the cache and each is long enough to fill vector registers
# and to pay for the walk over the graph: the best of 1 to 64 MiB on programs with 80 to 25,000 rows in use at a time.
PASS_BYTES = 8 << 20
WIDEST, NARROWEST = 512, 32


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
        if self.start.ndim == 1:
            return self
        return Timeline(self.program, self.start[:, j].copy(), self.end[:, j].copy())

    @cached_property
    def ready(self) -> Floats:
        """When each task could have started by itself: `start - ready` is the wait for the others of its meeting."""
        ready = np.empty_like(self.start)
        shape = (len(self.program), self.start.size // max(len(self.program), 1))
        recursion.ready_times(self.program.wiring, *(x.reshape(shape) for x in (self.start, self.end, ready)))
        return ready

    @property
    def wait(self) -> Floats:
        """Seconds each task waits in its meeting for the last member."""
        return self.start - self.ready

    @cached_property
    def slack(self) -> Floats:
        """Seconds each task may slip, start and end, before the finish does (one-draw timelines)."""
        self._one_draw("slack")
        slack = np.asarray(self.finish - self.end)
        recursion.backward(self.program.wiring, self.start, self.end, slack)
        return slack

    @cached_property
    def critical_path(self) -> NDArray[np.int64]:
        """The chain of tasks that sets the finish, first to last; of a meeting, the member that was ready last.

        Each but the first starts when the one before it (or a mate of its meeting) lets it: one-draw timelines only.
        """
        self._one_draw("critical path")
        return self.path_to(int(self.end.argmax())) if len(self.program) else np.empty(0, np.int64)

    def path_to(self, task: int) -> NDArray[np.int64]:
        """The chain of tasks that sets when one of them ends, first to last."""
        self._one_draw("critical path")
        path = recursion.chain(self.program.wiring, self.start, self.end, task)
        return np.asarray(path[::-1], np.int64)

    def lane_use(self) -> list[LaneUse]:
        """How each lane spends the time from 0 to the finish (one-draw timelines)."""
        self._one_draw("lane use")
        n, on = len(self.program.lanes), self.program.lane
        busy = np.bincount(on, self.end - self.start, n)
        wait = np.bincount(on, self.wait, n)
        idle = np.maximum(self.finish - busy - wait, 0.0)  # a full lane may be over by a rounding
        return [LaneUse(*map(float, use)) for use in zip(busy, wait, idle, strict=True)]

    def exposed_communication(self, rank: int, window: tuple[float, float] | None = None) -> tuple[float, float]:
        """Exposed communication of a rank: seconds of (transfers, waits for others) without concurrent compute."""
        transfer, both = (self._outside(begin, rank, window) for begin in (self.start, self.ready))
        return transfer, both - transfer

    def _outside(self, begin: Floats, rank: int, window: tuple[float, float] | None) -> float:
        """Seconds from `begin` to the end of a rank's communication, without those of its compute."""
        comm, work = (self.spans(kind, rank) for kind in (LaneKind.COMMUNICATION, LaneKind.COMPUTE))
        alone = subtract(union(begin[comm], self.end[comm]), union(self.start[work], self.end[work]))
        return length(alone if window is None else intersect(alone, np.array([window])))

    def spans(self, kind: LaneKind, rank: int) -> NDArray[np.bool_]:
        """Which tasks are on a rank's lanes of this kind."""
        self._one_draw("a rank's share")
        return np.isin(self.program.lane, self.program.lanes_of(kind, rank))

    def _one_draw(self, what: str) -> None:
        if self.start.ndim != 1:
            raise ValueError(f"{what} is of one draw: take .draw(j) first")


def simulate(program: Program, durations: ArrayLike | Durations) -> Timeline:
    """Run the recursion: every task starts when its lane, its edges, its release and its meeting allow."""
    d, n = _matching(program, durations), len(program)
    if d.count == 1 and not len(d.draws):
        alone = Timeline(program, np.empty(n), np.empty(n))
        recursion.forward_one(program.wiring, d.base, alone.start, alone.end)
        return alone
    all_draws = Timeline(program, np.empty((n, d.count)), np.empty((n, d.count)))
    own, nowhere = np.arange(n, dtype=np.int32), np.full(n, -1, np.int32)
    times = (own, all_draws.start, all_draws.end, nowhere, np.empty((0, d.count)))
    recursion.forward(program.wiring, d.seconds, 0, d.count, *times)
    return all_draws


def finish_times(program: Program, durations: ArrayLike | Durations, tasks: ArrayLike | None = None) -> Floats:
    """Ends of some tasks (or the finish of all) over all draws, in memory that does not grow with the draws."""
    n = len(program)
    if tasks is None:
        return latest_ends(program, durations, np.zeros(n, np.int32), 1).reshape(-1)
    wanted = as_indices(tasks, "task")
    if len(wanted) and not (wanted.min() >= 0 and wanted.max() < n):
        raise ValueError(f"no task {wanted.min() if wanted.min() < 0 else wanted.max()}: there are {n}")
    distinct, place = np.unique(wanted, return_inverse=True)
    part = np.full(n, -1, np.int32)
    part[distinct] = np.arange(len(distinct))
    return latest_ends(program, durations, part, len(distinct))[place.reshape(-1)]


def latest_ends(program: Program, durations: ArrayLike | Durations, part: NDArray[np.int32], parts: int) -> Floats:
    """The latest end among the tasks of each part (a rank, a step), over all draws: (parts, draws).

    Nothing of tasks x draws is held, only rows that are still waited for. A negative part counts nowhere.
    """
    d = _matching(program, durations)
    _check_parts(len(program), part, parts)
    slot, used = program.slots
    width = _width(used, d.count)
    start, end = np.empty((2, used, width))
    latest = np.zeros((parts, d.count))
    for first in range(0, d.count, width):
        step = min(width, d.count - first)
        recursion.forward(program.wiring, d.seconds, first, step, slot, start, end, part, latest)
    return latest


def _check_parts(tasks: int, part: NDArray[np.int32], parts: int) -> None:
    if part.shape != (tasks,):
        raise ValueError(f"{tasks} tasks, but parts of shape {part.shape}")
    if tasks and part.max() >= parts:
        raise ValueError(f"a task is in part {part.max()} of {parts}")


def _width(rows: int, draws: int) -> int:
    """Draws per pass: as many as fit, in passes of about one size."""
    most = min(max(PASS_BYTES // (16 * max(rows, 1)), NARROWEST), WIDEST)
    passes = -(-draws // most)
    return -(-draws // passes)


def _matching(program: Program, durations: ArrayLike | Durations) -> Durations:
    d = Durations.of(durations)
    if len(d) != len(program):
        raise ValueError(f"{len(program)} tasks, but {len(d)} durations")
    return d


# ---- Sets of time as sorted, disjoint (start, end) rows.

Intervals = NDArray[np.float64]  # shape (n, 2)


def union(start: NDArray[np.float64], end: NDArray[np.float64]) -> Intervals:
    """Union of spans."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([start[first], reach[last]])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Intersection of two sets."""
    return _sweep(a, b, 2)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Difference of two sets."""
    if not len(a) or not len(b):
        return a
    lo, hi = min(a[0, 0], b[0, 0]) - 1.0, max(a[-1, 1], b[-1, 1]) + 1.0
    edges = np.concatenate([[lo], b.ravel(), [hi]])
    return intersect(a, edges.reshape(-1, 2))


def length(a: Intervals) -> float:
    return float((a[:, 1] - a[:, 0]).sum())


def _sweep(a: Intervals, b: Intervals, depth: int) -> Intervals:
    """Where at least `depth` of the two sets cover the time."""
    at = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    step = np.repeat([1, -1], len(a) + len(b))
    order = np.lexsort((step, at))  # at one instant, ends come before starts
    covered = np.cumsum(step[order]) >= depth
    at = at[order]
    inside = covered[:-1] & (at[1:] > at[:-1])
    return union(at[:-1][inside], at[1:][inside])


# ---- Steady state: the same step again and again, each lane going on where it was, until the period shows.


def repeat(program: Program, steps: int, carried: Edges | None = None) -> Program:
    """`steps` copies, one after another on every lane; `carried` edges lead from a task to one of the next copy.

    Release times hold for the first copy only: what a later copy may start on, its edges must say.
    """
    if steps < 0:
        raise ValueError(f"{steps} steps")
    n, meets = len(program), int(program.group.max(initial=-1)) + 1
    edges = [program.edges.shifted(k * n) for k in range(steps)]
    if carried is not None and len(carried):
        _check_carried(carried, n)
        edges += [carried.shifted((k - 1) * n, k * n) for k in range(1, steps)]
    copy = np.repeat(np.arange(steps, dtype=np.int32), n)
    group = np.tile(program.group, steps)
    return Program.of(
        program.lanes,
        np.tile(program.lane, steps),
        Edges.joined(edges),
        group=np.where(group >= 0, group + copy * meets, -1),
        release=np.where(copy == 0, np.tile(program.release, steps), 0.0),
        name=np.tile(program.name, steps),
        names=program.names,
    )


def _check_carried(carried: Edges, tasks: int) -> None:
    for ends in (carried.before, carried.after):
        if ends.min() < 0 or ends.max() >= tasks:
            bad = ends.min() if ends.min() < 0 else ends.max()
            raise ValueError(f"a carried edge names task {bad}, but a step has {tasks} tasks")


def period(
    program: Program, durations: ArrayLike | Durations, carried: Edges | None = None, steps: int = 8
) -> NDArray[np.float64]:
    """Seconds per step once run-ahead has built up, per draw: the mean over the second half of `steps` steps."""
    if steps < 2:
        raise ValueError(f"a period needs at least 2 steps, not {steps}")
    many, half = repeat(program, steps, carried), steps // 2
    copy = np.repeat(np.arange(steps, dtype=np.int32), len(program))
    done = latest_ends(many, Durations.of(durations).repeated(steps), copy, steps)
    return np.asarray((done[-1] - done[half - 1]) / (steps - half))
