"""Who waited for whom: the dependencies a trace shows but does not state.

Three kinds are inferred from times that meet: a host call that returns just after GPU work ends was waiting for that
work; a thread that wakes just after another falls silent was waiting for it; a kernel that starts just after one of
another stream ends, though launched long before, was waiting for that. A dependency only ever comes from a time that
meets; where nothing meets, the time counts as work of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces import calltree
from presage.traces.links import Latencies, earlier_end
from presage.traces.trace import GpuEvents, HostEvents, HostKind, Sync, Trace

US = 1000
Ints = NDArray[np.int64]

SYNC_CALL = re.compile(r"Synchronize|^(cuda|hip)(Memcpy|Free|Malloc|HostAlloc|HostRegister)|StreamQuery|cuMem")
DEVICE_WIDE = re.compile(r"(Device|Ctx)Synchronize|^(cuda|hip)Free")

# Calls shorter than this do not block: they are the call's own cost.
LEAST_BLOCK = 15 * US
# A stretch of an operator itself this long that ends with GPU work was waiting for it in a call that no event shows.
LEAST_SILENT_BLOCK = 1000 * US
SILENT_BLOCK_REST = 0.02
# A launch call this long, with this many kernels outstanding, found the launch queue full.
FULL_QUEUE_CALL = 60 * US
FULL_QUEUE_DEPTH = 400
# Clocks are whole microseconds in some traces.
CLOCK_SLOP = 2 * US
# From one stream's kernel end to the start of a kernel of another stream that waited for it.
STREAM_HANDOVER = 40 * US
# A kernel that only lacked room starts while the last blocks of the one in its way still run: in this last part of it.
ROOM_SHARE = 0.15
ROOM_LEAST = 60 * US
ROOM_MOST = 1000 * US
# A start later than its launch and its stream explain by more than this had another reason.
UNEXPLAINED = 4 * US
# Above this, a late start that nothing in the trace explains is work the trace does not show (a graph's unrecorded
# nodes, a wait for another process); below, it is the launch latency's own spread.
HIDDEN_WORK = 100 * US


@dataclass(frozen=True)
class Blocked:
    """A stretch of a host call that waited for the ends (or starts) of GPU events, then took `tail` ns to return."""

    stretch: int
    events: tuple[int, ...]
    from_start: bool
    tail: int


@dataclass(frozen=True)
class StreamWait:
    """A GPU event that waited for one of another stream: for its result, or only for room on the GPU."""

    before: int
    after: int
    for_room: bool = False


def launch_times(host: HostEvents, gpu: GpuEvents) -> Ints:
    """When each GPU event was launched; its own start where the launch is not in the trace."""
    return np.where(gpu.launch >= 0, host.start[gpu.launch] if len(host) else 0, gpu.start)


def blocking_calls(trace: Trace, s: Stretches) -> list[Blocked]:
    """The calls into the runtime that waited for the GPU."""
    host, gpu = trace.host, trace.gpu
    if not len(gpu):
        return []
    kind = np.array([_call_kind(n) for n in trace.names], np.int8)[host.name]
    calls = np.flatnonzero((host.kind == HostKind.CALL) & (s.longest >= 0))
    calls = calls[(s.hi - s.lo)[s.longest[calls]] >= LEAST_BLOCK]
    finder = _Finder(host, gpu, s)
    found = [finder.blocked(int(c), int(kind[c])) for c in calls]
    silent = np.flatnonzero((s.hi - s.lo >= LEAST_SILENT_BLOCK) & (s.owner >= 0))
    silent = silent[host.kind[s.owner[silent]] == HostKind.OP]
    found += [finder.silently(int(i)) for i in silent]
    return [b for b in found if b is not None]


PLAIN, SYNC, DEVICE_SYNC = 0, 1, 2


def _call_kind(name: str) -> int:
    if DEVICE_WIDE.search(name):
        return DEVICE_SYNC
    return SYNC if SYNC_CALL.search(name) else PLAIN


class _Finder:
    """Looks up which GPU work was under way during a call."""

    def __init__(self, host: HostEvents, gpu: GpuEvents, s: Stretches) -> None:
        self.gpu, self.s = gpu, s
        self.launched = launch_times(host, gpu)
        self.by_end = np.argsort(gpu.end, kind="stable")
        self.ends = gpu.end[self.by_end]
        self.by_start = np.argsort(gpu.start, kind="stable")
        self.starts = gpu.start[self.by_start]
        self.launch_order = np.sort(self.launched)
        self.streams = [np.flatnonzero(gpu.stream == s) for s in np.unique(gpu.stream)]

    def blocked(self, call: int, kind: int) -> Blocked | None:
        stretch = int(self.s.longest[call])
        start, end = int(self.s.lo[stretch]), int(self.s.hi[stretch])
        if kind == PLAIN:
            return self._queue_full(stretch, start, end)
        last = self._last_end(call, start, end)
        if last is None:
            return None
        events = self._device_wide(start, end, last) if kind == DEVICE_SYNC else (last,)
        return Blocked(stretch, events, False, max(0, end - int(self.gpu.end[last])))

    def silently(self, stretch: int) -> Blocked | None:
        """A wait inside an operator with no call recorded: only if GPU work that it met on the way ends with it."""
        start, end = int(self.s.lo[stretch]), int(self.s.hi[stretch])
        last = self._last_end(-1, start, end)
        if last is None or end - int(self.gpu.end[last]) > SILENT_BLOCK_REST * (end - start):
            return None
        return Blocked(stretch, (last,), False, max(0, end - int(self.gpu.end[last])))

    def _last_end(self, call: int, start: int, end: int) -> int | None:
        """The GPU event, launched before the call or by it, that ended last while the call ran."""
        i = int(np.searchsorted(self.ends, end + CLOCK_SLOP, side="right")) - 1
        while i >= 0 and self.ends[i] > start:
            event = int(self.by_end[i])
            if self.launched[event] < start or (call >= 0 and self.gpu.launch[event] == call):
                return event
            i -= 1
        return None

    def _device_wide(self, start: int, end: int, last: int) -> tuple[int, ...]:
        """The last event launched before the call on every stream."""
        events = {last}
        for on in self.streams:
            sent = on[self.launched[on] < start]
            if len(sent) and self.gpu.end[sent[-1]] <= end + CLOCK_SLOP:
                events.add(int(sent[-1]))
        return tuple(sorted(events))

    def _queue_full(self, stretch: int, start: int, end: int) -> Blocked | None:
        if end - start < FULL_QUEUE_CALL:
            return None
        sent = int(np.searchsorted(self.launch_order, start))
        begun = int(np.searchsorted(self.starts, start))
        if sent - begun < FULL_QUEUE_DEPTH:
            return None
        i = int(np.searchsorted(self.starts, end, side="right")) - 1
        if i < 0 or self.starts[i] <= start:
            return None
        event = int(self.by_start[i])
        return Blocked(stretch, (event,), True, max(0, end - int(self.gpu.start[event])))


def stream_waits(trace: Trace, lat: Latencies) -> tuple[list[StreamWait], Ints]:
    """Waits between streams inferred from meeting times, and by GPU event the ns of hidden work before its start."""
    host, gpu = trace.host, trace.gpu
    hidden = np.zeros(len(gpu), np.int64)
    if not len(gpu):
        return [], hidden
    launched = launch_times(host, gpu)
    explained = np.maximum(earlier_end(gpu) + lat.gap, launched + lat.of(gpu.kind))
    late = np.flatnonzero((gpu.launch >= 0) & (gpu.start - explained > UNEXPLAINED))
    by_end = np.argsort(gpu.end, kind="stable")
    ends = gpu.end[by_end]
    waits: list[StreamWait] = []
    for i in late:
        wait = _cause(gpu, launched, by_end, ends, int(i), int(explained[i]))
        if wait is not None:
            waits.append(wait)
        elif gpu.start[i] - explained[i] > HIDDEN_WORK:
            hidden[i] = gpu.start[i] - explained[i]
    return waits, hidden


def _cause(gpu: GpuEvents, launched: Ints, by_end: Ints, ends: Ints, event: int, explained: int) -> StreamWait | None:
    """The event of another stream whose end is the best reason for this start.

    Best is one launched earlier that ended just before; else one, whenever launched, that was about to end.
    """
    start = int(gpu.start[event])
    earliest = max(start - STREAM_HANDOVER, explained - CLOCK_SLOP)
    for latest, for_room in ((start + CLOCK_SLOP, False), (start + ROOM_MOST, True)):
        k = int(np.searchsorted(ends, latest, side="right")) - 1
        while k >= 0 and ends[k] >= earliest:
            other = int(by_end[k])
            possible = gpu.stream[other] != gpu.stream[event] and gpu.start[other] < start and ends[k] > explained
            if possible and (_drains(gpu, other, start) if for_room else launched[other] <= launched[event]):
                return StreamWait(other, event, for_room)
            k -= 1
    return None


def _drains(gpu: GpuEvents, event: int, at: int) -> bool:
    """Whether a kernel is in its last part at that time, when some of its blocks have left room."""
    seconds = int(gpu.end[event] - gpu.start[event])
    return int(gpu.end[event]) - at <= max(ROOM_LEAST, ROOM_SHARE * seconds)


def stated_stream_waits(trace: Trace) -> list[StreamWait]:
    """Waits between streams that the GPU's own records state (`Stream Wait Event` with its recorded event)."""
    host, gpu = trace.host, trace.gpu
    stated = [s for s in trace.syncs if s.record_correlation is not None and s.wait_on_stream is not None]
    if not stated:
        return []
    call_of = {int(c): i for i, c in enumerate(host.correlation) if c > 0 and host.kind[i] == HostKind.CALL}
    launched = launch_times(host, gpu)
    number = {s.stream: i for i, s in enumerate(trace.streams)}
    waits = (_stated(s, host, gpu, launched, call_of, number) for s in stated if s.kind.startswith("Stream Wait"))
    return [w for w in waits if w is not None]


