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
    SILENCE  between ops, waiting for another thread (key: the next op or region)
    BLOCKED  a call's wait for the GPU (key: the call): a launch that waited is here whole and not in T4; any other call
             that waited is taken out of the segment it is in

so T2 + T3 + T4s + T5s + BLOCKED is an op's duration and all kinds together are a thread's span, to the nanosecond.
A call that launches nothing is part of the segment it is in; a launch outside any op is an op that is all T4; threads
with neither ops nor launches (the watchdog of a collective library) are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.files import write_whole
from presage.traces import waits
from presage.traces.trace import HostEvents, HostKind, Trace

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Kind = IntEnum("Kind", "T1 T2 T3 T4 T5 ALONE REGION SILENCE BLOCKED")
Role = IntEnum("Role", "MAIN AUTOGRAD OTHER")

NS, US = 1e-9, 1e-6
ANY = "*"  # the key that stands for all keys of its kind and role together
NO_REGION = "(no region)"
COUNTS = ("n", "cut")  # of the values of an Overhead
BACKWARD = ("autograd::engine::evaluate_function: ", "torch::autograd::AccumulateGrad")
MARKER = re.compile(r"ProfilerStep|Optimizer\.|enumerate\(|DistributedDataParallel\.|##")
NOT_IN_KEY = re.compile(r"^autograd::engine::evaluate_function: |(?<=^ProfilerStep)#.*")
# Samples beyond this many interquartile ranges from the quartiles are cut. The range counts as no less than the tick of
# the coarsest clocks, or where most samples are equal those one tick away would go.
CUT, LEAST_RANGE = 1.5, 1 * US
# Host time without the profiler over host time with it: the median of 12 and of 33 host-bound steps of an H200, each
# measured both ways (0.709, 0.699; tools/compare_hosts.py), traced with shapes. Stacks, and no shapes: steps of a small
# transformer on a CPU (PyTorch 2.13), against those traced with shapes.
UNPROFILED, STACKS, NO_SHAPES = 0.70, 0.90, 1 / 0.83


@dataclass(frozen=True, eq=False)
class Segments:
    """A trace's host time cut up. BLOCKED waits of calls that launch nothing lie within other segments."""

    kind: Ints
    thread: Ints
    lo: Ints
    hi: Ints
    name: Ints  # index into the trace's names: what the key is made of, -1 for no region
    unit: Ints  # the op (or launch outside ops) it is a part of, a host event; -1 between ops
    events: Ints  # host events that the profiler recorded in it
    blocked: Ints  # nanoseconds of it that a BLOCKED segment accounts for

    @property
    def ns(self) -> Ints:
        return self.hi - self.lo - self.blocked


def segments(trace: Trace) -> Segments:
    """Cut the time of every thread that has ops or launches."""
    host = trace.host
    launch = _launches(trace)
    marker = np.array([bool(MARKER.match(n)) for n in trace.names], np.bool_)
    unit = host.outermost(launch | ((host.kind == HostKind.OP) & ~marker[host.name]))
    s = waits.stretches(host)
    blocked = np.array([b.stretch for b in waits.blocking_calls(trace, s)], np.int64)
    silent = np.array([h.silence for h in waits.handovers(host, s) if h.silence >= 0], np.int64)
    parts = [Segments(*[np.empty(0, np.int64)] * 8)]
    for t in np.unique(host.thread[unit[unit >= 0]]):
        lo, hi = np.searchsorted(host.thread, [t, t + 1])
        cut = _thread(host, np.arange(lo, hi), unit, launch)
        cut = _with_silence(cut, s, silent[s.thread[silent] == t])
        parts += _with_waits(cut, host, s, blocked[s.thread[blocked] == t])
    return Segments(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Segments)))


def _launches(trace: Trace) -> Bools:
    """The calls that GPU work links to, without those that such calls are nested in."""
    linked = np.unique(trace.gpu.launch[trace.gpu.launch >= 0])
    result = np.zeros(len(trace.host), np.bool_)
    result[linked] = True
    for around in trace.host.ancestors(trace.host.parent[linked]):
        result[around[around >= 0]] = False
    return result


