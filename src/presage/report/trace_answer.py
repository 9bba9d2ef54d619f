"""The answer of `presage trace`: where the time of measured steps went."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isnan, nan

import numpy as np

from presage.report.answer import Answer, DataTable, Fact, Section, data_table, sections_of
from presage.report.html.charts.bars import parts_figure, stacks_figure, time_unit
from presage.report.html.charts.heat import heat_figure, heat_table
from presage.report.html.charts.lanes import lanes_section
from presage.report.terms import plural
from presage.report.trace_tasks import measured_tasks, shown_ranks, shown_step, step_window
from presage.text import percent, seconds, shorten
from presage.traces.explain import LaneActivity, PathPart
from presage.traces.findings import TraceFindings
from presage.traces.overheads import ANY, Kind, Overhead, Overheads

IDLE = {"host": "idle, waiting for the host", "sync": "idle, host synchronising", "gap": "gaps between kernels",
        "unexplained": "idle, unexplained"}  # fmt: skip
LATE_RANK = 0.01  # of the span: a rank that makes others wait longer is named
STEPS_SHOWN = 8
OVERHEADS = {
    Kind.T1: "T1 between ops",
    Kind.T2: "T2 before the first launch",
    Kind.T3: "T3 after the last launch",
    Kind.T4: "T4 the launch call",
    Kind.T5: "T5 between launches",
    Kind.ALONE: "op without a launch",
}


def trace_answer(f: TraceFindings, page: bool = True) -> Answer:
    """Everything `presage trace` shows; `page`: with the timeline."""
    gpus = f.replays[0].ranks[f.place].trace.gpus
    gpu = gpus[0] if gpus else "CPU only" if f.cpu_only else "unknown GPU"
    what = plural(len(f.names), "rank") if f.single else plural(len(f.replays), "trace")
    wrong = sum(r.run.mismatched for r in f.replays)
    return Answer(
        title=what,
        question="Where does the time of these steps go?",
        subject=f"{what}, {gpu}",
        headline=headline(f),
        facts=_facts(f),
        sections=sections_of(
            _activity_section(f), _timeline_section(f) if page and f.single else None, _steps_section(f),
            _ops_section(f) if f.single else None, _path_section(f) if f.single and f.path else None,
            _late_section(f) if f.single and f.late else None, _overhead_section(f),
        ),
        notes=(
            "times are as profiled: the profiler slows the host, so steps without it are shorter",
            *f.notes,
            *([f"{wrong} collectives could not be matched between ranks"] if wrong else []),
        ),
        to_data=f.to_json,
        brief="\n".join(_brief(*x) for x in zip(f.names, f.means, f.activity, strict=True)),
    )  # fmt: skip


def _brief(name: str, mean: float, a: LaneActivity) -> str:
    step = "no steps marked" if isnan(mean) else f"{seconds(mean)}/step"
    return f"{name}: {step}, active {percent(a.active / (a.span or 1.0))} of {seconds(a.span)}"


def headline(f: TraceFindings) -> str:
    """One sentence about the slowest rank."""
    a, mean = f.activity[f.slowest], f.means[f.slowest]
    step = f"{seconds(mean)}/step" if not isnan(mean) else f"{seconds(a.span)} traced"
    who = f" on {'rank' if f.single else 'trace'} {f.names[f.slowest]}, the slowest" if len(f.names) > 1 else ""
    return f"{step}{who}: {_pace(a, f.device)}{_late_text(f) or _path_text(f)}."


def _pace(a: LaneActivity, device: str) -> str:
    """What the device does, and where most of the rest goes."""
    if not a.span:
        return f"nothing runs on the {device}"
    waits = 0.0 if isnan(a.waiting_for_ranks) else a.waiting_for_ranks
    rest = {
        "waits for the host": a.idle.host,
        "waits in synchronisation": a.idle.sync,
        "waits for other ranks": waits,
        "only communicates": a.exposed_communication - waits,
        "is between two kernels": a.idle.gap,
    }
    what, most = max(rest.items(), key=lambda p: p[1])
    text = f", {what} {percent(most / a.span, 0)}" if most > 0.01 * a.span else ""
    return f"the {device} computes {percent(a.compute / a.span, 0)} of the time{text}"


def _path_text(f: TraceFindings) -> str:
    path: Sequence[PathPart] = f.path if f.single else ()
    total = sum(p.seconds for p in path)
    if not total:
        return ""
    share = {k: sum(p.seconds for p in path if p.kind == k) / total for k in ("host", "kernel", "collective")}
    what, part = max(share.items(), key=lambda kv: kv[1])
    names = {"host": "CPU work", "kernel": "kernels", "collective": "collectives"}
    return f"; {percent(part, 0)} of the critical path is {names[what]}"


def _late_text(f: TraceFindings) -> str:
    span = max((a.span for a in f.activity), default=0.0)
    worst = max(f.late if f.single else (), key=lambda r: r.made_others_wait, default=None)
    if worst is None or worst.made_others_wait < max(LATE_RANK * span, 1e-12):
        return ""
    return f"; rank {worst.rank} is a straggler: others wait {seconds(worst.made_others_wait)} for it"


def _facts(f: TraceFindings) -> tuple[Fact, ...]:
    a, mean = f.activity[f.slowest], f.means[f.slowest]
    span = a.span or 1.0
    overlap = f"{percent(a.overlap)} of it is overlapped" if a.communication else "none"
    facts = [
        Fact("Step time", seconds(mean), f"mean of {plural(len(f.steps[f.slowest]), 'step')}"),
        Fact(f"{f.device} active", percent(a.active / span), f"{seconds(a.active)} of {seconds(a.span)}"),
        Fact("Idle, CPU-bound", percent(a.idle.host / span), "", "warn" if a.idle.host > 0.1 * span else ""),
        Fact("Exposed communication", percent(a.exposed_communication / span), overlap),
    ]
    if len(f.names) > 1:
        fast = min((m for m in f.means if not isnan(m)), default=nan)
        facts.append(Fact("Fastest rank", seconds(fast), f"of {len(f.names):,}, mean step"))
    return tuple(facts)


# ---- activity and steps


def _activity_section(f: TraceFindings) -> Section:
    """What each device did, stacked."""
    parts = _activity_parts(f)
    unit = time_unit(max((a.span for a in f.activity), default=0.0))
    one = [(name, values[0]) for name, values in parts.items()]
    chart = (
        partial(stacks_figure, f.names, parts, "rank", unit)
        if len(f.names) > 1
        else partial(parts_figure, one, f.activity[0].span)
    )
    slow = f.activity[f.slowest]
    cause, most = max(((IDLE[k], float(getattr(slow.idle, k))) for k in IDLE), key=lambda x: x[1])
    text = f"What each {f.device} did from the start of the first step to the end of the last."
    if most > 0.01 * (slow.span or 1.0):
        text += f" Most of the idle time: {cause.removeprefix('idle, ')}, {percent(most / slow.span)} of the span."
    numbers = heat_table("rank", f.names, list(parts), np.array(list(parts.values())).T, unit, "Times")
    return Section("Where the time goes", (activity_table(f), numbers), chart, text)


def _activity_parts(f: TraceFindings) -> dict[str, list[float]]:
    waits = [0.0 if isnan(a.waiting_for_ranks) else a.waiting_for_ranks for a in f.activity]
    moved = [a.exposed_communication - w for a, w in zip(f.activity, waits, strict=True)]
    parts = {"compute": [a.compute for a in f.activity], "communication": moved, "waiting for other ranks": waits}
    parts |= {name: [float(getattr(a.idle, key)) for a in f.activity] for key, name in IDLE.items()}
    return {name: values for name, values in parts.items() if any(v > 0 for v in values)} or {"idle": waits}


def activity_table(f: TraceFindings) -> DataTable:
    """Shares of the span."""
    columns = ("rank", "span", f"{f.device} active", "compute", "exposed comm", "of it waiting", "overlap")
    idle = ("idle", "CPU-bound", "sync", "gaps", "unexplained")
    rows = []
    for name, a in zip(f.names, f.activity, strict=True):
        shares = (a.active, a.compute, a.exposed_communication, a.waiting_for_ranks)
        lost = (a.idle.total, a.idle.host, a.idle.sync, a.idle.gap, a.idle.unexplained)
        overlap = percent(a.overlap) if a.communication else "-"
        rows.append((name, seconds(a.span), *_shares(shares, a.span), overlap, *_shares(lost, a.span)))
    return data_table(f"{f.device} time (shares of the span)", (*columns, *idle), rows, wrap=True)


def _shares(values: Sequence[float], span: float) -> list[str]:
    return [percent(v / span) if span else "-" for v in values]


def _timeline_section(f: TraceFindings) -> Section | None:
    replay = f.replays[0]
    places = shown_ranks(replay, f.late)
    steps = [f.steps[i] for i in places]
    k = shown_step(max(steps, key=len)) if steps else 0
    window = step_window(steps, k)
    tasks = measured_tasks(replay, places, window)
    if not len(tasks):
        return None
    ranks = ", ".join(f.names[i] for i in places)
    whose = "" if len(places) == len(replay.ranks) else f" of ranks {ranks} (stragglers, slowest and fastest)"
    which = ", of median length" if max(map(len, steps)) > 2 else ""
    text = f"Step {k}{whose} as measured{which}; colours are op families."
    return lanes_section("Timeline of a step", tasks, text, window[1] - window[0])


def _steps_section(f: TraceFindings) -> Section:
    """Step by step: bars of one rank, a heat map of several."""
    most = max((len(s) for s in f.steps), default=0)
    times = np.full((len(f.names), most), np.nan)
    for i, steps in enumerate(f.steps):
        times[i, : len(steps)] = [s.seconds for s in steps]
    heads, table = [f"step {k}" for k in range(most)], step_table(f)
    if len(f.names) > 1 and most:
        text = "Every step of every rank; red is above the median rank of that step, blue below."
        cells = heat_table("rank", f.names, heads, times)
        return Section("Step times", (cells, table), partial(heat_figure, f.names, heads, times), text)
    unit = time_unit(float(np.nanmax(times, initial=0.0)))
    bars = {"step time": times[0].tolist()}
    chart = partial(stacks_figure, [str(k) for k in range(most)], bars, "step", unit) if most else None
    return Section("Step times", (table,), chart, "Each step, from the end of the previous one to its own end.")


def step_table(f: TraceFindings) -> DataTable:
    shown = min(max((len(steps) for steps in f.steps), default=0), STEPS_SHOWN)
    rows = [
        (name, seconds(mean), *(seconds(s.seconds) for s in steps[:shown]))
        for name, mean, steps in zip(f.names, f.means, f.steps, strict=True)
    ]
    return data_table("Step times", ("rank", "mean", *(f"step {i}" for i in range(shown))), rows, wrap=True)


# ---- ops, path, late ranks, overheads


def _ops_section(f: TraceFindings) -> Section:
    total = sum(o.gpu for o in f.ops)
    chart = partial(parts_figure, [(short_op(o.name), o.gpu) for o in f.ops], total) if total else None
    text = f"{f.device} time of rank {f.names[f.place]} over all steps: ops by the kernels they launched."
    return Section("Ops and kernels", (op_table(f), kernel_table(f)), chart, text)


def op_table(f: TraceFindings) -> DataTable:
    device = "collective" if f.cpu_only else "GPU"
    rows = [(short_op(o.name, 60), str(o.calls), seconds(o.gpu), seconds(o.host)) for o in f.ops[: f.top]]
    title = f"Top ops by {device} time (rank {f.names[f.place]}, all steps)"
    return data_table(title, ("op", "calls", device, "host"), rows, wrap=True)


def kernel_table(f: TraceFindings) -> DataTable:
    what, total = "collective" if f.cpu_only else "kernel", sum(k.gpu for k in f.kernels)
    rows = [
        (shorten(k.name), str(k.calls), seconds(k.gpu), percent(k.gpu / (total or 1.0))) for k in f.kernels[: f.top]
    ]
    title = f"Top {what}s (rank {f.names[f.place]}, all steps)"
    return data_table(title, (what, "calls", "time", "share"), rows, wrap=True)


def short_op(name: str, width: int = 44) -> str:
    return shorten(name.removeprefix("autograd::engine::evaluate_function: "), width)


def _path_section(f: TraceFindings) -> Section:
    total = sum(p.seconds for p in f.path)
    sums: dict[str, float] = {}
    for p in f.path:
        key = f"{p.kind}: {short_op(p.name)}"
        sums[key] = sums.get(key, 0.0) + p.seconds
    rows = [
        (p.kind, short_op(p.name, 60), seconds(p.seconds), percent(p.seconds / (total or 1.0))) for p in f.path[: f.top]
    ]
    table = data_table(f"Critical path ({seconds(total)})", ("what", "name", "time", "share"), rows, text=2, wrap=True)
    text = "The chain of work that sets the end of the last step: only what is on it makes the run shorter."
    return Section("Critical path", (table,), partial(parts_figure, list(sums.items()), total) if total else None, text)


def _late_section(f: TraceFindings) -> Section:
    """Stragglers, and how they differ from the other ranks."""
    columns = ("compute", "exposed communication", "waiting for ranks", "idle", "made others wait")
    cells = np.array([
        [a.compute, a.exposed_communication, a.waiting_for_ranks, a.idle.total, r.made_others_wait]
        for a, r in zip(f.activity, f.late, strict=True)
    ])  # fmt: skip
    worst = max(f.late if f.single else (), key=lambda r: r.made_others_wait)
    text = (
        f"Rank {worst.rank} arrived last {worst.times_last} times, and the others waited "
        f"{seconds(worst.made_others_wait)} for it in total. Red is above the median rank, blue below."
    )
    late = [(str(r.rank), str(r.times_last), seconds(r.made_others_wait), seconds(r.waited)) for r in f.late]
    waits = [(shorten(m.kind.split("|")[0]), seconds(at), str(last), seconds(w)) for m, last, w, at in f.meetings]
    tables = (
        data_table("Stragglers", ("rank", "times last", "made others wait", "waited itself"), late, wrap=True),
        heat_table("rank", f.names, columns, cells, title="Heat map"),
        data_table(
            "Collectives with most waiting", ("collective", "at", "last rank", "waited by all"), waits, wrap=True
        ),
    )
    return Section(
        "Stragglers", tables, partial(heat_figure, [f"rank {n}" for n in f.names], columns, cells, apart=True), text
    )


def _overhead_section(f: TraceFindings) -> Section:
    text = "CPU time of each op besides the work itself (T1 to T5), as profiled."
    return Section("Host overheads", (overhead_table(f.overheads, f.top),), None, text)


def overhead_table(found: Overheads, top: int) -> DataTable:
    """The five host overheads over all ops, then of the ops that cost the host most."""
    known = [(kind, key, role, o) for (kind, key, role), o in found.table.items() if kind in OVERHEADS]
    pooled = sorted((r for r in known if r[1] == ANY), key=lambda r: (r[0], r[2]))
    single = sorted((r for r in known if r[1] != ANY), key=lambda r: -r[3].n * r[3].mean)[:top]
    rows = [
        (OVERHEADS[kind], "all" if key == ANY else shorten(key, 40), role.name.lower(), *_overhead_cells(o))
        for kind, key, role, o in (*pooled, *single)
    ]
    columns = ("overhead", "op", "thread", "n", "median", "mean", "p10", "p90")
    return data_table("Host overheads (as profiled)", columns, rows, text=3, wrap=True)


def _overhead_cells(o: Overhead) -> list[str]:
    return [str(o.n), *(seconds(x) for x in (o.median, o.mean, o.p10, o.p90))]