def _stated(
    sync: Sync, host: HostEvents, gpu: GpuEvents, launched: Ints, call_of: dict[int, int], number: dict[int, int]
) -> StreamWait | None:
    record, wait = call_of.get(sync.record_correlation or -1), call_of.get(sync.correlation)
    if record is None or wait is None:
        return None
    source = np.flatnonzero((gpu.stream == number.get(sync.wait_on_stream or 0, -1)) & (launched < host.start[record]))
    target = np.flatnonzero((gpu.stream == number.get(sync.stream or 0, -1)) & (launched > host.start[wait]))
    if not len(source) or not len(target) or gpu.start[target[0]] + CLOCK_SLOP < gpu.end[source[-1]]:
        return None
    return StreamWait(int(source[-1]), int(target[0]))


# ---- A host thread's time as stretches, and the handovers between threads.

# A silence shorter than this is the host's own time between ops, not a wait.
LEAST_SILENCE = 20_000
# The other thread's work must fill this share of the silence, and end within this share of its end.
LEAST_FILLED = 0.5
LARGEST_REST = 0.25


@dataclass(frozen=True, eq=False)
class Stretches:
    """Consecutive pieces of every thread's time, by thread; `owner` is the innermost host event there, or -1."""

    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    owner: NDArray[np.int32]
    thread: NDArray[np.int32]
    first: NDArray[np.int32]  # the first stretch within each host event
    longest: NDArray[np.int32]  # the longest stretch each host event owns, or -1

    def __len__(self) -> int:
        return len(self.lo)


