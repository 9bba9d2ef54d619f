"""Replay: a run's measured durations as a Program, so that the engine must find the step time again by itself.

What is taken from the trace: how long each stretch of host time, each call and each kernel took; in which order; and
the dependencies that it states or that `waits` and `threads` infer. What is not: when anything started. A start is
pinned only for what began before the window (a thread's first event, a kernel without a launch). Launch latency and
kernel-to-kernel gap are two constants a trace; the transfer time of a collective is the shortest any rank saw (on one
clock: from the last arrival to the first end), and the waiting of the others must come out of the recursion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.displayed import Displayed
from presage.engine import Edges, Lane, LaneKind, Program, Timeline, simulate
from presage.traces import gloo, waits
from presage.traces.links import Latencies, earlier_end, latencies
from presage.traces.trace import HOST_DEVICE, Trace
from presage.traces.trace_set import Meeting, TraceSet
from presage.traces.waits import Handover, Stretches, handovers, stretches

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, in seconds from the run's origin: when it began, and when its host and GPU were done."""

    name: str
    start: float
    done: float
    seconds: float  # from the step before being done (the first: from its own start)


@dataclass(frozen=True, eq=False, repr=False)
class Replay(Displayed):
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

    def frame_rows(self) -> list[dict[str, Any]]:
        """The measured steps of every rank."""
        return [
            {"rank": self.run.rank(i), "step": s.name, "seconds": s.seconds}
            for i in range(len(self.ranks))
            for s in measured_steps(self, i)
        ]


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
    own = r.trace.gpu.launch >= 0
    out: list[StepTime] = []
    for k, (name, thread, lo, hi) in enumerate(windows):
        until = windows[k + 1][2] if k + 1 < len(windows) else hi
        on = np.flatnonzero((r.stretches.lo >= lo) & (r.stretches.hi <= hi))
        on = on[r.stretches.thread[on] == thread] if thread >= 0 else on
        sent = gpu_end[own & (launched >= lo) & (launched < until)]
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
        seconds = (durations[members] - lead).min()
        if run.one_clock:
            start, end = (_seconds(ranks, meeting, column) for column in ("start", "end"))
            seconds = max(0.0, float(end.min() - start.max()))
            for (r, e), late in zip(meeting.members, end - end.min(), strict=True):
                durations[waiting[r].get(e, [])] += late
        durations[members] = seconds + lead
    return group


def _seconds(ranks: Sequence[RankTasks], meeting: Meeting, column: str) -> Floats:
    """The start or end of each member, in seconds from the run's origin."""
    at = [int(getattr(ranks[r].trace.gpu, column)[e]) - ranks[r].origin for r, e in meeting.members]
    return np.array(at) * NS


def _woken_by(r: RankTasks) -> dict[int, list[int]]:
    """By GPU event the tasks of the host that went on when it ended."""
    result: dict[int, list[int]] = {}
    for b in r.blocked:
        last = max(b.events, key=lambda e: int(r.trace.gpu.end[e]))
        result.setdefault(last, []).append(int(r.stretch_task[b.stretch]))
    return result


# ---- One rank of a run as tasks: its lanes, the durations of its host stretches and GPU events, what waits for what