def _thread(host: HostEvents, mine: Ints, unit: Ints, launch: Bools) -> Segments:
    """The segments of one thread, in order of time, as if no call and no gap were a wait."""
    units, calls = mine[unit[mine] == mine], mine[launch[mine]]
    # rounded clocks make neighbours overlap now and then: the later one then starts where the earlier one ends
    hi = np.maximum.accumulate(host.end[units])
    lo = np.maximum(host.start[units], _before(hi))
    rows = [*_inside(host, units, lo, hi, calls, np.searchsorted(units, unit[calls]))]
    rows += _between(host, mine, units, lo, hi)
    columns = [np.concatenate(c) for c in zip(*(np.broadcast_arrays(*r) for r in rows), strict=True)]
    order = np.lexsort((columns[2], columns[1]))
    kind, starts, ends, name, owner, events = (c[order].astype(np.int64) for c in columns)
    nested = mine[(unit[mine] != mine) & ~launch[mine]]
    events += np.bincount(_at(starts, host.start[nested]), minlength=len(order))
    thread, none = np.full(len(order), host.thread[mine[0]], np.int64), np.zeros(len(order), np.int64)
    return Segments(kind, thread, starts, ends, name, owner, events, none)


def _inside(host: HostEvents, units: Ints, lo: Ints, hi: Ints, calls: Ints, of: Ints) -> Iterator[tuple[Any, ...]]:
    """Rows (kind, lo, hi, name, unit, events) of the segments in units. `of` is each launch's unit, by place."""
    to = np.maximum.accumulate(np.clip(host.end[calls], lo[of], hi[of]))
    start = np.maximum(np.clip(host.start[calls], lo[of], hi[of]), _before(to))
    first, last = _before(of) != of, np.append(of[1:], -1)[: len(of)] != of
    until = np.where(last, hi[of], np.append(start[1:], 0)[: len(of)])
    none, op = np.setdiff1d(np.arange(len(units)), of), host.kind[units[of]] == HostKind.OP
    yield Kind.ALONE, lo[none], hi[none], host.name[units[none]], units[none], 0
    yield Kind.T4, start, to, host.name[calls], units[of], 1
    head, owner, name = first & op, units[of], host.name[units[of]]
    yield Kind.T2, lo[of[head]], start[head], name[head], owner[head], 0
    yield np.where(last, Kind.T3, Kind.T5)[op], to[op], until[op], name[op], owner[op], 0


def _between(host: HostEvents, mine: Ints, units: Ints, lo: Ints, hi: Ints) -> Iterator[tuple[Any, ...]]:
    """Rows of the segments between units. What it costs to record an op is spent mostly before it: it counts here."""
    region, name = host.parent[units], np.append(host.name, -1)
    recorded = (host.kind[units] == HostKind.OP).astype(np.int64)
    same = region[1:] == region[:-1]
    key = np.where(same, name[units[1:]], name[region[1:]])
    yield np.where(same, Kind.T1, Kind.REGION), hi[:-1], lo[1:], key, -1, recorded[1:]
    yield Kind.REGION, host.start[mine[:1]], lo[:1], name[region[:1]], -1, recorded[:1]
    yield Kind.REGION, hi[-1:], np.maximum(hi[-1:], host.end[mine].max()), name[region[-1:]], -1, 0


def _before(values: Ints) -> Ints:
    """Each value's predecessor, the first one's below all."""
    return np.append(np.iinfo(np.int64).min, values)[:-1]


def _at(starts: Ints, times: Ints) -> Ints:
    """The segment at each time: of several that start together, the longest."""
    return np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)


