"""A traced step beside its captured graph: host time observed, row by row, and the terms that should add up to it.

The outermost ops of the trace are matched in order with the units of the graph, each thread by itself. A matched pair
gives two rows, the time before it and its own; what either side has in between goes into one row with the next pair, so
that every nanosecond and every op of the step is in some row. Waits for the GPU are taken out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.costs.host_model import HostModel
from presage.costs.host_units import HostUnit, Term, extra_launches, host_terms, host_units, named, step_end_terms
from presage.graph.graph import Graph
from presage.traces import waits
from presage.traces.trace import HostKind, Step, Trace

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
class HostRow:
    """Host time observed, in microseconds, and the terms of the ops that ran in it."""

    thread: str
    us: float
    events: int  # recorded by the profiler meanwhile
    terms: Mapping[str, float]


def rows(graph: Graph, trace: Trace, step: Step) -> list[HostRow]:
    """The rows of one traced step."""
    seen, mine = traced_units(trace, step), host_units(graph)
    given = _terms_by_unit(graph, mine)
    out: list[HostRow] = []
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
    return [*out, _row("main", step.end - since, events, [*left, *step_end_terms(mine)])]


def share_found(graph: Graph, trace: Trace, step: Step) -> float:
    """The share of the graph's units that the trace has: where it is low, rows do not belong to their terms."""
    mine = host_units(graph)
    return len([*_matched(graph, mine, traced_units(trace, step))]) / max(1, len(mine))


def _row(thread: str, ns: int, events: int, found: Iterable[Term]) -> HostRow:
    total: dict[str, float] = {}
    for key, times in found:
        total[key] = total.get(key, 0.0) + times
    return HostRow(thread, max(ns, 0) * 1e-3, events, {k: v for k, v in total.items() if v})


def _terms_by_unit(graph: Graph, found: Sequence[HostUnit]) -> list[tuple[list[Term], list[Term]]]:
    by_op = {i: (before, own) for i, before, own in host_terms(graph, found)}
    return [([t for i in u.ops for t in by_op[i][0]], [t for i in u.ops for t in by_op[i][1]]) for u in found]


def _extra(graph: Graph, unit: HostUnit, seen: TracedUnit) -> Iterator[Term]:
    """Launches of the unit beyond one for each of its ops."""
    for name, launches in seen.launched.items():
        ops = sum(graph.ops[i].kernels and graph.ops[i].name == name for i in unit.ops)
        if ops:
            yield from extra_launches(name, launches, ops)


def _matched(graph: Graph, mine: Sequence[HostUnit], seen: Sequence[TracedUnit]) -> Iterator[tuple[int, int]]:
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


def _launches(graph: Graph, unit: HostUnit) -> bool:
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
    inner = host.innermost(host.kind == HostKind.OP).tolist()
    names = [trace.names[k] for k in host.name.tolist()]
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
    s = waits.stretches(trace.host)
    out: dict[int, int] = {}
    for b in waits.blocking_calls(trace, s):
        owner, took = int(s.owner[b.stretch]), int(s.hi[b.stretch] - s.lo[b.stretch])
        out[owner] = out.get(owner, 0) + max(0, took - max(b.tail, LEAST_CALL_NS))
    return out


# Fitting the host's terms to traced steps, and their level to steps measured without a profiler.
#
# Every trace and thread has a pace of its own, which scales all its times, the profiler's cost per event among them:
#
#     observed = pace x (sum of terms + cost per event x events)
#
# Paces and terms are found in turn, terms by weighted least squares with large deviations weighing less (a thread that
# lost its core is not an op's cost). How a name differs from its class is held near zero, the more the fewer samples it
# has. Paces have geometric mean 1. The profiler's cost is what makes host times at pace 1 agree, in the mean of the
# middle four fifths, with steps measured without a profiler in which the GPU waited for the host.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

THREADS = ("main", "autograd")
ROUNDS = 5
LEAST_US = 3.0  # below this, errors count as absolute and not as relative
HELD = 0.3  # how strongly a name is held to its class, against samples with a relative error of 1
FREE = 3e-4  # a class is hardly held, even where it comes in a few rows of milliseconds alone
OUTLIER = 0.7  # relative errors beyond this weigh less
CAPPED = 3.0  # a row counts towards its trace's pace with at most so many times its due


