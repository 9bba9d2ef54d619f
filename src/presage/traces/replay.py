"""Replay: a run's measured durations as a Program, so that the engine must find the step time again by itself.

What is taken from the trace: how long each stretch of host time, each call and each kernel took; in which order; and
the dependencies that it states or that `waits` and `threads` infer. What is not: when anything started. A start is
pinned only for what began before the window (a thread's first event, a kernel without a launch). Launch latency and
kernel-to-kernel gap are two constants a trace; the transfer time of a collective is the shortest any rank saw, and the
waiting of the others must come out of the recursion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Lane, LaneKind, Program, Timeline, simulate
from presage.traces import waits
from presage.traces.latencies import Latencies, earlier_end, latencies
from presage.traces.run import Run
from presage.traces.threads import Handover, Stretches, handovers, stretches
from presage.traces.trace import Trace

__all__ = ["RankTasks", "Replay", "StepTime", "measured_steps", "replay_of"]

NS = 1e-9
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankTasks:
    """Where one rank's events are among the tasks."""

    place: int
    trace: Trace
    stretches: Stretches = field(repr=False)
    stretch_task: Ints = field(repr=False)  # task of each host stretch
    gpu_task: Ints = field(repr=False)  # task of each GPU event
    latencies: Latencies
    blocked: tuple[waits.Blocked, ...] = field(repr=False)
    stream_waits: tuple[waits.StreamWait, ...] = field(repr=False)
    hidden: Ints = field(repr=False)  # by GPU event: ns before its start in which its stream did what no event shows
    lead: Ints = field(repr=False)  # by GPU event: ns of its task before the event itself begins: the gap, and `hidden`
    origin: int  # nanoseconds of the trace's clock at the program's 0


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

    run: Run
    program: Program
    durations: NDArray[np.float64]
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


def _steps(
    r: RankTasks, host_start: NDArray[np.float64], host_end: NDArray[np.float64], gpu_end: NDArray[np.float64]
) -> list[StepTime]:
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


def replay_of(run: Run) -> Replay:
    """Turn a run into a program and its measured durations."""
    origin = min(t.span[0] + off for t, off in zip(run.traces, run.offset_ns, strict=True))
    parts: list[_Part] = []
    first_task = first_lane = 0
    for place, (trace, off) in enumerate(zip(run.traces, run.offset_ns, strict=True)):
        part = _rank_part(run, place, trace, origin - off, first_task, first_lane)
        parts.append(part)
        first_task += len(part.lane)
        first_lane += len(part.lanes)
    durations = np.concatenate([p.durations for p in parts]) * NS
    group = _meet(run, parts, durations)
    program = Program.of(
        [lane for p in parts for lane in p.lanes],
        np.concatenate([p.lane for p in parts]),
        sum((p.edges for p in parts), Edges.none()),
        group=group,
        release=np.concatenate([p.release for p in parts]) * NS,
        **_named(parts),
    )
    return Replay(run, program, durations, tuple(p.tasks for p in parts))


@dataclass(frozen=True, eq=False)
class _Part:
    """One rank's share of the program; times in nanoseconds, task and lane numbers already those of the program."""

    lanes: list[Lane]
    lane: Ints
    durations: Ints
    release: Ints
    edges: Edges
    names: list[str]
    name: Ints
    tasks: RankTasks


def _named(parts: Sequence[_Part]) -> dict[str, object]:
    first = np.cumsum([0] + [len(p.names) for p in parts])
    name = np.concatenate([p.name + f for p, f in zip(parts, first, strict=False)])
    return {"name": name, "names": [n for p in parts for n in p.names]}


def _meet(run: Run, parts: Sequence[_Part], durations: NDArray[np.float64]) -> Ints:
    """Make matched collectives meetings, and their duration the shortest any member saw."""
    group = np.full(len(durations), -1, np.int64)
    for g, meeting in enumerate(run.meetings):
        members = np.array([parts[r].tasks.gpu_task[e] for r, e in meeting.members])
        lead = np.array([parts[r].tasks.lead[e] for r, e in meeting.members]) * NS
        group[members] = g
        durations[members] = (durations[members] - lead).min() + lead
    return group