@dataclass(frozen=True)
class Handover:
    """Stretch `after` began when another thread had finished stretch `before`; `silence` is the wait's own stretch."""

    before: int
    after: int
    silence: int  # -1 when `after` is its thread's first


def stretches(host: HostEvents) -> Stretches:
    """All threads' time, piece by piece."""
    lo, hi, owner = calltree.stretches(host.thread, host.start, host.end, host.parent)
    thread = np.empty(len(lo), np.int32)
    # a silence between two events belongs to the thread of the next one
    own = owner >= 0
    following = np.flatnonzero(own)[np.searchsorted(np.flatnonzero(own), np.arange(len(lo)))] if own.any() else owner
    thread[:] = host.thread[owner[following]] if own.any() else 0
    first = np.full(len(host), -1, np.int32)
    pieces = np.flatnonzero(own)[::-1]
    first[owner[pieces]] = pieces
    longest = np.full(len(host), -1, np.int32)
    by_length = pieces[np.argsort((hi - lo)[pieces], kind="stable")]
    longest[owner[by_length]] = by_length
    return Stretches(lo, hi, owner, thread, _inherited(host, first), longest)


def _inherited(host: HostEvents, first: NDArray[np.int32]) -> NDArray[np.int32]:
    """An event wholly covered by its children starts where its first child does."""
    for i in range(len(host) - 1, -1, -1):
        p = host.parent[i]
        if p >= 0 and (first[p] < 0 or first[i] < first[p]):
            first[p] = first[i]
    return first