def _with_silence(cut: Segments, s: waits.Stretches, silent: Ints) -> Segments:
    at, kind = _at(cut.lo, (s.lo[silent] + s.hi[silent]) // 2), cut.kind.copy()
    kind[at[np.isin(kind[at], (Kind.T1, Kind.REGION))]] = Kind.SILENCE
    return replace(cut, kind=kind)


def _with_waits(cut: Segments, host: HostEvents, s: waits.Stretches, blocked: Ints) -> tuple[Segments, Segments]:
    """The segments less the waits of calls that launch nothing, and these waits."""
    at, kind, waited = _at(cut.lo, (s.lo[blocked] + s.hi[blocked]) // 2), cut.kind.copy(), cut.blocked.copy()
    launch = cut.kind[at] == Kind.T4
    kind[at[launch]] = Kind.BLOCKED
    at, blocked = at[~launch], blocked[~launch]
    lo, hi = np.maximum(s.lo[blocked], cut.lo[at]), np.minimum(s.hi[blocked], cut.hi[at])
    np.add.at(waited, at, hi - lo)
    none, name = np.zeros(len(at), np.int64), host.name[s.owner[blocked]].astype(np.int64)
    taken = Segments(none + Kind.BLOCKED, cut.thread[at], lo, hi, name, cut.unit[at], none, none)
    return replace(cut, kind=kind, blocked=waited), taken


def roles(trace: Trace, of: Sequence[int]) -> dict[int, Role]:
    """What each of these threads is for. MAIN has the step marks, else it is the busiest without backward ops, else the
    busiest; of the others AUTOGRAD is whichever is named so or has backward ops."""
    backward = np.array([n.startswith(BACKWARD) for n in trace.names], np.bool_)[trace.host.name]
    goes_back = {t: bool(backward[trace.host.thread == t].any()) or "autograd" in trace.threads[t].name for t in of}
    size, marked = np.bincount(trace.host.thread), {step.thread for step in trace.steps}
    main = max(of, key=lambda t: (t in marked, not goes_back[t], size[t]), default=-1)
    return {t: Role.MAIN if t == main else Role.AUTOGRAD if goes_back[t] else Role.OTHER for t in of}


@dataclass(frozen=True)
class TracePlatform:
    """Where overheads were seen. They belong to a GPU, its host and software together, and to how it was recorded."""

    gpus: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()  # file names, without folders
    with_stacks: int = 0  # how many of the traces recorded Python stacks, which slows the host
    with_shapes: int = 0  # and shapes

    def __add__(self, other: TracePlatform) -> TracePlatform:
        gpus = tuple(dict.fromkeys(self.gpus + other.gpus))
        stacks, shapes = self.with_stacks + other.with_stacks, self.with_shapes + other.with_shapes
        return TracePlatform(gpus, self.traces + other.traces, stacks, shapes)

    @property
    def unprofiled(self) -> float:
        """What host time would be without the profiler, as a share of the time with it."""
        count = max(1, len(self.traces))
        recorded: float = STACKS ** (self.with_stacks / count) * NO_SHAPES ** (1 - self.with_shapes / count)
        return UNPROFILED * recorded


@dataclass(frozen=True, eq=False)
class Samples:
    """Single measurements, one a segment, as columns."""

    kind: Ints
    role: Ints
    key: Ints  # index into `keys`
    ns: Ints
    events: Ints  # host events the profiler recorded meanwhile
    keys: tuple[str, ...]
    platform: TracePlatform


def extract(trace: Trace, skip_steps: int = 0) -> Samples:
    """The samples of one trace. The first step pays for the profiler's buffers: skip it where there are others (a trace
    with no more marked steps than that is taken whole)."""
    cut = segments(trace)
    since = trace.steps[skip_steps].start if 0 < skip_steps < len(trace.steps) else trace.span[0]
    seen = (cut.lo >= since) & ((cut.kind != Kind.REGION) | (cut.hi > cut.lo))
    role = roles(trace, np.unique(cut.thread).tolist())
    number = np.array([role.get(t, 0) for t in range(len(trace.threads))], np.int64)[cut.thread]
    keys, key = np.unique([NOT_IN_KEY.sub("", n) for n in trace.names] + [NO_REGION], return_inverse=True)
    kind, number, key, ns, events = (c[seen] for c in (cut.kind, number, key[cut.name], cut.ns, cut.events))
    gpus = tuple(dict.fromkeys(trace.gpus))
    about = TracePlatform(gpus, (Path(trace.path).name,), int(trace.has_stacks), int(bool(trace.shapes)))
    return Samples(kind, number, key, ns, events, tuple(keys.tolist()), about)


def pool(parts: Iterable[Samples]) -> Samples:
    """The samples of several traces as one: every sample weighs the same, whichever trace it came from."""
    parts = list(parts)
    keys = {k: i for i, k in enumerate(sorted({k for p in parts for k in p.keys}))}
    key = np.concatenate([np.array([keys[k] for k in p.keys], np.int64)[p.key] for p in parts])
    kind, role, ns, events = (np.concatenate([getattr(p, c) for p in parts]) for c in ("kind", "role", "ns", "events"))
    return Samples(kind, role, key, ns, events, tuple(keys), sum((p.platform for p in parts), TracePlatform()))


@dataclass(frozen=True)
class Overhead:
    """One overhead, in seconds. All but `cut` and `cut_total` are of the `n` samples kept."""

    n: int
    mean: float
    median: float
    std: float
    mad: float  # median distance from the median
    p10: float
    p90: float
    cut: int  # samples outside [Q1 - 1.5 IQR, Q3 + 1.5 IQR]; none are cut of fewer than 4
    cut_total: float  # seconds in them


def overhead(seconds: NDArray[np.float64]) -> Overhead:
    """Sum up samples."""
    q1, q3 = np.quantile(seconds, [0.25, 0.75])
    reach = CUT * max(q3 - q1, LEAST_RANGE) if len(seconds) >= 4 else np.inf
    keep = (seconds >= q1 - reach) & (seconds <= q3 + reach)
    kept, lost = seconds[keep], seconds[~keep]
    p10, median, p90 = map(float, np.quantile(kept, [0.1, 0.5, 0.9]))
    mean, std, mad = float(kept.mean()), float(kept.std()), float(np.median(np.abs(kept - median)))
    return Overhead(len(kept), mean, median, std, mad, p10, p90, len(lost), float(lost.sum()))


@dataclass(frozen=True)
class Overheads:
    """Overheads by kind, key and thread role."""

    table: Mapping[tuple[Kind, str, Role], Overhead]
    platform: TracePlatform
    per_event_cost: float = 0.0  # seconds already taken off for every event the profiler recorded
    unprofiled: float = 1.0  # what the times were multiplied with, to be those of a host without the profiler

    def without_profiler(self) -> Overheads:
        """What the host would take without the profiler, which slows all of it about alike."""
        share = self.platform.unprofiled
        return replace(self, table={k: _times(x, share) for k, x in self.table.items()}, unprofiled=share)

    def to_toml(self, path: str | Path) -> None:
        write_whole(path, ("\n".join(_toml(self)) + "\n").encode())


def _times(x: Overhead, share: float) -> Overhead:
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    return Overhead(**{k: v if k in COUNTS else v * share for k, v in values.items()})


def overheads(samples: Samples, per_event_cost_ns: float = 0.0) -> Overheads:
    """Sum up samples as seen, or net of the profiler's cost: so much less per event recorded, but never below 0."""
    seconds = np.maximum(samples.ns - per_event_cost_ns * samples.events, 0.0) * NS
    table: dict[tuple[Kind, str, Role], Overhead] = {}
    for kind, role in ((k, r) for k in Kind for r in Role):
        own = np.flatnonzero((samples.kind == kind) & (samples.role == role))
        own = own[np.argsort(samples.key[own], kind="stable")]
        groups = np.split(own, np.flatnonzero(np.diff(samples.key[own])) + 1) if len(own) else []
        table |= {(kind, ANY, role): overhead(seconds[own])} if groups else {}
        table |= {(kind, samples.keys[samples.key[g[0]]], role): overhead(seconds[g]) for g in groups}
    return Overheads(table, samples.platform, per_event_cost_ns * NS)


def _toml(o: Overheads) -> Iterator[str]:
    yield "# Host overheads, without what the profiler costs (unprofiled: the share of the time seen that is kept)."
    yield f"# The key {ANY!r} stands for all keys of its kind and thread role together."
    yield "version = 1"
    yield f"unprofiled = {round(o.unprofiled, 4)}"
    yield f"per_event_cost_us = {_number(o.per_event_cost)}"
    yield f"gpus = [{', '.join(map(_text, o.platform.gpus))}]"
    yield f"traces = [{', '.join(map(_text, o.platform.traces))}]"
    yield f"with_stacks = {o.platform.with_stacks}"
    yield f"with_shapes = {o.platform.with_shapes}"
    section = None
    for (kind, key, role), x in o.table.items():
        if section != (section := (kind, role)):
            yield f"\n[{kind.name}.{role.name.lower()}]"
        yield f"{_text(key)} = {{{', '.join(f'{_unit(f)} = {_number(v)}' for f, v in asdict(x).items())}}}"


def _unit(name: str) -> str:
    return name if name in COUNTS else f"{name}_us"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(round(value / US, 4))


def _text(value: str) -> str:
    """A TOML basic string: JSON's escapes are valid in it, and it wants one more."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
