"""`presage trace`: where the time of a traced step goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import graph_file
from presage.cli.options import CpuOnly, Ignore, Json, Partial, Report, Traces
from presage.cli.output import (
    check_report,
    command_line,
    console,
    emit,
    load_runs,
    print_answer,
    print_brief,
    rank_labels,
    status,
    write_report,
)

if TYPE_CHECKING:
    from presage.engine import Timeline
    from presage.report.html import Page
    from presage.traces.overheads import Overheads
    from presage.traces.replay import Replay


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
    from presage.traces import sniff
    from presage.traces.replay import replay_of

    check_report(report)
    if len(traces) == 1 and traces[0].is_file() and sniff.is_graph(traces[0]):
        _without_times(report, traces[0])
        graph_file.show(traces[0], top, json)
        return
    runs = load_runs(traces, ignore, partial, cpu_only)
    with status("explaining"):
        replays = [replay_of(run) for run in runs]
        timelines = [r.simulate() for r in replays]
        pooled = host_overheads(replays)
        found = _found(replays, timelines, pooled, top)
    if overheads is not None:
        pooled.to_toml(overheads)
    place = _place(replays[0], rank)
    if emit(json, found):
        _print(replays, timelines, pooled, top, place)
    write_report(report, lambda: _page(replays, timelines, pooled, top, place), json != "-")


def _without_times(report: Path | None, path: Path) -> None:
    from presage.errors import InputError

    if report is not None:
        raise InputError(path, "is an execution graph without times, for which there is no report: omit --report")


def _page(replays: list[Replay], timelines: list[Timeline], pooled: Overheads, top: int, place: int) -> Page:
    from presage.report.html.trace_page import Traced, trace_page

    names = rank_labels([r.run for r in replays])
    return trace_page(Traced(replays, timelines, names, pooled, place, top), command_line())


def host_overheads(replays: list[Replay]) -> Overheads:
    """T1 to T5 over all ranks as the profiler saw them, without the first step (profiler start-up)."""
    from presage.traces.overheads import extract, overheads, pool

    traces = [r.trace for replay in replays for r in replay.ranks]
    return overheads(pool([extract(t, skip_steps=int(len(t.steps) > 1)) for t in traces]))


def overhead_rows(found: Overheads) -> list[dict[str, Any]]:
    """One row for each overhead of each op on each kind of thread."""
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


def _found(replays: list[Replay], timelines: list[Timeline], pooled: Overheads, top: int) -> dict[str, Any]:
    from presage.traces import explain

    late = explain.lateness(replays[0]) if len(replays[0].run) > 1 else []
    return {
        "kind": "trace",
        "ranks": [_rank(r, t, i, top) for r, t in zip(replays, timelines, strict=True) for i in range(len(r.run))],
        "overheads": overhead_rows(pooled),
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


def _print(replays: list[Replay], timelines: list[Timeline], pooled: Overheads, top: int, place: int) -> None:
    from presage.report import tables
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    names = rank_labels([r.run for r in replays])
    every = [(r, i, names[k][i]) for k, r in enumerate(replays) for i in range(len(r.run))]
    cpu_only = all(r.ranks[i].trace.cpu_only for r, i, _ in every)
    shown = [
        tables.step_table([(name, measured_steps(r, i)) for r, i, name in every]),
        tables.activity_table([(name, explain.activity(r, i)) for r, i, name in every], "CPU" if cpu_only else "GPU"),
    ]
    one, name = replays[0], names[0][place]
    if len(replays) == 1:
        kinds = ("collective", "collective") if cpu_only else ("GPU", "kernel")
        shown.append(tables.op_table(explain.ops(one, place), top, name, kinds[0]))
        shown.append(tables.kernel_table(explain.kernels(one, place), top, name, kinds[1]))
    shown.append(tables.overhead_table(pooled, top))
    if len(replays) == 1:
        shown.append(tables.path_table(explain.critical_parts(one, timelines[0]), top))
    if len(one.run) > 1:
        shown.append(tables.late_table(explain.lateness(one)))
        shown.append(tables.meeting_table(explain.late_meetings(one, top)))
    gpu = one.ranks[place].trace.gpus
    out = console()
    what = f"{len(one.run)} rank{'s' if len(one.run) > 1 else ''}" if len(replays) == 1 else f"{len(replays)} traces"
    print_answer(f"[bold]{what}[/bold], {gpu[0] if gpu else 'CPU only' if cpu_only else 'GPU not named'}")
    _brief(every)
    out.print()
    for table in shown:
        out.print(table)
        out.print()


def _brief(every: list[tuple[Replay, int, str]]) -> None:
    """Under --quiet: the mean step and how busy the GPU was, of each rank."""
    from presage.text import percent, seconds
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    for replay, i, name in every:
        steps, busy = measured_steps(replay, i), explain.activity(replay, i)
        mean = f"{seconds(sum(s.seconds for s in steps) / len(steps))} a step" if steps else "no steps marked"
        print_brief(f"{name}: {mean}, active {percent(busy.active / busy.span)} of {seconds(busy.span)}")
