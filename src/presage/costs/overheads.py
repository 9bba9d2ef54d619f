"""Host overheads of a trace: what the host spends around, inside and between ops, as values with their spread.

An op is an operator event with no operator around it on its thread; annotations, and the markers old profilers wrote
as operators (`ProfilerStep#3`, `Optimizer.step#SGD.step`), are regions. A launch is a call that GPU work links to, the
innermost where calls nest. The time of a thread is cut without remainder into segments:

    T1       from an op's end to the next op's start in the same region (key: the next op)
    T2       from an op's start to its first launch (key: the op, without the autograd engine's wrapper)
    T3       from the last launch's end to the op's end (key: the op)
    T4       the launch call itself, as measured (key: the call)
    T5       from one launch to the next within an op (key: the op)
    ALONE    an op that launches nothing, whole (key: the op); where five overheads are all there is, it is in T5
    REGION   from an op to the next across a region's border (key: the region the next op is in), and the time a thread
             spends in regions before its first op and after its last
    SILENCE  between ops, waiting for another thread (key: the next op)
    BLOCKED  a call's wait for the GPU (key: the call): a launch that waited is here whole and not in T4; any other call
             that waited is taken out of the segment it is in

so T2 + T3 + T4s + T5s + BLOCKED is an op's duration and all kinds together are a thread's span, to the nanosecond.
A call that launches nothing is part of the segment it is in. A launch outside any op stands for an op that is all T4.
Threads with neither ops nor launches (the watchdog of a collective library) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError, PresageError
from presage.traces import threads, waits
from presage.traces.trace import HostEvents, HostKind, Trace

NS = 1e-9
US = 1e-6
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ENGINE = "autograd::engine::evaluate_function: "
BACKWARD = (ENGINE, "torch::autograd::AccumulateGrad")
MARKER = re.compile(r"ProfilerStep|Optimizer\.|enumerate\(|DistributedDataParallel\.|##")
NO_REGION = "(no region)"


class Kind(IntEnum):
    T1 = 1
    T2 = 2
    T3 = 3
    T4 = 4
    T5 = 5
    ALONE = 6
    REGION = 7
    SILENCE = 8
    BLOCKED = 9


class Role(IntEnum):
    MAIN = 0
    AUTOGRAD = 1
    OTHER = 2


@dataclass(frozen=True, eq=False)
class Segments:
    """A trace's host time cut up, by thread and time."""

    kind: NDArray[np.int8]
    thread: Ints
    lo: Ints
    hi: Ints
    name: Ints  # index into the trace's names: what the key is made of, -1 for no region
    unit: Ints  # the op (or launch outside ops) it is a part of, a host event; -1 between ops
    events: Ints  # host events that the profiler recorded in it
    blocked: Ints  # nanoseconds of it in which a call waited for the GPU

    def __len__(self) -> int:
        return len(self.kind)


def segments(trace: Trace) -> Segments:
    """Cut the time of every thread that has ops."""
    host = trace.host
    launch = _launches(trace)
    marks = np.array([bool(MARKER.match(n)) for n in trace.names], np.bool_)
    op = (host.kind == HostKind.OP) & ~marks[host.name]
    unit = _outermost(host, op | launch)
    s = threads.stretches(host)
    blocked = np.array([b.stretch for b in waits.blocking_calls(trace, s)], np.int64)
    silent = np.array([h.silence for h in threads.handovers(host, s) if h.silence >= 0], np.int64)
    parts = []
    for t in np.unique(host.thread[unit[unit >= 0]]):
        lo, hi = np.searchsorted(host.thread, [t, t + 1])
        cut = _Thread(host, np.arange(lo, hi), unit, launch)
        cut.silence(s, silent[s.thread[silent] == t])
        cut.block(s, blocked[s.thread[blocked] == t])
        parts.append(cut.rows)
    columns = {f.name: np.concatenate([p[f.name] for p in parts] or [np.empty(0, np.int64)]) for f in fields(Segments)}
    return Segments(**{**columns, "kind": columns["kind"].astype(np.int8)})


def _launches(trace: Trace) -> Bools:
    """The calls that GPU work links to, without those that such calls are nested in."""
    linked = np.unique(trace.gpu.launch[trace.gpu.launch >= 0]).astype(np.int64)
    found = np.zeros(len(trace.host), np.bool_)
    found[linked] = True
    for around in _ancestors(trace.host, trace.host.parent[linked]):
        found[around[around >= 0]] = False
    return found


def _outermost(host: HostEvents, wanted: Bools) -> Ints:
    """For each event the outermost wanted one around it (or itself), or -1."""
    out = np.full(len(host), -1, np.int64)
    for around in _ancestors(host, np.arange(len(host))):
        hit = (around >= 0) & wanted[around]
        out[hit] = around[hit]
    return out


