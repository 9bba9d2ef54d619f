"""`presage trace`: what is in these traces, and where the time goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import graph
from presage.cli.common import CpuOnly, Ignore, Json, Partial, Traces, console, emit, load_run, status

if TYPE_CHECKING:
    from presage.engine import Timeline
    from presage.traces.replay import Replay


def command(
    traces: Traces,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows in each table.")] = 10,
    rank: Annotated[int | None, typer.Option("--rank", help="The rank whose ops and kernels are listed.")] = None,
    overheads: Annotated[
        Path | None, typer.Option("--overheads", metavar="OUT.toml", help="Save the host overheads T1-T5, pooled.")
    ] = None,
    json: Json = None,
    ignore: Ignore = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    partial: Partial = False,
    cpu_only: CpuOnly = False,
) -> None:
    """Where the time goes: step times, GPU active and idle with causes, ops, host overheads, critical path, late ranks.

    A PyTorch execution trace or a Chakra graph (one file) is summed up too: what it runs, without times.

    presage trace demo

    presage trace run/rank_*.json.gz --overheads host.toml
    """
    from presage.traces import sniff
    from presage.traces.replay import replay_of

    if len(traces) == 1 and traces[0].is_file() and sniff.is_graph(traces[0]):
        graph.show(traces[0], top, json)
        return
    run = load_run(traces, ignore, partial, cpu_only)
    with status("explaining"):
        replay = replay_of(run)
        timeline = replay.simulate()
        found = _found(replay, timeline, top)
    if overheads is not None:
        _pooled(replay).to_toml(overheads)
    if emit(json, found):
        _print(replay, timeline, top, _place(replay, rank))


def _place(replay: Replay, rank: int | None) -> int:
    from presage.errors import PresageError

    places = {replay.run.rank(i): i for i in range(len(replay.run))}
    if rank is not None and rank not in places:
        raise PresageError(f"--rank {rank}: the run has ranks {', '.join(map(str, sorted(places)))}")
    return places[rank] if rank is not None else 0


def _found(replay: Replay, timeline: Timeline, top: int) -> dict[str, Any]:
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    ranks = []
    for i, r in enumerate(replay.ranks):
        trace = r.trace
        ranks.append(
            {
                "rank": replay.run.rank(i),
                "path": trace.path,
                "gpus": trace.gpus[:1],
                "host_events": len(trace.host),
                "gpu_events": len(trace.gpu),
                "linked_share": float((trace.gpu.launch >= 0).mean()) if len(trace.gpu) else 0.0,
                "clock_offset_us": replay.run.offset_ns[i] / 1e3,
                "gpu_clock_shift_us": replay.run.gpu_shift_ns[i] / 1e3,
                "ignored_events": trace.ignored,
                "steps_s": [s.seconds for s in measured_steps(replay, i)],
                "replayed_steps_s": [s.seconds for s in replay.steps(timeline, i)],
                "activity_s": asdict(explain.activity(replay, i)),
                "ops": [asdict(o) for o in explain.ops(replay, i)[:top]],
                "kernels": [asdict(o) for o in explain.kernels(replay, i)[:top]],
            }
        )
    return {
        "kind": "trace",
        "ranks": ranks,
        "critical_path": [asdict(p) for p in explain.critical_parts(replay, timeline)[:top]],
        "late": [asdict(x) for x in explain.lateness(replay)] if len(replay.run) > 1 else [],
    }


def _print(replay: Replay, timeline: Timeline, top: int, place: int) -> None:
    from presage.report import tables
    from presage.traces import explain
    from presage.traces.replay import measured_steps

    out, rank = console(), replay.run.rank(place)
    everyone = range(len(replay.run))
    print_tables = [
        tables.step_table([(replay.run.rank(i), measured_steps(replay, i)) for i in everyone]),
        tables.activity_table([(replay.run.rank(i), explain.activity(replay, i)) for i in everyone]),
        tables.op_table(explain.ops(replay, place), top, rank),
        tables.kernel_table(explain.kernels(replay, place), top, rank),
        tables.path_table(explain.critical_parts(replay, timeline), top),
    ]
    if len(replay.run) > 1:
        print_tables.append(tables.late_table(explain.lateness(replay)))
        print_tables.append(tables.meeting_table(explain.late_meetings(replay, top)))
    gpu = replay.ranks[place].trace.gpus
    out.print(f"[bold]{len(replay.run)} rank(s)[/bold], {gpu[0] if gpu else 'GPU not named'}\n")
    for table in print_tables:
        out.print(table)
        out.print()
