"""What belongs to what: a kernel to its launch, a backward op to its forward, an event to its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces.trace import HostEvents, HostKind, Step

__all__ = ["FlowArrow", "forward_of", "launches", "steps"]

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
