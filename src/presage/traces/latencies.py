"""The small delays of one trace: launch to kernel, kernel to kernel, stream to stream; and the GPU clock's offset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces.trace import GpuEvents, GpuKind, HostEvents, Trace

__all__ = ["Latencies", "earlier_end", "gpu_clock_shift", "latencies"]

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