@dataclass(frozen=True)
class Paces:
    """How much slower than usual each thread of a traced step was."""

    main: float = 1.0
    autograd: float = 1.0


@dataclass(frozen=True)
class Fit:
    """Microseconds by term, and each step's paces."""

    us: Mapping[str, float]
    paces: Mapping[str, Paces]
    per_event: float  # microseconds that the profiler costs, at pace 1


@dataclass(frozen=True, eq=False)
class _Table:
    """Rows of several steps as columns: entries (row, term, times), and by row what was observed."""

    keys: list[str]
    row: Ints
    key: Ints
    times: Floats
    us: Floats
    events: Floats
    lane: Ints  # which step and thread

    def predicted(self, beta: Floats) -> Floats:
        return np.asarray(np.bincount(self.row, self.times * beta[self.key], len(self.us)), np.float64)


def fit(steps: Mapping[str, Sequence[HostRow]], per_event: float, prior: Mapping[str, float] | None = None) -> Fit:
    """The terms of some steps; with a `prior`, held to it where there is little to say otherwise, at pace 1."""
    table = _table(steps)
    first = np.array([prior.get(k, 0.0) if prior else 0.0 for k in table.keys])
    hold = np.array([HELD if named(k) or prior else FREE for k in table.keys])
    pace = np.ones(len(THREADS) * len(steps))
    weight = 1 / np.maximum(table.us, LEAST_US)
    pairs = _pairs(table)
    beta = first
    for _ in range(ROUNDS):
        net = table.us / pace[table.lane] - per_event * table.events
        beta = _solved(table, pairs, weight * pace[table.lane], net, hold, first)
        gross = table.predicted(beta) + per_event * table.events
        if prior is None:
            pace = _paces(table, gross, pace)
        expected = np.abs(pace[table.lane] * gross)
        base = 1 / np.maximum(expected, LEAST_US)
        error = np.abs(table.us - pace[table.lane] * gross) * base
        weight = base * np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(error, 1e-9)))
    by_step = pace.reshape(-1, len(THREADS))
    found = {name: Paces(*map(float, p)) for name, p in zip(steps, by_step, strict=True)}
    return Fit(dict(zip(table.keys, beta.tolist(), strict=True)), found, per_event)


def _table(steps: Mapping[str, Sequence[HostRow]]) -> _Table:
    keys: dict[str, int] = {}
    entries: list[tuple[int, int, float]] = []
    observed: list[tuple[float, float, int]] = []
    for s, rows in enumerate(steps.values()):
        for r in rows:
            entries += [(len(observed), keys.setdefault(k, len(keys)), v) for k, v in r.terms.items()]
            observed.append((r.us, float(r.events), len(THREADS) * s + THREADS.index(r.thread)))
    row, key, times = (np.array(c) for c in zip(*entries, strict=True))
    us, events, lane = (np.array(c) for c in zip(*observed, strict=True))
    return _Table(list(keys), row, key, times, us, events, lane)


def _pairs(table: _Table) -> tuple[Ints, Ints, Floats]:
    """Products of all two entries of a row: (row, place in the square matrix of terms, product)."""
    starts = np.searchsorted(table.row, np.arange(len(table.us) + 1))
    length = np.diff(starts)
    left = np.repeat(np.arange(len(table.row)), length[table.row])
    nth = np.arange(len(left)) - np.repeat(np.cumsum(length[table.row]) - length[table.row], length[table.row])
    right = starts[table.row[left]] + nth
    return table.row[left], table.key[left] * len(table.keys) + table.key[right], table.times[left] * table.times[right]


def _solved(
    table: _Table, pairs: tuple[Ints, Ints, Floats], weight: Floats, net: Floats, hold: Floats, first: Floats
) -> Floats:
    """Weighted least squares with every term held to its first value."""
    n, (row, place, product) = len(table.keys), pairs
    square = np.asarray(np.bincount(place, product * weight[row] ** 2, n * n), np.float64).reshape(n, n)
    right = np.bincount(table.key, table.times * (weight**2 * net)[table.row], n)
    square[np.diag_indices(n)] += hold**2
    return np.asarray(np.linalg.solve(square, right + hold**2 * first))