def _ancestors(host: HostEvents, events: NDArray[Any]) -> Iterator[Ints]:
    """The events, then their parents, and so on until all are past the root (-1)."""
    while (events >= 0).any():
        yield events
        events = np.where(events >= 0, host.parent[events], -1)


class _Thread:
    """The segments of one thread."""

    def __init__(self, host: HostEvents, mine: Ints, unit: Ints, launch: Bools) -> None:
        self.host = host
        units = mine[unit[mine] == mine]
        calls = mine[launch[mine]]
        # rounded clocks make neighbours overlap now and then: the later one then starts where the earlier one ends
        self.hi = np.maximum.accumulate(host.end[units])
        self.lo = np.maximum(host.start[units], _shifted(self.hi, host.start[units[0]]))
        rows = [*self._inside(units, calls, np.searchsorted(units, unit[calls])), *self._between(mine, units)]
        columns = [np.concatenate(c) for c in zip(*(np.broadcast_arrays(*r) for r in rows), strict=True)]
        order = np.lexsort((columns[2], columns[1]))
        self.rows = dict(zip(("kind", "lo", "hi", "name", "unit", "events"), (c[order] for c in columns), strict=True))
        self.rows["thread"] = np.full(len(order), host.thread[mine[0]], np.int64)
        self.rows["blocked"] = np.zeros(len(order), np.int64)
        nested = mine[(unit[mine] != mine) & ~launch[mine]]
        self.rows["events"] += np.bincount(self._at(host.start[nested]), minlength=len(order))

    def _inside(self, units: Ints, calls: Ints, of: Ints) -> Iterator[tuple[Any, ...]]:
        """Rows (kind, lo, hi, name, unit, events) of the segments in units; `of` is each call's unit by number."""
        host, lo, hi = self.host, self.lo, self.hi
        to = np.maximum.accumulate(np.clip(host.end[calls], lo[of], hi[of]))
        start = np.maximum(np.clip(host.start[calls], lo[of], hi[of]), _shifted(to, 0)) if len(calls) else to
        count = np.bincount(of, minlength=len(units))
        first = np.cumsum(count) - count
        some, none = np.flatnonzero(count), np.flatnonzero(count == 0)
        last = np.append(of[1:] != of[:-1], True)[: len(of)]
        until = np.where(last, hi[of], np.append(start[1:], 0)[: len(of)])
        op, name = host.kind[units] == HostKind.OP, host.name
        some, after = some[op[some]], np.flatnonzero(op[of])
        owner = units[of[after]]
        yield Kind.ALONE, lo[none], hi[none], name[units[none]], units[none], 0
        yield Kind.T2, lo[some], start[first[some]], name[units[some]], units[some], 0
        yield Kind.T4, start, to, name[calls], units[of], (host.kind[units[of]] == HostKind.OP).astype(np.int64)
        yield np.where(last, Kind.T3, Kind.T5)[after], to[after], until[after], name[owner], owner, 0

    def _between(self, mine: Ints, units: Ints) -> Iterator[tuple[Any, ...]]:
        """Rows of the segments between units. The profiler's record of a unit begins before it: it counts here."""
        host = self.host
        region, name = host.parent[units], np.append(host.name, -1)
        same = region[1:] == region[:-1]
        key = np.where(same, name[units[1:]], name[region[1:]])
        yield np.where(same, Kind.T1, Kind.REGION), self.hi[:-1], self.lo[1:], key, -1, 1
        ends = max(int(host.end[mine].max()), int(self.hi[-1]))
        yield Kind.REGION, host.start[mine[:1]], self.lo[:1], name[region[:1]], -1, 1
        yield Kind.REGION, self.hi[-1:], np.array([ends]), name[region[-1:]], -1, 0

    def _at(self, times: Ints) -> Ints:
        """The segment at each time: of several that start then, the longest."""
        return np.maximum(np.searchsorted(self.rows["lo"], times, side="right") - 1, 0)

    def silence(self, s: threads.Stretches, silent: Ints) -> None:
        at = self._at((s.lo[silent] + s.hi[silent]) // 2)
        at = at[np.isin(self.rows["kind"][at], (Kind.T1, Kind.REGION))]
        self.rows["kind"][at] = Kind.SILENCE

    def block(self, s: threads.Stretches, blocked: Ints) -> None:
        rows, lo, hi = self.rows, s.lo[blocked], s.hi[blocked]
        at = self._at((lo + hi) // 2)
        launch = rows["kind"][at] == Kind.T4
        rows["kind"][at[launch]] = Kind.BLOCKED
        rest = at[~launch]
        waited = np.minimum(hi[~launch], rows["hi"][rest]) - np.maximum(lo[~launch], rows["lo"][rest])
        np.add.at(rows["blocked"], rest, waited)


def _shifted(values: Ints, first: Any) -> Ints:
    return np.append(first, values[:-1]).astype(np.int64)
