"""Replay: a run's measured durations as a Program, so that the engine must find the step time again by itself.

What is taken from the trace: how long each stretch of host time, each call and each kernel took; in which order; and
the dependencies that it states or that `waits` and `threads` infer. What is not: when anything started. A start is
pinned only for what began before the window (a thread's first event, a kernel without a launch). Launch latency and
kernel-to-kernel gap are two constants a trace; the transfer time of a collective is the shortest any rank saw (on one
clock: from the last arrival to the first end), and the waiting of the others must come out of the recursion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Program, Timeline, simulate
from presage.traces import waits
from presage.traces.ranktasks import NS, RankTasks, edges_of, lanes_of, rank_tasks, task_columns
from presage.traces.trace import Trace
from presage.traces.trace_set import Meeting, TraceSet

__all__ = ["NS", "RankTasks", "Replay", "StepTime", "measured_steps", "replay_of"]

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, in seconds from the run's origin: when it began, and when its host and GPU were done."""

    name: str
    start: float
    done: float
    seconds: float  # from the step before being done (the first: from its own start)


@dataclass(frozen=True, eq=False)
class Replay:
    """The program of a run with its measured durations, and the way back from tasks to events."""

    run: TraceSet
    program: Program
    durations: Floats
    ranks: tuple[RankTasks, ...]

    def simulate(self) -> Timeline:
        return simulate(self.program, self.durations)

    def steps(self, timeline: Timeline, place: int) -> list[StepTime]:
        """The step times of one rank in a timeline of this program."""
        r = self.ranks[place]
        host_end = timeline.end[r.stretch_task]
        gpu_end = timeline.end[r.gpu_task]
        host_start = timeline.start[r.stretch_task]
        return _steps(r, host_start, host_end, gpu_end)


def measured_steps(replay: Replay, place: int) -> list[StepTime]:
    """The step times of one rank as they were."""
    r = replay.ranks[place]
    s = r.stretches
    gpu = r.trace.gpu
    return _steps(r, (s.lo - r.origin) * NS, (s.hi - r.origin) * NS, (gpu.end - r.origin) * NS)


def _steps(r: RankTasks, host_start: Floats, host_end: Floats, gpu_end: Floats) -> list[StepTime]:
    """A step is done when its host window is over and the GPU work launched in it has ended."""
    windows = _windows(r.trace)
    launched = waits.launch_times(r.trace.host, r.trace.gpu)
    mine = r.trace.gpu.launch >= 0
    out: list[StepTime] = []
    for k, (name, thread, lo, hi) in enumerate(windows):
        until = windows[k + 1][2] if k + 1 < len(windows) else hi
        on = np.flatnonzero((r.stretches.lo >= lo) & (r.stretches.hi <= hi))
        on = on[r.stretches.thread[on] == thread] if thread >= 0 else on
        sent = gpu_end[mine & (launched >= lo) & (launched < until)]
        ends = [float(host_end[on].max())] if len(on) else []
        ends += [float(sent.max())] if len(sent) else []
        if not ends:
            continue
        start = float(host_start[on].min()) if len(on) else 0.0
        done = max(ends)
        out.append(StepTime(name, start, done, done - (out[-1].done if out else start)))
    return out


def _windows(trace: Trace) -> list[tuple[str, int, int, int]]:
    """(name, thread, from, to) of each step; the whole trace where it marks none."""
    if trace.steps:
        return [(s.name, s.thread, s.start, s.end) for s in trace.steps]
    lo, hi = trace.span
    return [("window", -1, lo, hi + 1)]


def replay_of(run: TraceSet) -> Replay:
    """Turn a run into a program and its measured durations."""
    origin = min(t.span[0] + off for t, off in zip(run.traces, run.offset_ns, strict=True))
    ranks: list[RankTasks] = []
    for place, (trace, off) in enumerate(zip(run.traces, run.offset_ns, strict=True)):
        first = ranks[-1].end_task if ranks else 0
        ranks.append(rank_tasks(place, trace, origin - off, first))
    lanes = [lanes_of(r, run.rank(r.place)) for r in ranks]
    names = [[*r.trace.names, "(between ops)"] for r in ranks]
    columns = [task_columns(r) for r in ranks]
    durations = np.concatenate([c.durations for c in columns]) * NS
    group = _meet(run, ranks, durations)
    program = Program.of(
        [lane for some in lanes for lane in some],
        _joined([c.lane for c in columns], [len(some) for some in lanes]),
        Edges.joined([edges_of(r) for r in ranks]),
        group=group,
        release=np.concatenate([c.release for c in columns]) * NS,
        name=_joined([c.name for c in columns], [len(some) for some in names]),
        names=[n for some in names for n in some],
    )
    return Replay(run, program, durations, tuple(ranks))


def _joined(columns: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Columns of indices, each into a list of its own, as one column into the lists end to end."""
    first = np.cumsum([0, *sizes])
    return np.concatenate([c + f for c, f in zip(columns, first, strict=False)])


def _meet(run: TraceSet, ranks: Sequence[RankTasks], durations: Floats) -> NDArray[np.int64]:
    """Make matched collectives meetings, and their duration the shortest any member saw.

    On one clock it is the time from the last arrival to the first end, and who ended later was kept up by itself.
    """
    group = np.full(len(durations), -1, np.int64)
    waiting = [_woken_by(r) for r in ranks] if run.one_clock else []
    for g, meeting in enumerate(run.meetings):
        members = np.array([ranks[r].gpu_task[e] for r, e in meeting.members])
        lead = np.array([ranks[r].lead[e] for r, e in meeting.members]) * NS
        group[members] = g
        took = (durations[members] - lead).min()
        if run.one_clock:
            start, end = (_seconds(ranks, meeting, column) for column in ("start", "end"))
            took = max(0.0, float(end.min() - start.max()))
            for (r, e), late in zip(meeting.members, end - end.min(), strict=True):
                durations[waiting[r].get(e, [])] += late
        durations[members] = took + lead
    return group


def _seconds(ranks: Sequence[RankTasks], meeting: Meeting, column: str) -> Floats:
    """The start or end of each member, in seconds from the run's origin."""
    at = [int(getattr(ranks[r].trace.gpu, column)[e]) - ranks[r].origin for r, e in meeting.members]
    return np.array(at) * NS


def _woken_by(r: RankTasks) -> dict[int, list[int]]:
    """By GPU event the tasks of the host that went on when it ended."""
    found: dict[int, list[int]] = {}
    for b in r.blocked:
        last = max(b.events, key=lambda e: int(r.trace.gpu.end[e]))
        found.setdefault(last, []).append(int(r.stretch_task[b.stretch]))
    return found
