"""Where the time of a run goes: GPU activity, idleness and its causes, ops, kernels, the critical path, late ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine import Timeline
from presage.engine.timeline import intersect, length, subtract, union
from presage.traces.replay import NS, RankTasks, Replay
from presage.traces.trace import HostKind
from presage.traces.trace_set import Meeting
from presage.traces.waits import HIDDEN_WORK, launch_times

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Idle:
    """Seconds with nothing running on the GPU, by what it waited for."""

    host: float  # the next kernel was not launched yet, or only just
    sync: float  # the host had been waiting for the GPU and was only then going on
    gap: float  # from one queued kernel to the next
    unexplained: float

    @property
    def total(self) -> float:
        return self.host + self.sync + self.gap + self.unexplained


@dataclass(frozen=True)
class LaneActivity:
    """One rank's GPU over the steps of its trace, in seconds. compute + exposed communication + idle = span."""

    span: float
    active: float
    compute: float
    communication: float
    exposed_communication: float
    waiting_for_ranks: (
        float  # of the exposed communication, the part spent before the last rank arrived; nan if unknown
    )
    idle: Idle

    @property
    def overlap(self) -> float:
        """The share of communication hidden behind compute."""
        return 1.0 - self.exposed_communication / self.communication if self.communication else 0.0


def activity(replay: Replay, place: int) -> LaneActivity:
    """How the GPU of one rank spent the trace's steps, as measured; without a GPU, the host's operators compute."""
    r = replay.ranks[place]
    gpu = r.trace.gpu
    lo, hi = _window(r)
    start, end = np.clip(gpu.start * NS, lo, hi), np.clip(gpu.end * NS, lo, hi)
    comm = r.trace.is_collective
    compute = _host_compute(r, lo, hi) if r.trace.cpu_only else union(start[~comm], end[~comm])
    communication = union(start[comm], end[comm])
    exposed = subtract(communication, compute)
    busy = union(*np.concatenate([compute, communication]).T)
    waiting = _waiting(replay, place)
    return LaneActivity(
        span=hi - lo,
        active=length(busy),
        compute=length(compute),
        communication=length(communication),
        exposed_communication=length(exposed),
        waiting_for_ranks=float("nan") if waiting is None else length(intersect(exposed, waiting)),
        idle=_idle(r, busy, lo, hi),
    )


def _host_compute(r: RankTasks, lo: float, hi: float) -> Floats:
    """When operators ran on the host's threads, for a rank without a GPU."""
    s = r.stretches
    on = np.flatnonzero(s.owner >= 0)
    on = np.setdiff1d(on[r.trace.host.kind[s.owner[on]] == HostKind.OP], r.issues)
    return union(np.clip(s.lo[on] * NS, lo, hi), np.clip(s.hi[on] * NS, lo, hi))


def _window(r: RankTasks) -> tuple[float, float]:
    """Seconds on the trace's clock from the first step's start until host and GPU are done with the last."""
    trace = r.trace
    if not trace.steps:
        lo, hi = trace.span
        return lo * NS, hi * NS
    lo, hi = trace.steps[0].start, trace.steps[-1].end
    sent = launch_times(trace.host, trace.gpu)
    own = (trace.gpu.launch >= 0) & (sent >= lo) & (sent < hi)
    return lo * NS, max(hi, int(trace.gpu.end[own].max(initial=hi))) * NS


def _waiting(replay: Replay, place: int) -> Floats | None:
    """When this rank's collectives ran before the last rank had arrived."""
    if not replay.run.meetings:
        return None
    arrival, gpu = _arrivals(replay), replay.ranks[place].trace.gpu
    spans = []
    for meeting, times in zip(replay.run.meetings, arrival, strict=True):
        for (member, event), _ in zip(meeting.members, times, strict=True):
            if member == place:
                last = max(times) * NS + (replay.ranks[place].origin * NS)
                spans.append((gpu.start[event] * NS, min(last, gpu.end[event] * NS)))
    table = np.array(spans).reshape(-1, 2)
    return union(table[:, 0], table[:, 1])


