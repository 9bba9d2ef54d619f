"""`presage trace`: where the time of a traced step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from presage.cli.options import CpuOnly, Ignore, Json, Partial, Report, Traces, option, out_option
from presage.cli.output import load_runs, show_answer, status

if TYPE_CHECKING:
    from presage.traces.findings import TraceFindings

HOST_BOUND = 0.1  # of the span: idle time for which the host is the cause
FEW = 3  # traces that a command to try next names


def command(
    traces: Traces,
    top: Annotated[int, option("--top", "N", "Rows in each table.", min=1)] = 10,
    rank: Annotated[
        int | None, option("--rank", "R", "Rank whose ops and kernels are listed (default: the first).")
    ] = None,
    overheads: Annotated[
        Path | None,
        out_option("--overheads", "OUT.toml", "Save the host overheads T1-T5 without the profiler's cost, for --host."),
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

    presage predict train.py:build --host host.toml
    """
    from presage.errors import InputError
    from presage.report.graph_answer import execution_graph_answer
    from presage.report.trace_answer import trace_answer
    from presage.traces import trace_set
    from presage.traces.findings import TraceFindings, rank_place
    from presage.traces.replay import replay_of

    if len(traces) == 1 and traces[0].is_file() and trace_set.is_graph(traces[0]):
        if report is not None:
            raise InputError(traces[0], "is an execution graph without times, which has no report: omit --report")
        show_answer(execution_graph_answer(trace_set.read_graph(traces[0]), traces[0], top), json)
        return
    runs = load_runs(traces, ignore, partial, cpu_only)
    with status("explaining"):
        replays = [replay_of(run) for run in runs]
        result = TraceFindings(replays, rank_place(replays[0], rank), top)
        answer = trace_answer(result, report is not None)
    if overheads is not None:
        result.overheads.without_profiler().to_toml(overheads)
    show_answer(answer, json, report, then=_next(result, traces))


def _next(found: TraceFindings, traces: list[Path]) -> list[object]:
    """CUDA graphs where the GPU waits for the host, else the list of edits."""
    slowest = found.activity[found.slowest]
    host_bound = slowest.idle.host > HOST_BOUND * slowest.span
    where = traces if len(traces) <= FEW else [traces[0].parent]
    return ["replay", *where, *(["--apply", "cuda_graph"] if host_bound else ["--list"])]
