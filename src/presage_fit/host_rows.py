"""A traced step beside its captured graph: host time observed, row by row, and the terms that should add up to it.

The outermost ops of the trace are matched in order with the units of the graph, each thread by itself. A matched pair
gives two rows, the time before it and its own; what either side has in between goes into one row with the next pair, so
that every nanosecond and every op of the step is in some row. Waits for the GPU are taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import numpy as np

from presage.costs.host_units import Term, Unit, ending, extra_launches, terms, units
from presage.graph.graph import Graph
from presage.traces import threads, waits
from presage.traces.trace import HostKind, Step, Trace
from presage.whatif.transplant import innermost_op

__all__ = ["Row", "TracedUnit", "launch_calls", "rows", "share_found", "traced_units"]

# A call that waited still takes this long by itself.
LEAST_CALL_NS = 5_000


@dataclass(frozen=True)
class TracedUnit:
    """An outermost op of a trace, with all that is in it; nanoseconds."""

    name: str
    thread: str
    start: int
    end: int
    waited: int  # for the GPU, in calls inside it
    events: int  # recorded inside it, itself included
    launched: Mapping[str, int]  # launches, by the innermost op
    first_launch: int  # when its first launch call began
    last_launch: int  # when its last launch call ended

    @property
    def launches(self) -> int:
        return sum(self.launched.values())


@dataclass(frozen=True)
class Row:
    """Host time observed, in microseconds, and the terms of the ops that ran in it."""

    thread: str
    us: float
    events: int  # recorded by the profiler meanwhile
    terms: Mapping[str, float]


def rows(graph: Graph, trace: Trace, step: Step) -> list[Row]:
    """The rows of one traced step."""
    seen, mine = traced_units(trace, step), units(graph)
    given = _terms_by_unit(graph, mine)
    out: list[Row] = []
    last, last_seen, since = -1, -1, step.start
    for u, t in _matched(graph, mine, seen):
        unit, skipped = seen[t], seen[last_seen + 1 : t]
        left = [term for k in range(last + 1, u) for part in given[k] for term in part]
        before, own = given[u]
        own = [*own, *_extra(graph, mine[u], unit)]
        gap = unit.start - since - sum(s.waited for s in skipped)
        within, events = unit.end - unit.start - unit.waited, 1 + sum(s.events for s in skipped)
        if left or any(s.launches or s.thread == "main" for s in skipped):
            out.append(_row(unit.thread, gap + within, events + unit.events - 1, [*left, *before, *own]))
        else:
            out.append(_row(unit.thread, gap, events, before))
            out.append(_row(unit.thread, within, unit.events - 1, own))
        last, last_seen, since = u, t, unit.end
    left = [term for k in range(last + 1, len(mine)) for part in given[k] for term in part]
    events = sum(s.events for s in seen[last_seen + 1 :])
    return [*out, _row("main", step.end - since, events, [*left, *ending(mine)])]


def share_found(graph: Graph, trace: Trace, step: Step) -> float:
    """The share of the graph's units that the trace has: where it is low, rows do not belong to their terms."""
    mine = units(graph)
    return len([*_matched(graph, mine, traced_units(trace, step))]) / max(1, len(mine))


def _row(thread: str, ns: int, events: int, found: Iterable[Term]) -> Row:
    total: dict[str, float] = {}
    for key, times in found:
        total[key] = total.get(key, 0.0) + times
    return Row(thread, max(ns, 0) * 1e-3, events, {k: v for k, v in total.items() if v})


def _terms_by_unit(graph: Graph, found: Sequence[Unit]) -> list[tuple[list[Term], list[Term]]]:
    by_op = {i: (before, own) for i, before, own in terms(graph, found)}
    return [([t for i in u.ops for t in by_op[i][0]], [t for i in u.ops for t in by_op[i][1]]) for u in found]