def _rank_part(run: Run, place: int, trace: Trace, origin: int, task0: int, lane0: int) -> _Part:
    host, gpu = trace.host, trace.gpu
    s = stretches(host)
    lat = latencies(host, gpu)
    blocked = waits.blocking_calls(trace, s)
    stated = waits.stated_stream_waits(trace)
    inferred, hidden = waits.stream_waits(trace, lat)
    # a call that blocks is two tasks: `issue`, on which its own GPU work hangs, and the return after the wait
    issues = np.array([b.stretch for b in blocked], np.int64)
    extra = np.zeros(len(s), np.int64)
    extra[issues] = 1
    stretch_task = task0 + np.arange(len(s)) + np.cumsum(extra)
    host_tasks = len(s) + len(blocked)
    gpu_task = task0 + host_tasks + np.arange(len(gpu))
    tasks = RankTasks(
        place, trace, s, stretch_task, gpu_task, lat, tuple(blocked), tuple(stated + inferred), hidden, hidden + lat.gap, origin
    )
    joins = handovers(host, s)
    lanes = _lanes(run, place, trace)
    n = host_tasks + len(gpu)
    lane, durations, release = np.empty(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    at = stretch_task - task0
    lane[at], durations[at] = s.thread, s.hi - s.lo
    lane[at[issues] - 1] = s.thread[issues]
    for b, i in zip(blocked, issues, strict=True):
        durations[at[i]] = b.tail
    for join in joins:
        if join.silence >= 0:
            durations[at[join.silence]] = 0
    lane[host_tasks:] = len(trace.threads) + gpu.stream
    # where kernels of one stream overlap, the later one counts from the earlier one's end
    durations[host_tasks:] = gpu.end - np.maximum(gpu.start, np.minimum(earlier_end(gpu), gpu.end)) + tasks.lead
    _pin(release, at, s, joins, origin)
    orphan = np.flatnonzero(gpu.launch < 0)
    release[host_tasks + orphan] = np.maximum(0, gpu.start[orphan] - tasks.lead[orphan] - origin)
    edges = _edges(trace, tasks, joins, issues)
    names = [*trace.names, "(between ops)"]
    name = np.empty(n, np.int64)
    name[at] = np.where(s.owner >= 0, host.name[s.owner], len(names) - 1)
    name[at[issues] - 1] = host.name[s.owner[issues]]
    name[host_tasks:] = gpu.name
    return _Part(lanes, lane + lane0, durations, release, edges, names, name, tasks)


def _lanes(run: Run, place: int, trace: Trace) -> list[Lane]:
    rank = run.rank(place)
    host = [Lane(f"rank {rank} {t.name or f'thread {t.tid}'}", rank, LaneKind.HOST) for t in trace.threads]
    comm = trace.is_collective
    out = []
    for i, stream in enumerate(trace.streams):
        on = trace.gpu.stream == i
        kind = LaneKind.COMMUNICATION if comm[on].sum() * 2 > on.sum() else LaneKind.COMPUTE
        out.append(Lane(f"rank {rank} stream {stream.stream}", rank, kind))
    return host + out


def _pin(release: Ints, at: Ints, s: Stretches, joins: Sequence[Handover], origin: int) -> None:
    """A thread's first stretch starts when it did, unless another thread started it."""
    started = {j.after for j in joins}
    for t in np.unique(s.thread):
        first = int(np.flatnonzero(s.thread == t)[0])
        if first not in started:
            release[at[first]] = max(0, s.lo[first] - origin)


def _edges(trace: Trace, r: RankTasks, joins: Sequence[Handover], issues: Ints) -> Edges:
    s, gpu = r.stretches, trace.gpu
    linked = np.flatnonzero(gpu.launch >= 0)
    call = s.first[gpu.launch[linked]]
    blocks = np.zeros(len(s), np.int64)
    blocks[issues] = 1
    delay = r.latencies.of(gpu.kind[linked]) - r.latencies.gap
    launch = Edges.of(r.stretch_task[call] - blocks[call], r.gpu_task[linked], delay * NS, True)
    waited = [
        (r.gpu_task[e], r.stretch_task[b.stretch], r.lead[e] * NS if b.from_start else 0.0, b.from_start)
        for b in r.blocked
        for e in b.events
    ]
    block = Edges.of(*_columns(waited, 4))
    crossed = [(r.gpu_task[w.before], r.gpu_task[w.after]) for w in r.stream_waits]
    usual = [_crossing_delay(trace, r, for_room) for for_room in (False, True)]
    crossing = Edges.of(*_columns(crossed, 2), [usual[w.for_room] for w in r.stream_waits])
    rest = [max(0, int(s.lo[j.after] - s.hi[j.before])) * NS for j in joins]
    handed = [(r.stretch_task[j.before], r.stretch_task[j.after]) for j in joins]
    return launch + block + crossing + Edges.of(*_columns(handed, 2), rest)


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    return [[row[k] for row in rows] for k in range(width)]


def _crossing_delay(trace: Trace, r: RankTasks, for_room: bool) -> float:
    """One constant a trace and kind of wait: the median time from the end waited for to the start."""
    seen = [int(trace.gpu.start[w.after] - trace.gpu.end[w.before]) for w in r.stream_waits if w.for_room == for_room]
    close = [d for d in seen if d <= waits.STREAM_HANDOVER]
    return (float(np.median(close)) - r.latencies.gap) * NS if close else 0.0