def _arrivals(replay: Replay) -> list[list[int]]:
    """Nanoseconds from the run's origin at which each member of each meeting arrived."""
    return [
        [int(replay.ranks[m].trace.gpu.start[e]) - replay.ranks[m].origin for m, e in meeting.members]
        for meeting in replay.run.meetings
    ]


def _idle(r: RankTasks, busy: Floats, lo: float, hi: float) -> Idle:
    """Split every idle span by what the first event after it had waited for."""
    idle = subtract(np.array([[lo, hi]]), busy)
    if r.trace.cpu_only:
        return Idle(length(idle), 0.0, 0.0, 0.0)
    launched = launch_times(r.trace.host, r.trace.gpu) * NS
    by_start = np.argsort(r.trace.gpu.start, kind="stable")
    starts = r.trace.gpu.start[by_start] * NS
    returns = np.sort(r.stretches.hi[[b.stretch for b in r.blocked if not b.from_start]]) * NS
    latency = r.latencies.of(r.trace.gpu.kind) * NS
    parts = np.zeros(4)
    for a, b in idle:
        k = int(np.searchsorted(starts, b - 1e-9))
        if k == len(starts):  # nothing follows: the host has the rest of the window to itself
            parts[0] += b - a
            continue
        event = int(by_start[k])
        parts += _causes(a, b, launched[event], latency[event], returns)
    return Idle(*(float(p) for p in parts))


def _causes(a: float, b: float, launched: float, latency: float, returns: NDArray[np.floating[Any]]) -> Floats:
    """(host, sync, gap, unexplained) seconds of one idle span a..b that ended with an event launched at `launched`."""
    ready = min(max(launched + latency, a), b)
    k = int(np.searchsorted(returns, min(launched, ready), side="right")) - 1
    back = float(returns[k]) if k >= 0 and returns[k] > a else a
    rest = b - ready
    unexplained = rest if rest > HIDDEN_WORK * NS else 0.0
    return np.array([ready - back, back - a, rest - unexplained, unexplained])


@dataclass(frozen=True)
class OpSummary:
    """One name's calls and seconds, over all steps of one rank."""

    name: str
    calls: int
    host: float
    gpu: float


def ops(replay: Replay, place: int) -> list[OpSummary]:
    """Top-level operators with their host time (waits left out) and the GPU time they launched, most GPU time first."""
    r = replay.ranks[place]
    trace, s = r.trace, r.stretches
    top = trace.host.outermost(trace.host.kind == HostKind.OP)
    found: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for i in np.unique(top[top >= 0]):
        found[int(trace.host.name[i])][0] += 1
    took = replay.durations[r.stretch_task]
    for owner, seconds in zip(s.owner, took, strict=True):
        if owner >= 0 and top[owner] >= 0:
            found[int(trace.host.name[top[owner]])][1] += seconds
    for launch, ns in zip(trace.gpu.launch, trace.gpu.end - trace.gpu.start, strict=True):
        if launch >= 0 and top[launch] >= 0:
            found[int(trace.host.name[top[launch]])][2] += ns * NS
    rows = [OpSummary(trace.names[n], int(c), float(h), float(g)) for n, (c, h, g) in found.items()]
    return sorted(rows, key=lambda x: (-x.gpu, -x.host, x.name))


def kernels(replay: Replay, place: int) -> list[OpSummary]:
    """GPU kernels, copies and memsets by name, most time first."""
    trace = replay.ranks[place].trace
    seconds = np.bincount(trace.gpu.name, (trace.gpu.end - trace.gpu.start) * NS, len(trace.names))
    calls = np.bincount(trace.gpu.name, minlength=len(trace.names))
    rows = [OpSummary(trace.names[n], int(calls[n]), 0.0, float(seconds[n])) for n in np.flatnonzero(calls)]
    return sorted(rows, key=lambda x: (-x.gpu, x.name))


@dataclass(frozen=True)
class PathPart:
    """Seconds of the critical path spent in one kind of thing under one name."""

    kind: str
    name: str
    seconds: float


