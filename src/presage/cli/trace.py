"""`presage trace`: where the time of a traced step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.options import CpuOnly, Ignore, Json, Partial, Report, Traces
from presage.cli.output import (
    check_report,
    load_runs,
    rank_labels,
    show_answer,
    status,
)

if TYPE_CHECKING:
    from presage.engine import Timeline
    from presage.report.trace_answer import TraceFindings
    from presage.traces.overheads import Overheads
    from presage.traces.replay import Replay
from collections import Counter


def command(
    traces: Traces,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows in each table.")] = 10,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", help="Rank whose ops and kernels are listed (default: the first)."),
    ] = None,
    overheads: Annotated[
        Path | None,
        typer.Option("--overheads", metavar="OUT.toml", help="Save the host overheads T1-T5, pooled over ranks."),
    ] = None,
    report: Report = None,
    json: Json = None,
    ignore: Ignore = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    partial: Partial = False,
    cpu_only: CpuOnly = False,
) -> None:
    """Explain where the time of a step goes: GPU active and idle time with causes, ops, critical path, late ranks.

    A PyTorch execution trace or a Chakra graph (one file, without times) is summarised too.

    presage trace demo

    presage trace run/rank_*.json.gz --overheads host.toml --report where.html
    """
    from presage.report.trace_answer import trace_answer
    from presage.traces import trace_set
    from presage.traces.replay import replay_of

    check_report(report)
    if len(traces) == 1 and traces[0].is_file() and trace_set.is_graph(traces[0]):
        _without_times(report, traces[0])
        summarise_graph(traces[0], top, json)
        return
    runs = load_runs(traces, ignore, partial, cpu_only)
    with status("explaining"):
        replays = [replay_of(run) for run in runs]
        timelines = [r.simulate() for r in replays]
        found = findings(replays, timelines[0], _place(replays[0], rank), top)
    if overheads is not None:
        found.overheads.to_toml(overheads)
    show_answer(trace_answer(found, report is not None, lambda: _data(found, timelines)), json, report)


def _without_times(report: Path | None, path: Path) -> None:
    from presage.errors import InputError

    if report is not None:
        raise InputError(path, "is an execution graph without times, for which there is no report: omit --report")


def findings(replays: Sequence[Replay], timeline: Timeline, place: int = 0, top: int = 10) -> TraceFindings:
    """Explain the runs; `timeline` is the first run's."""
    from presage.report.trace_answer import TraceFindings
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    every, one = [(r, i) for r in replays for i in range(len(r.run))], replays[0]
    single, several = len(replays) == 1, len(one.run) > 1
    return TraceFindings(
        replays=replays,
        names=[name for names in rank_labels([r.run for r in replays]) for name in names],
        steps=[measured_steps(r, i) for r, i in every],
        activity=[explain.activity(r, i) for r, i in every],
        overheads=host_overheads(replays),
        path=explain.critical_parts(one, timeline) if single else [],
        late=explain.lateness(one) if single and several else [],
        meetings=explain.late_meetings(one, top) if single and several else [],
        ops=explain.ops(one, place) if single else [],
        kernels=explain.kernels(one, place) if single else [],
        place=place,
        top=top,
    )


def host_overheads(replays: Sequence[Replay]) -> Overheads:
    """T1 to T5 over all ranks as profiled, without the first step, which contains the profiler's start-up."""
    from presage.traces.overheads import extract, overheads, pool

    traces = [r.trace for replay in replays for r in replay.ranks]
    return overheads(pool([extract(t, skip_steps=int(len(t.steps) > 1)) for t in traces]))


def overhead_rows(found: Overheads) -> list[dict[str, Any]]:
    """One row per overhead, op and kind of thread."""
    return [
        {"kind": kind.name, "key": key, "thread": role.name.lower(), **asdict(value)}
        for (kind, key, role), value in found.table.items()
    ]


def _place(replay: Replay, rank: int | None) -> int:
    from presage.errors import PresageError

    places = {replay.run.rank(i): i for i in range(len(replay.run))}
    if rank is not None and rank not in places:
        raise PresageError(f"--rank {rank}: the run has ranks {', '.join(map(str, sorted(places)))}")
    return places[rank] if rank is not None else 0


def _data(found: TraceFindings, timelines: Sequence[Timeline]) -> dict[str, Any]:
    from presage.traces import explain

    replays, top = found.replays, found.top
    late = explain.lateness(replays[0]) if len(replays[0].run) > 1 else []
    return {
        "kind": "trace",
        "ranks": [_rank(r, t, i, top) for r, t in zip(replays, timelines, strict=True) for i in range(len(r.run))],
        "overheads": overhead_rows(found.overheads),
        "mismatched_collectives": sum(r.run.mismatched for r in replays),
        "critical_path": [asdict(p) for p in explain.critical_parts(replays[0], timelines[0])[:top]],
        "late": [asdict(x) for x in late],
    }


def _rank(replay: Replay, timeline: Timeline, i: int, top: int) -> dict[str, Any]:
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    trace = replay.ranks[i].trace
    return {
        "rank": replay.run.rank(i),
        "path": trace.path,
        "gpus": trace.gpus[:1],
        "host_events": len(trace.host),
        "gpu_events": len(trace.gpu),
        "linked_share": float((trace.gpu.launch >= 0).mean()) if len(trace.gpu) else 0.0,
        "clock_offset_us": replay.run.offset_ns[i] / 1e3,
        "gpu_clock_shift_us": replay.run.gpu_shift_ns[i] / 1e3,
        "hidden_gpu_s": float(replay.ranks[i].hidden.sum()) * 1e-9,
        "ignored_events": trace.ignored,
        "steps_s": [s.seconds for s in measured_steps(replay, i)],
        "replayed_steps_s": [s.seconds for s in replay.steps(timeline, i)],
        "activity_s": asdict(explain.activity(replay, i)),
        "ops": [asdict(o) for o in explain.ops(replay, i)[:top]],
        "kernels": [asdict(o) for o in explain.kernels(replay, i)[:top]],
    }


# ---- execution graph files (PyTorch ET, Chakra), which have no times


def summarise_graph(path: Path, top: int, json: str | None) -> None:
    """Summarise one execution graph file."""
    from presage.report.graph_answer import execution_graph_answer
    from presage.traces.trace_set import read_graph

    graph = read_graph(path)
    kinds = Counter(n.kind for n in graph.nodes)
    names = Counter(n.name for n in graph.nodes if n.kind in ("op", "kernel", "collective"))
    found = {
        "kind": "graph",
        "path": str(path),
        "schema": graph.schema,
        "rank": graph.rank,
        "nodes": len(graph.nodes),
        "dropped_deps": graph.dropped_deps,
        "nodes_by_kind": dict(kinds.most_common()),
        "top_names": dict(names.most_common(top)),
    }
    rank = "not stated" if graph.rank is None else str(graph.rank)
    headline = f"execution graph, schema {graph.schema}, rank {rank}, {len(graph.nodes)} nodes"
    counts = {"Nodes by kind": kinds.most_common(), "Most frequent": names.most_common(top)}
    dropped = [f"{graph.dropped_deps} control dependencies point nowhere or in a circle and were left out"]
    show_answer(execution_graph_answer(headline, counts, dropped if graph.dropped_deps else [], lambda: found), json)