NS = 1e-9
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankTasks:
    """Where one rank's events are among the tasks of a run: host stretches first, thread by thread, then GPU events.

    A call that blocks is two tasks: its issue, on which its own GPU work hangs, and right after it the return.
    """

    place: int
    trace: Trace
    stretches: Stretches = field(repr=False)
    latencies: Latencies
    blocked: tuple[waits.Blocked, ...] = field(repr=False)
    handovers: tuple[Handover, ...] = field(repr=False)
    stream_waits: tuple[waits.StreamWait, ...] = field(repr=False)
    hidden: Ints = field(repr=False)  # by GPU event: ns before its start in which its stream did what no event shows
    taken_up_late: Ints = field(repr=False)  # by collective of a host thread: ns that it began later than usual
    origin: int  # nanoseconds of the trace's clock at the program's 0
    first_task: int

    @cached_property
    def issues(self) -> Ints:
        """The stretches with an issue task before them."""
        return np.array([b.stretch for b in self.blocked], np.int64)

    @cached_property
    def blocks(self) -> Ints:
        """1 for stretches that block, else 0."""
        return np.bincount(self.issues, minlength=len(self.stretches)).astype(np.int64)

    @cached_property
    def stretch_task(self) -> Ints:
        """The task of each host stretch."""
        return self.first_task + np.arange(len(self.stretches)) + np.cumsum(self.blocks)

    @cached_property
    def gpu_task(self) -> Ints:
        """The task of each GPU event."""
        host = len(self.stretches) + len(self.blocked)
        return self.first_task + host + np.arange(len(self.trace.gpu))

    @property
    def end_task(self) -> int:
        return self.first_task + len(self.stretches) + len(self.blocked) + len(self.trace.gpu)

    @property
    def lead(self) -> Ints:
        """By GPU event the ns of its task before the event itself begins: the gap to the one before, and `hidden`."""
        return self.hidden + self.latencies.gap


def rank_tasks(place: int, trace: Trace, origin: int, first_task: int) -> RankTasks:
    """Find out what waits for what on one rank."""
    s = stretches(trace.host)
    # what is usual among GPUs says nothing of host threads: there one example is better
    lat = latencies(trace.host, trace.gpu, fewest=1 if trace.cpu_only else 5)
    inferred, hidden = waits.stream_waits(trace, lat)
    none = np.zeros_like(hidden)
    blocked = gloo.waits(trace, s) if trace.cpu_only else waits.blocking_calls(trace, s)
    waiting = {b.stretch for b in blocked}
    return RankTasks(
        place=place,
        trace=trace,
        stretches=s,
        latencies=lat,
        blocked=tuple(blocked),
        handovers=tuple(h for h in handovers(trace.host, s) if h.silence not in waiting),
        stream_waits=(*waits.stated_stream_waits(trace), *inferred),
        hidden=none if trace.cpu_only else hidden,
        taken_up_late=_beyond_usual(trace, lat, hidden > 0) if trace.cpu_only else none,
        origin=origin,
        first_task=first_task,
    )


def _beyond_usual(trace: Trace, lat: Latencies, late: NDArray[np.bool_]) -> Ints:
    """By collective that a worker took up late (it had to wait for a core itself) by how much: it arrived that late."""
    usual = waits.launch_times(trace.host, trace.gpu) + lat.of(trace.gpu.kind)
    return np.where(late, trace.gpu.start - usual, 0)


def lanes_of(r: RankTasks, rank: int) -> list[Lane]:
    """The rank's threads, then its streams; a stream is for communication if most of its events are collectives."""
    lanes = [Lane(f"rank {rank} {t.name or f'thread {t.tid}'}", rank, LaneKind.HOST) for t in r.trace.threads]
    comm = r.trace.is_collective
    for i, stream in enumerate(r.trace.streams):
        on = r.trace.gpu.stream == i
        kind = LaneKind.COMMUNICATION if comm[on].sum() * 2 > on.sum() else LaneKind.COMPUTE
        what = "collectives" if stream.device == HOST_DEVICE else "stream"
        lanes.append(Lane(f"rank {rank} {what} {stream.stream}", rank, kind))
    return lanes


@dataclass(frozen=True, eq=False)
class TaskColumns:
    """By task: the rank's lane, nanoseconds, earliest start, and index into its names."""

    lane: Ints
    durations: Ints
    release: Ints
    name: Ints


def task_columns(r: RankTasks) -> TaskColumns:
    """What each task of the rank is and how long it takes."""
    n = r.end_task - r.first_task
    c = TaskColumns(*(np.zeros(n, np.int64) for _ in range(4)))
    _host_columns(r, c, r.stretch_task - r.first_task)
    _gpu_columns(r, c, r.gpu_task - r.first_task)
    return c