def critical_parts(replay: Replay, timeline: Timeline, path: NDArray[np.int64] | None = None) -> list[PathPart]:
    """The critical path (or this one) by op: host time by top-level op, GPU time by kernel, waits by what they waited
    in."""
    path = timeline.critical_path if path is None else path
    step = np.append(timeline.start[path[1:]], timeline.end[path[-1:]]) - timeline.start[path]
    names: dict[tuple[str, str], float] = defaultdict(float)
    describe = _describer(replay)
    for task, seconds in zip(path, step, strict=True):
        names[describe(int(task))] += float(seconds)
    parts = [PathPart(k, n, s) for (k, n), s in names.items()]
    return sorted(parts, key=lambda p: -p.seconds)


class _describer:
    """Task number -> (kind, name)."""

    def __init__(self, replay: Replay) -> None:
        n = len(replay.program)
        self.rank = np.zeros(n, np.int32)
        self.event = np.full(n, -1, np.int64)  # the stretch or the GPU event
        self.on_gpu = np.zeros(n, np.bool_)
        hosts = [x.trace.host for x in replay.ranks]
        self.replay, self.tops = replay, [host.outermost(host.kind == HostKind.OP) for host in hosts]
        for i, x in enumerate(replay.ranks):
            self.rank[x.stretch_task], self.event[x.stretch_task] = i, np.arange(len(x.stretches))
            self.rank[x.gpu_task], self.event[x.gpu_task] = i, np.arange(len(x.gpu_task))
            self.on_gpu[x.gpu_task] = True

    def __call__(self, task: int) -> tuple[str, str]:
        x, event = self.replay.ranks[self.rank[task]], int(self.event[task])
        if event < 0:  # the issue of a blocking call, of no length itself
            return "host", self.replay.program.label(task)
        if self.on_gpu[task]:
            return ("collective" if x.trace.is_collective[event] else "kernel"), x.trace.gpu_name(event)
        owner = int(x.stretches.owner[event])
        if owner < 0:
            return "host", "(between ops)"
        top = int(self.tops[self.rank[task]][owner])
        return "host", x.trace.host_name(top) if top >= 0 else f"(in {x.trace.host_name(owner)})"


@dataclass(frozen=True)
class Lateness:
    """One rank at the run's collectives."""

    rank: int
    times_last: int
    made_others_wait: float  # seconds, summed over the other ranks, in collectives where it came last
    waited: float


def lateness(replay: Replay) -> list[Lateness]:
    """Who is late: per rank how often it came last, how long others waited for it, and how long it waited.

    A rank that waits in two collectives at once waits once.
    """
    n = len(replay.run)
    last = np.zeros(n, int)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)  # by who waited, and for whom
    for meeting, times in zip(replay.run.meetings, _arrivals(replay), strict=True):
        latest = max(times)
        who = meeting.members[times.index(latest)][0]
        last[who] += 1
        for (member, _), at in zip(meeting.members, times, strict=True):
            spans[member, who].append((at * NS, latest * NS))
    rows = []
    for i in range(n):
        caused = sum(_covered(found) for (_, who), found in spans.items() if who == i)
        waited = _covered([x for (member, _), found in spans.items() if member == i for x in found])
        rows.append(Lateness(replay.run.rank(i), int(last[i]), caused, waited))
    return rows


def _covered(spans: list[tuple[float, float]]) -> float:
    table = np.array(spans).reshape(-1, 2)
    return length(union(table[:, 0], table[:, 1]))


def late_meetings(replay: Replay, most: int = 10) -> list[tuple[Meeting, int, float, float]]:
    """The collectives that cost most waiting: (meeting, last rank, seconds waited by all, seconds from the origin)."""
    rows = []
    for meeting, times in zip(replay.run.meetings, _arrivals(replay), strict=True):
        latest = max(times)
        who = replay.run.rank(meeting.members[times.index(latest)][0])
        rows.append((meeting, who, sum(latest - t for t in times) * NS, latest * NS))
    return sorted(rows, key=lambda row: -row[2])[:most]


def share(parts: Iterable[PathPart], kind: str) -> float:
    """The share of the critical path that is of one kind."""
    parts = list(parts)
    total = sum(p.seconds for p in parts)
    return sum(p.seconds for p in parts if p.kind == kind) / total if total else 0.0