def handovers(host: HostEvents, s: Stretches) -> list[Handover]:
    """Which silences were waits for another thread."""
    silent = s.owner < 0
    silent |= np.where(s.owner >= 0, host.kind[s.owner] == HostKind.ANNOTATION, False)
    quiet = {int(t): _quiet(s, silent, np.flatnonzero(s.thread == t)) for t in np.unique(s.thread)}
    # a thread that only polls the runtime (a watchdog) hands nothing over
    working = {t: q for t, q in quiet.items() if (host.kind[host.thread == t] == HostKind.OP).any()}
    result: list[Handover] = []
    for thread, q in quiet.items():
        for k in np.flatnonzero((q.following >= 0) & (q.hi - q.lo >= LEAST_SILENCE)):
            lo, hi = int(q.lo[k]), int(q.hi[k])
            fell = [f for other, theirs in working.items() if other != thread and (f := theirs.fell_within(lo, hi))]
            if fell:
                result.append(Handover(max(fell)[1], int(q.following[k]), int(q.index[k])))
    return result


@dataclass(frozen=True, eq=False)
class _Quiet:
    """One thread's silences in order, the times before its first event and after its last among them."""

    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    index: NDArray[np.int64]  # the silence's own stretch, or -1
    before: NDArray[np.int64]  # the stretch before it, or -1
    following: NDArray[np.int64]  # the stretch after it, or -1

    def fell_within(self, lo: int, hi: int) -> tuple[int, int] | None:
        """The (time, last stretch) at which the thread fell silent within (lo, hi], if it still is at hi."""
        k = int(np.searchsorted(self.lo, hi, side="right")) - 1
        if k < 0 or self.lo[k] <= lo or self.hi[k] < hi or self.before[k] < 0:
            return None
        fell, since = int(self.lo[k]), max(lo, int(self.hi[0]))
        length = hi - since
        around = int(np.searchsorted(self.lo, since, side="right")) - 1  # the silence it may be in at `since`
        woke = max(since, int(self.hi[around]))
        if fell - woke < LEAST_FILLED * length or hi - fell > LARGEST_REST * length:
            return None
        return fell, int(self.before[k])


def _quiet(s: Stretches, silent: NDArray[np.bool_], on: NDArray[np.int64]) -> _Quiet:
    first, last, quiet = on[:1], on[-1:], on[silent[on]]
    none = np.array([-1])
    long_ago, forever = np.array([-1 << 62]), np.array([1 << 62])
    return _Quiet(
        lo=np.concatenate([long_ago, s.lo[quiet], s.hi[last]]),
        hi=np.concatenate([s.lo[first], s.hi[quiet], forever]),
        index=np.concatenate([none, quiet, none]),
        before=np.concatenate([none, np.where(quiet > first, quiet - 1, -1), last]),
        following=np.concatenate([first, np.where(quiet < last, quiet + 1, -1), none]),
    )
