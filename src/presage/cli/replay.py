"""`presage replay`: a trace re-simulated, as measured and with edits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from presage.cli import complete
from presage.cli.options import CpuOnly, Ignore, Json, Partial, Report, Traces
from presage.cli.output import (
    check_report,
    load_runs,
    print_note,
    rank_labels,
    show_answer,
    status,
)

if TYPE_CHECKING:
    from presage.report.replay_answer import Simulated
    from presage.traces.replay import Replay
    from presage.traces.trace_set import TraceSet
    from presage.whatif.replay_edits import ReplayEdit


def _list(json: str | None) -> None:
    """Print all edits; needs no trace."""
    from presage.report.whatif_answer import edits_answer
    from presage.whatif.replay_names import EDITS

    rows = [{"name": e.name, "value": e.value, "rule": e.rule} for e in EDITS.values()]
    tables = {"Edits of a trace": [(e.name, e.value, e.rule) for e in EDITS.values()]}
    show_answer(edits_answer(tables, (), lambda: {"kind": "edits", "edits": rows}), json)


Apply = Annotated[
    list[str],
    typer.Option(
        "--apply",
        metavar="EDIT[=VALUE],...",
        help="Edits by name (repeatable; see --list).",
        autocompletion=complete.comma_list(complete.TRACE_EDITS),
    ),
]
Scale = Annotated[
    list[str],
    typer.Option("--scale", metavar="TARGET=REGEX:F", help="Scale the time of what matches by F (repeatable)."),
]
DropRankDelay = Annotated[
    list[int],
    typer.Option(
        "--drop-rank-delay", metavar="RANK", help="Make this rank as fast as the median of the others (repeatable)."
    ),
]
KernelsFrom = Annotated[
    Path | None,
    typer.Option("--kernels-from", metavar="TRACE", help="Take kernel times from another trace of the same model."),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="OUT.json", help="Write predicted and measured timelines as a Perfetto trace."),
]


def command(
    traces: Traces = [],  # noqa: B006
    apply: Apply = [],  # noqa: B006
    scale: Scale = [],  # noqa: B006
    remove: Annotated[
        list[str], typer.Option("--remove", metavar="TARGET=REGEX", help="Remove what matches (repeatable).")
    ] = [],  # noqa: B006
    drop_rank_delay: DropRankDelay = [],  # noqa: B006
    kernels_from: KernelsFrom = None,
    listed: Annotated[bool, typer.Option("--list", help="List all edits and what each does.")] = False,
    trace: Trace = None,
    report: Report = None,
    json: Json = None,
    ignore: Ignore = [],  # noqa: B006
    partial: Partial = False,
    cpu_only: CpuOnly = False,
) -> None:
    """Re-simulate a trace and compare with the measured step; then change the times of parts of it.

    TARGET is kernel, collective, op (host time and the GPU work it launches), host (host time only) or call (a CUDA
    API call).

    presage replay rank_*.json.gz

    presage replay rank_*.json.gz --scale 'kernel=gemm:0.5' --remove 'call=cudaMalloc|cudaFree'

    presage replay rank_*.json.gz --apply cuda_graph,faster=gemm:2

    presage replay rank_*.json.gz --drop-rank-delay 2 --trace out.json --report out.html

    presage replay batch_64.json.gz --kernels-from batch_256.json.gz
    """
    if listed:
        _list(json)
        return
    from presage.errors import PresageError
    from presage.report.replay_answer import ReplayFindings, replay_answer
    from presage.whatif import replay_edits as edits
    from presage.whatif.replay_names import parse

    if not traces:
        raise PresageError("give the traces: presage replay rank_*.json.gz, or presage replay demo")
    check_report(report)
    wanted = [*map(edits.parse_scale, scale), *map(edits.parse_remove, remove)]
    wanted += [*map(edits.drop_rank_delay, drop_rank_delay), *(edit for text in apply for edit in parse(text))]
    runs = load_runs(traces, ignore, partial, cpu_only)
    if trace is not None and len(runs) > 1:
        raise PresageError("--trace takes the traces of one run only")
    found = [
        _replayed(run, names, wanted, kernels_from, ignore, trace)
        for run, names in zip(runs, rank_labels(runs), strict=True)
    ]
    rows, why = [row for one in found for row in one.rows], [reason for one in found for reason in one.why]
    told = [*scale, *remove, *(f"drop-rank-delay {r}" for r in drop_rank_delay)]
    told += [*([f"kernels from {kernels_from}"] if kernels_from else []), *apply]
    findings = ReplayFindings(rows, told, why, found[0].before, found[0].after)
    answer = replay_answer(findings, report is not None, lambda: _data(rows, told, why))
    show_answer(answer, json, report, {"timeline": trace})


class _Replayed(NamedTuple):
    """Per-rank rows of a run, the reasons for the gain, and the run before and after."""

    rows: list[Any]
    why: list[str]
    before: Simulated
    after: Simulated | None


def _replayed(
    run: TraceSet,
    names: list[str],
    wanted: list[ReplayEdit],
    kernels_from: Path | None,
    ignore: list[str],
    trace: Path | None,
) -> _Replayed:
    from presage.files import write_whole
    from presage.traces.perfetto import chrome_trace
    from presage.traces.replay import replay_of
    from presage.whatif import replay_edits as edits

    is_edited = bool(wanted) or kernels_from is not None
    with status("replaying"):
        replay = replay_of(run)
        changed = edits.edited(replay, wanted)
        if kernels_from is not None:
            changed = _with_kernels(changed, kernels_from, ignore)
        before, after = simulated(replay), simulated(changed) if is_edited else None
        why = [_reason(before, after)] if after is not None else []
    if trace is not None:
        shown = after or before
        write_whole(trace, chrome_trace(shown.replay, shown.timeline))
    return _Replayed(rank_steps(before, after, names), why, before, after)


def simulated(replay: Replay) -> Simulated:
    """The replay with its timeline and critical path."""
    from presage.report.replay_answer import Simulated
    from presage.traces.explain import critical_parts
    from presage.whatif.replay_effect import step_path

    timeline = replay.simulate()
    return Simulated(replay, timeline, critical_parts(replay, timeline, step_path(replay, timeline)))


def _reason(before: Simulated, after: Simulated) -> str:
    from presage.whatif.replay_effect import replay_effect

    return replay_effect(before.replay, after.replay, before.timeline, after.timeline).reason


def rank_steps(before: Simulated, after: Simulated | None, names: list[str]) -> list[Any]:
    """The name and the steps of each rank: measured, replayed, and with the edits if there are any."""
    from presage.traces.replay import measured_steps

    return [
        (
            name,
            measured_steps(before.replay, i),
            before.replay.steps(before.timeline, i),
            after.replay.steps(after.timeline, i) if after is not None else None,
        )
        for i, name in enumerate(names)
    ]


def _with_kernels(replay: Replay, path: Path, ignore: list[str]) -> Replay:
    from presage.traces.replay import replay_of
    from presage.traces.trace_set import read_run
    from presage.whatif.replay_edits import kernels_of

    changed, covered = kernels_of(replay, replay_of(read_run([path], ignore=ignore)))
    if covered < 1:
        print_note(f"{covered:.1%} of the kernel time of {path} was matched to an operator")
    return changed


def _data(rows: list[Any], edits: list[str], why: list[str]) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "measured_s": [s.seconds for s in measured],
            "replayed_s": [s.seconds for s in replayed],
            "error": [r.seconds / m.seconds - 1 for m, r in zip(measured, replayed, strict=True)],
            "edited_s": None if edited is None else [s.seconds for s in edited],
        }
        for rank, measured, replayed, edited in rows
    ]
    return {"kind": "replay", "edits": edits, "reasons": why, "ranks": ranks}