def _extra(graph: Graph, unit: Unit, seen: TracedUnit) -> Iterator[Term]:
    """Launches of the unit beyond one for each of its ops."""
    for name, launches in seen.launched.items():
        ops = sum(graph.ops[i].kernels and graph.ops[i].name == name for i in unit.ops)
        if ops:
            yield from extra_launches(name, launches, ops)


def _matched(graph: Graph, mine: Sequence[Unit], seen: Sequence[TracedUnit]) -> Iterator[tuple[int, int]]:
    """Places of matched units, in order on both sides."""
    pairs: list[tuple[int, int]] = []
    for thread in ("main", "autograd"):
        ours = [k for k, u in enumerate(mine) if u.thread == thread]
        theirs = [k for k, u in enumerate(seen) if u.thread == thread]
        numbers: dict[tuple[str, bool], int] = {}
        a = [numbers.setdefault((seen[k].name, seen[k].launches > 0), len(numbers)) for k in theirs]
        b = [numbers.setdefault((mine[k].name, _launches(graph, mine[k])), len(numbers)) for k in ours]
        for m in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            pairs += [(ours[m.b + k], theirs[m.a + k]) for k in range(m.size)]
    last = -1
    for u, t in sorted(pairs):
        if t > last:
            yield u, t
            last = t


def _launches(graph: Graph, unit: Unit) -> bool:
    return any(graph.ops[i].kernels for i in unit.ops)


@dataclass
class _Open:
    """A traced unit being read."""

    event: int
    waited: int = 0
    events: int = 0
    launched: dict[str, int] = field(default_factory=dict)
    first: int = 0
    last: int = 0


def traced_units(trace: Trace, step: Step) -> list[TracedUnit]:
    """The outermost ops of a step, in order of time."""
    host, waited = trace.host, _waits(trace)
    linked = set(trace.gpu.launch[trace.gpu.launch >= 0].tolist())
    inner, names = innermost_op(trace), [trace.names[k] for k in host.name.tolist()]
    unit: dict[int, _Open] = {}
    for i in np.flatnonzero((host.start >= step.start) & (host.start < step.end)).tolist():
        inside = unit.get(int(host.parent[i]))
        if host.kind[i] == HostKind.ANNOTATION or (inside is None and host.kind[i] != HostKind.OP):
            continue
        unit[i] = u = inside or _Open(i)
        u.events += 1
        u.waited += waited.get(i, 0)
        if i in linked:
            name = names[inner[i]]
            u.launched[name] = u.launched.get(name, 0) + 1
            u.first, u.last = u.first or int(host.start[i]), int(host.end[i])
    found = {id(u): u for u in unit.values()}.values()
    return sorted((_closed(trace, step, u) for u in found), key=lambda u: u.start)


def _closed(trace: Trace, step: Step, u: _Open) -> TracedUnit:
    host = trace.host
    thread = "main" if host.thread[u.event] == step.thread else "autograd"
    start, end = int(host.start[u.event]), int(host.end[u.event])
    name = trace.host_name(u.event)
    return TracedUnit(name, thread, start, end, u.waited, u.events, u.launched, u.first, u.last)


def _waits(trace: Trace) -> dict[int, int]:
    """Nanoseconds that calls waited for the GPU, by host event."""
    s = threads.stretches(trace.host)
    out: dict[int, int] = {}
    for b in waits.blocking_calls(trace, s):
        owner, took = int(s.owner[b.stretch]), int(s.hi[b.stretch] - s.lo[b.stretch])
        out[owner] = out.get(owner, 0) + max(0, took - max(b.tail, LEAST_CALL_NS))
    return out


def launch_calls(found: Sequence[TracedUnit]) -> tuple[list[float], list[float]]:
    """Of units with one launch that did not wait: microseconds of the call, and the share of the rest before it."""
    alone = [u for u in found if u.launches == 1 and not u.waited]
    calls = [(u.last_launch - u.first_launch) * 1e-3 for u in alone]
    rest = [(u.first_launch - u.start) / max(1, u.end - u.start - u.last_launch + u.first_launch) for u in alone]
    return calls, rest