def _host_columns(r: RankTasks, c: TaskColumns, at: Ints) -> None:
    s = r.stretches
    between_ops = len(r.trace.names)
    c.lane[at], c.durations[at] = s.thread, s.hi - s.lo
    c.name[at] = np.where(s.owner >= 0, r.trace.host.name[s.owner], between_ops)
    issue = at[r.issues] - 1
    c.lane[issue], c.name[issue] = s.thread[r.issues], c.name[at[r.issues]]
    c.durations[at[r.issues]] = [b.tail for b in r.blocked]
    c.durations[at[[j.silence for j in r.handovers if j.silence >= 0]]] = 0
    started = {j.after for j in r.handovers}
    for first in np.unique(s.thread, return_index=True)[1]:
        if first not in started:
            # the first task of a thread is its first stretch, or that one's issue
            c.release[at[first] - r.blocks[first]] = max(0, s.lo[first] - r.origin)


def _gpu_columns(r: RankTasks, c: TaskColumns, at: Ints) -> None:
    gpu = r.trace.gpu
    c.lane[at], c.name[at] = len(r.trace.threads) + gpu.stream, gpu.name
    # where kernels of one stream overlap, the later one counts from the earlier one's end
    begin = np.maximum(gpu.start, np.minimum(earlier_end(gpu), gpu.end))
    c.durations[at] = gpu.end - begin + r.lead
    orphan = np.flatnonzero(gpu.launch < 0)
    c.release[at[orphan]] = np.maximum(0, gpu.start[orphan] - r.lead[orphan] - r.origin)


def edges_of(r: RankTasks) -> Edges:
    """All that waits for something on the rank, beyond the order of its lanes."""
    return Edges.joined([_launches(r), _blocks(r), _crossings(r), _handover_edges(r)])


def _launches(r: RankTasks) -> Edges:
    gpu = r.trace.gpu
    linked = np.flatnonzero(gpu.launch >= 0)
    call = r.stretches.first[gpu.launch[linked]]
    delay = r.latencies.of(gpu.kind[linked]) + r.taken_up_late[linked] - r.latencies.gap
    return Edges.of(r.stretch_task[call] - r.blocks[call], r.gpu_task[linked], delay * NS, True)


def _blocks(r: RankTasks) -> Edges:
    return _edges(
        (r.gpu_task[e], r.stretch_task[b.stretch], r.lead[e] * NS if b.from_start else 0.0, b.from_start)
        for b in r.blocked
        for e in b.events
    )


def _crossings(r: RankTasks) -> Edges:
    usual = [_crossing_delay(r, for_room) for for_room in (False, True)]
    return _edges((r.gpu_task[w.before], r.gpu_task[w.after], usual[w.for_room], False) for w in r.stream_waits)


def _crossing_delay(r: RankTasks, for_room: bool) -> float:
    """One constant a trace and kind of wait: the median time from the end waited for to the start."""
    gpu = r.trace.gpu
    seen = [int(gpu.start[w.after] - gpu.end[w.before]) for w in r.stream_waits if w.for_room == for_room]
    close = [d for d in seen if d <= waits.STREAM_HANDOVER]
    return (float(np.median(close)) - r.latencies.gap) * NS if close else 0.0


def _handover_edges(r: RankTasks) -> Edges:
    s, task = r.stretches, r.stretch_task
    return _edges(
        (task[j.before], task[j.after] - r.blocks[j.after], max(0, int(s.lo[j.after] - s.hi[j.before])) * NS, False)
        for j in r.handovers
    )


def _edges(rows: Any) -> Edges:
    """Edges from rows of (before, after, delay, from_start)."""
    before, after, delay, from_start = zip(*rows, strict=True) if (rows := list(rows)) else ((), (), (), ())
    return Edges.of(before, after, delay, from_start)