def _paces(table: _Table, gross: Floats, before: Floats) -> Floats:
    """Observed over expected, of each step and thread; single rows far above their due are capped."""
    due = np.maximum(gross, LEAST_US) * before[table.lane]
    lanes = len(before)
    seen = np.bincount(table.lane, np.minimum(table.us, CAPPED * due), lanes)
    expected = np.bincount(table.lane, np.maximum(gross, 0.0), lanes)
    found = np.where(expected > 0, seen / np.maximum(expected, 1e-9), 1.0)
    return np.asarray(found / np.exp(np.log(np.maximum(found, 1e-9)).mean()))


def paces(rows: Sequence[HostRow], us: Mapping[str, float], per_event: float) -> Paces:
    """How fast the host of one traced step was beside a model's."""
    seen, due = dict.fromkeys(THREADS, 0.0), dict.fromkeys(THREADS, 0.0)
    for r in rows:
        seen[r.thread] += r.us
        due[r.thread] += sum(us.get(k, 0.0) * v for k, v in r.terms.items()) + per_event * r.events
    return Paces(*(seen[t] / due[t] if due[t] > 0 else 1.0 for t in THREADS))


@dataclass(frozen=True)
class OwnTerms:
    """What one trace says of its own workload: microseconds by term at pace 1, and how fast its threads were."""

    us: Mapping[str, float]
    paces: Paces


def own_terms(rows: Sequence[HostRow], us: Mapping[str, float], per_event: float) -> OwnTerms:
    """A model's terms, moved to what one trace shows."""
    found = paces(rows, us, per_event)
    even = [replace(r, us=r.us / getattr(found, r.thread)) for r in rows]
    return OwnTerms({**us, **fit({"own": even}, per_event, prior=us).us}, found)


def host_us(rows: Sequence[HostRow], us: Mapping[str, float]) -> dict[str, float]:
    """Host microseconds of a step at pace 1 without a profiler, by thread."""
    out = dict.fromkeys(THREADS, 0.0)
    for r in rows:
        out[r.thread] += sum(us.get(k, 0.0) * v for k, v in r.terms.items())
    return out


def profiler_cost(
    steps: Mapping[str, Sequence[HostRow]], unprofiled_us: Mapping[str, float], most: float = 4.0, rounds: int = 7
) -> float:
    """The cost per event with which the fitted host times agree with the unprofiled ones, by halving."""
    low, high = 0.0, most
    for _ in range(rounds):
        middle = (low + high) / 2
        us = fit(steps, middle).us
        z = np.sort([np.log(u / sum(host_us(steps[n], us).values())) for n, u in unprofiled_us.items()])
        cut = len(z) // 10
        low, high = (low, middle) if z[cut : len(z) - cut].mean() > 0 else (middle, high)
    return (low + high) / 2


# ---- the file


def host_model_toml(model: HostModel) -> str:
    """The text of a host model's file."""
    return "\n".join(_host_lines(model)) + "\n"


def _host_lines(model: HostModel) -> Iterator[str]:
    yield "# Host time of a training step, in microseconds a term (presage.costs.host_units says what the terms are)."
    yield "# Made by tools/fit_host.py; names_us: how an op of that name differs from its class."
    yield "version = 1"
    for section in ("fitted", "pace", "calls"):
        yield f"\n[{section}]"
        yield from (f"{k} = {_number(v)}" for k, v in msgspec.structs.asdict(getattr(model, section)).items())
    yield "\n[us]"
    yield from (f"{json.dumps(k)} = {_number(v)}" for k, v in sorted(model.us.items()) if not named(k))
    section = ""
    for key, value in sorted(model.us.items()):
        if named(key):
            kind, _, name = key.partition(": ")
            if kind != section:
                yield f"\n[names_us.{json.dumps(kind)}]"
                section = kind
            yield f"{json.dumps(name)} = {_number(value)}"


def _number(value: Any) -> str:
    return json.dumps(round(value, 3) if isinstance(value, float) else value)
