"""Collectives of ranks without a GPU (gloo): what their worker threads did, as events of lanes of their own.

The profiler shows such a collective as a region `gloo:all_reduce` on a worker thread, from when the worker took it up
until it was over; the waiting for other ranks is in it, as in a NCCL kernel. The thread that asked for it goes on, and
later sits idle until it is over. So a lifted trace looks like one with a GPU: the worker's regions are in `gpu`, each
worker a stream, `launch` the operator that asked (`c10d::allreduce_`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from presage.traces.trace import (
    HOST_DEVICE,
    Collective,
    GpuEvents,
    GpuKind,
    HostEvents,
    HostKind,
    Step,
    Trace,
    TraceStream,
)
from presage.traces.waits import Blocked, Stretches, stretches

PREFIX = "gloo:"
ASKED = re.compile(r"^c10d::_?(\w+)$")
WAITING_OP = re.compile(r"^(_?c10d_functional::wait_tensor|c10d::(barrier|monitored_barrier_))$")

# An idle time shorter than this is the thread's own.
LEAST_WAIT = 50_000
# How far from the end of a wait the collective's end may lie, as a share of the wait. Later ends count too: a worker
# that has woken the waiting thread may have to wait for a core itself before it stamps its end.
LARGEST_REST = 0.25

# Of two collectives begun within this time by two workers, the one that was over first is taken to be the one asked for
# first: when a worker began may be stamped late.
BEGUN_TOGETHER = 200_000

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def lifted(trace: Trace) -> Trace:
    """The trace with the collectives of its worker threads as events of their own. One with a GPU stays as it is."""
    if len(trace.gpu):
        return trace
    host = trace.host
    named = np.array([n.startswith(PREFIX) for n in trace.names], np.bool_)
    work = np.flatnonzero(named[host.name] & (host.parent < 0) & (host.kind != HostKind.CALL))
    if not len(work):
        return trace
    work = work[np.lexsort((host.start[work], host.thread[work]))]
    rest, moved, thread = _without(host, work)
    gpu = _events(trace, work, moved)
    there = np.flatnonzero(moved >= 0)
    kept = replace(
        trace,
        threads=tuple(t for t, n in zip(trace.threads, thread, strict=True) if n >= 0),
        streams=tuple(TraceStream(HOST_DEVICE, i) for i in range(len(np.unique(gpu.stream)))),
        host=rest,
        gpu=gpu,
        steps=tuple(Step(s.name, int(thread[s.thread]), s.start, s.end) for s in trace.steps),
        collectives={i: _collective(trace, int(e)) for i, e in enumerate(work)},
        forward_of=_moved(trace.forward_of[there], moved),
    )
    return _ended_when_woken(kept)


def _without(host: HostEvents, work: Ints) -> tuple[HostEvents, Ints, Ints]:
    """The other host events, where each went (-1: nowhere), and the new number of each thread (-1: nothing left)."""
    gone = np.zeros(len(host), np.bool_)
    gone[work] = True
    gone = host.outermost(gone) >= 0
    moved = np.where(gone, -1, np.cumsum(~gone) - 1)
    left = {f.name: getattr(host, f.name)[~gone] for f in fields(HostEvents)}
    busy = np.bincount(left["thread"], minlength=int(host.thread.max()) + 1) > 0
    thread = np.where(busy, np.cumsum(busy) - 1, -1)
    left["thread"] = thread[left["thread"]].astype(np.int32)
    left["parent"] = _moved(left["parent"], moved)
    return HostEvents(**left), moved, thread


def _moved(index: NDArray[np.int32], moved: Ints) -> NDArray[np.int32]:
    """Indices into host events after some have gone; -1 stays."""
    return np.where(index >= 0, moved[index], -1).astype(np.int32)


def _events(trace: Trace, work: Ints, moved: Ints) -> GpuEvents:
    host, none = trace.host, np.full(len(work), -1, np.int64)
    return GpuEvents(
        kind=np.full(len(work), GpuKind.KERNEL, np.int8),
        name=host.name[work],
        stream=np.unique(host.thread[work], return_inverse=True)[1].astype(np.int32),
        start=host.start[work],
        end=host.end[work],
        correlation=none,
        bytes=none,
        launch=_moved(_requested(trace, work), moved),
    )


def _requested(trace: Trace, work: Ints) -> NDArray[np.int32]:
    """The operator that asked for each collective, or -1: workers take them up in the order they were asked for."""
    host = trace.host
    asking: dict[str, list[int]] = defaultdict(list)
    for i in np.argsort(host.start, kind="stable"):
        if said := ASKED.match(trace.host_name(i)):
            asking[_kind(said.group(1))].append(int(i))
    out = np.full(len(work), -1, np.int32)
    kinds = [_kind(trace.host_name(e).removeprefix(PREFIX)) for e in work]
    for kind in dict.fromkeys(kinds):
        own = np.array([i for i, k in enumerate(kinds) if k == kind])
        out[own] = _in_order(host, asking[kind], work[own])
    return out


def _in_order(host: HostEvents, asked: Sequence[int], work: Ints) -> NDArray[np.int32]:
    """Which of the askers, in order, each collective belongs to: the first left that asked before it was begun."""
    out = np.full(len(work), -1, np.int32)
    queue, by_start = list(asked), np.argsort(host.start[work], kind="stable")
    for place in by_start:
        if queue and host.start[queue[0]] <= host.start[work[place]]:
            out[place] = queue.pop(0)
    for a, b in pairwise(by_start):
        together = host.start[work[b]] - host.start[work[a]] <= BEGUN_TOGETHER and out[b] >= 0
        if together and host.start[out[b]] <= host.start[work[a]] and host.end[work[b]] < host.end[work[a]]:
            out[a], out[b] = out[b], out[a]
    return out


def _kind(name: str) -> str:
    """`all_reduce` and `allreduce_` are the same, as are `_allgather_base_` and `all_gather`."""
    return name.replace("_", "").removesuffix("base").replace("coalesced", "")


def _collective(trace: Trace, event: int) -> Collective:
    return Collective(trace.host_name(event), 0, 0, "", "", trace.world or 0, "")


def _ended_when_woken(trace: Trace) -> Trace:
    """The trace in which no collective lasts longer than the thread that waited for it did."""
    s = stretches(trace.host)
    end = trace.gpu.end.copy()
    for b in waits(trace, s):
        for event in b.events:
            end[event] = min(end[event], max(int(s.hi[b.stretch]), int(trace.gpu.start[event])))
    return replace(trace, gpu=replace(trace.gpu, end=end))


def waits(trace: Trace, s: Stretches) -> list[Blocked]:
    """The idle times of host threads that ended with a collective they had asked for before."""
    host, gpu = trace.host, trace.gpu
    idle = np.flatnonzero(_idle(trace, s) & (s.hi - s.lo >= LEAST_WAIT))
    asked = np.flatnonzero(gpu.launch >= 0)
    since = host.start[gpu.launch[asked]]
    found = (_wait(gpu, asked[(since < s.hi[i]) & (gpu.end[asked] > s.lo[i])], s, int(i)) for i in idle)
    return [b for b in found if b is not None]


def _idle(trace: Trace, s: Stretches) -> Bools:
    """Stretches in which no operator runs, or one whose only work is to wait."""
    host = trace.host
    waiting = np.array([WAITING_OP.match(n) is not None for n in trace.names], np.bool_)[host.name]
    idle: Bools = np.where(s.owner >= 0, (host.kind == HostKind.ANNOTATION)[s.owner] | waiting[s.owner], True)
    return idle


def _wait(gpu: GpuEvents, pending: Sequence[int] | Ints, s: Stretches, stretch: int) -> Blocked | None:
    """What of the pending collectives the idle thread waited for: all that ended meanwhile, if the last woke it."""
    until, length = int(s.hi[stretch]), int(s.hi[stretch] - s.lo[stretch])
    events = [int(e) for e in pending if gpu.start[e] < until]
    near = [e for e in events if abs(int(gpu.end[e]) - until) <= LARGEST_REST * length]
    if not near:
        return None
    over = [e for e in events if gpu.end[e] <= until]
    awaited = over if set(over) & set(near) else [min(near, key=lambda e: int(gpu.end[e]))]
    return Blocked(stretch, tuple(awaited), False, max(0, until - max(int(gpu.end[e]) for e in awaited)))
