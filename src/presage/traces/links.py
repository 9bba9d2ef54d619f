"""What belongs to what: a kernel to its launch, a backward op to its forward, an event to its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces.trace import GpuEvents, GpuKind, HostEvents, HostKind, Step, Trace

STEP_PREFIX = "ProfilerStep"


@dataclass(frozen=True)
class FlowArrow:
    """One end of a forward-backward arrow: where on which thread (microseconds as in the file)."""

    begins: bool
    id: str
    thread: int
    ts: float


def launches(host: HostEvents, correlation: NDArray[np.int64]) -> NDArray[np.int32]:
    """For each GPU event the host call with its correlation id, or -1. A graph launch may own many kernels."""
    calls = np.flatnonzero((host.kind == HostKind.CALL) & (host.correlation > 0))
    if not len(calls) or not len(correlation):
        return np.full(len(correlation), -1, np.int32)
    by_id = calls[np.argsort(host.correlation[calls], kind="stable")]
    ids = host.correlation[by_id]
    at = np.searchsorted(ids, correlation).clip(max=len(ids) - 1)
    return np.where((ids[at] == correlation) & (correlation > 0), by_id[at], -1).astype(np.int32)


def forward_of(host: HostEvents, flows: Sequence[FlowArrow], base_us: int) -> NDArray[np.int32]:
    """For each backward op the forward op it differentiates, or -1: by the trace's arrows, else by sequence number."""
    out = np.full(len(host), -1, np.int32)
    begun = {f.id: f for f in flows if f.begins}
    pairs = [(begun[f.id], f) for f in flows if not f.begins and f.id in begun]
    if pairs:
        fwd = _events_at(host, [a for a, _ in pairs], base_us)
        bwd = _events_at(host, [b for _, b in pairs], base_us)
        found = (fwd >= 0) & (bwd >= 0)
        out[bwd[found]] = fwd[found]
        return out
    return _by_sequence(host, out)


def _events_at(host: HostEvents, flows: Sequence[FlowArrow], base_us: int) -> NDArray[np.int32]:
    """The op that starts where the arrow's end is drawn."""
    ops = np.flatnonzero(host.kind == HostKind.OP)
    place = {(int(host.thread[i]), int(host.start[i])): i for i in ops[::-1]}
    return np.array([place.get((f.thread, round((f.ts - base_us) * 1000)), -1) for f in flows], np.int32)


def _by_sequence(host: HostEvents, out: NDArray[np.int32]) -> NDArray[np.int32]:
    """The latest earlier op on another thread with the same sequence number is the forward one."""
    numbered = np.flatnonzero((host.sequence >= 0) & (host.kind == HostKind.OP))
    last: dict[int, int] = {}
    for i in numbered[np.argsort(host.start[numbered], kind="stable")]:
        number = int(host.sequence[i])
        earlier = last.get(number)
        if earlier is not None and host.thread[earlier] != host.thread[i]:
            out[i] = earlier
        elif earlier is None or host.start[i] >= host.end[earlier]:
            last[number] = int(i)
    return out


def steps(host: HostEvents, names: Sequence[str]) -> tuple[Step, ...]:
    """The profiler's step windows, in order. Where several threads carry one, the first wins."""
    ids = [i for i, n in enumerate(names) if n.startswith(STEP_PREFIX)]
    marked = np.flatnonzero(np.isin(host.name, ids) & (host.kind != HostKind.CALL))
    found: dict[str, Step] = {}
    for i in marked[np.argsort(host.start[marked], kind="stable")]:
        name = names[host.name[i]]
        found.setdefault(name, Step(name, int(host.thread[i]), int(host.start[i]), int(host.end[i])))
    return tuple(found.values())


# ---- The small delays of one trace: launch to kernel, kernel to kernel, stream to stream; and the GPU clock's offse

US = 1000

# What these delays are on the V100 to B200 machines seen so far, for traces that have no example of their own.
USUAL_LAUNCH = 6 * US
USUAL_GAP = 1500

# A kernel cannot start sooner than this after its launch call began: below it, the two clocks disagree.
SOONEST_LAUNCH = 2 * US
PLAUSIBLE_SOONEST = 5 * US


@dataclass(frozen=True)
class Latencies:
    """Nanoseconds: from a launch call's start to a start on an idle stream, by kind, and between queued kernels."""

    launch: tuple[int, int, int]
    gap: int

    def of(self, kind: NDArray[np.int8]) -> NDArray[np.int64]:
        return np.array(self.launch, np.int64)[kind]


def earlier_end(gpu: GpuEvents) -> NDArray[np.int64]:
    """The latest end before each event on its stream; far in the past for a stream's first."""
    before = np.full(len(gpu), np.iinfo(np.int64).min // 4)
    for s in np.unique(gpu.stream):
        on = np.flatnonzero(gpu.stream == s)
        before[on[1:]] = np.maximum.accumulate(gpu.end[on])[:-1]
    return before


def latencies(host: HostEvents, gpu: GpuEvents, fewest: int = 5) -> Latencies:
    """Medians where the stream was idle, a trimmed mean where it was queued; the usual ones for want of `fewest`."""
    linked = gpu.launch >= 0
    before = earlier_end(gpu)
    called = np.where(linked, host.start[gpu.launch] if len(host) else 0, 0)
    delay = gpu.start - called
    idle = linked & (called >= before) & (delay > 0) & (delay < 200 * US)
    any_kind = _median(delay[idle], USUAL_LAUNCH, fewest)
    launch = tuple(_median(delay[idle & (gpu.kind == k)], any_kind, fewest) for k in GpuKind)
    gap = gpu.start - before
    queued = linked & (called + 3 * max(launch) < before) & (gap >= 0) & (gap < 10 * US)
    return Latencies((launch[0], launch[1], launch[2]), _trimmed_mean(gap[queued], USUAL_GAP))


def _median(values: NDArray[np.int64], default: int, fewest: int) -> int:
    return int(np.median(values)) if len(values) >= fewest else default


def _trimmed_mean(values: NDArray[np.int64], default: int) -> int:
    if len(values) < 5:
        return default
    return int(values[values <= np.quantile(values, 0.98)].mean())


def gpu_clock_shift(trace: Trace) -> int:
    """Nanoseconds to add to the GPU's times so that no kernel starts before its launch; 0 where the clocks agree."""
    linked = trace.gpu.launch >= 0
    if not linked.any() or trace.cpu_only:
        return 0
    delay = trace.gpu.start[linked] - trace.host.start[trace.gpu.launch[linked]]
    soonest = int(np.quantile(delay, 0.005))
    return 0 if soonest >= SOONEST_LAUNCH else PLAUSIBLE_SOONEST - soonest
