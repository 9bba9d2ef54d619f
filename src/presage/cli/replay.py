"""`presage replay`: a trace re-simulated, as measured and with edits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from presage.cli import complete
from presage.cli.options import CpuOnly, Ignore, Json, NoiseFile, Partial, Report, Seed, Traces, option, out_option
from presage.cli.output import load_runs, print_note, show_answer, status

if TYPE_CHECKING:
    from presage.traces.replay import Replay
    from presage.traces.trace_set import TraceSet
    from presage.whatif.replay_edits import ReplayEdit
    from presage.whatif.replay_result import ReplayedRun, ReplayFindings


Apply = Annotated[
    list[str],
    option(
        "--apply",
        "EDIT[=VALUE],...",
        "Edits by name (repeatable; see --list).",
        complete=complete.comma_list(complete.TRACE_EDITS),
    ),
]
Scale = Annotated[list[str], option("--scale", "TARGET=REGEX:F", "Scale the time of what matches by F (repeatable).")]
DropRankDelay = Annotated[
    list[int], option("--drop-rank-delay", "RANK", "Make this rank as fast as the median of the others (repeatable).")
]
KernelsFrom = Annotated[
    Path | None, option("--kernels-from", "TRACE", "Take kernel times from another trace of the same model.")
]
Trace = Annotated[
    Path | None, out_option("--trace", "OUT.json", "Write predicted and measured timelines as a Perfetto trace.")
]


def command(
    traces: Traces = [],  # noqa: B006
    apply: Apply = [],  # noqa: B006
    scale: Scale = [],  # noqa: B006
    remove: Annotated[list[str], option("--remove", "TARGET=REGEX", "Remove what matches (repeatable).")] = [],  # noqa: B006
    drop_rank_delay: DropRankDelay = [],  # noqa: B006
    kernels_from: KernelsFrom = None,
    listed: Annotated[bool, option("--list", "", "List all edits and what each does.")] = False,
    noise: NoiseFile = None,
    draws: Annotated[int, option("--draws", "N", "Steps to draw with --noise.", min=1, max=1_000_000)] = 200,
    seed: Seed = 0,
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

    presage replay rank_*.json.gz --noise noise.toml --draws 1000

    presage replay batch_64.json.gz --kernels-from batch_256.json.gz
    """
    if listed:
        from presage.report.whatif_answer import replay_edits_answer

        show_answer(replay_edits_answer(), json)
        return
    from presage.errors import PresageError
    from presage.report.replay_answer import replay_answer
    from presage.traces.findings import rank_labels
    from presage.whatif import replay_edits as make
    from presage.whatif.replay_names import parse
    from presage.whatif.replay_result import ReplayFindings

    if not traces:
        raise PresageError("give the traces: presage replay rank_*.json.gz, or presage replay demo")
    wanted = [*map(make.parse_scale, scale), *map(make.parse_remove, remove)]
    wanted += [*map(make.drop_rank_delay, drop_rank_delay), *(edit for text in apply for edit in parse(text))]
    runs = load_runs(traces, ignore, partial, cpu_only)
    if trace is not None and len(runs) > 1:
        raise PresageError("--trace takes the traces of one run only")
    edits = [*scale, *remove, *(f"drop-rank-delay {r}" for r in drop_rank_delay)]
    edits += [*([f"kernels from {kernels_from}"] if kernels_from else []), *apply]
    with status("replaying"):
        labelled = zip(runs, rank_labels(runs), strict=True)
        result = ReplayFindings([_replayed(run, names, wanted, kernels_from, ignore) for run, names in labelled], edits)
        if noise is not None:
            result = _with_noise(result, noise, draws, seed)
        answer = replay_answer(result, report is not None)
    if trace is not None:
        _write_trace(result.runs[0], trace)
    show_answer(answer, json, report, {"timeline": trace})


def _with_noise(result: ReplayFindings, noise: str, draws: int, seed: int) -> ReplayFindings:
    from presage.errors import PresageError
    from presage.whatif.replay_noise import noisy_replay

    if len(result.runs) > 1:
        raise PresageError("--noise takes the traces of one run only")
    shown = result.runs[0].after or result.runs[0].before
    return replace(result, spread=noisy_replay(shown.replay, noise, draws, seed))


def _write_trace(run: ReplayedRun, path: Path) -> None:
    from presage.files import write_whole
    from presage.traces.perfetto import chrome_trace

    shown = run.after or run.before
    write_whole(path, chrome_trace(shown.replay, shown.timeline))


def _replayed(
    run: TraceSet, names: list[str], wanted: list[ReplayEdit], kernels_from: Path | None, ignore: list[str]
) -> ReplayedRun:
    from presage.traces.replay import replay_of
    from presage.whatif.replay_edits import edited
    from presage.whatif.replay_result import ReplayedRun, SimulatedReplay

    replay = replay_of(run)
    changed = edited(replay, wanted)
    if kernels_from is not None:
        changed = _with_kernels(changed, kernels_from, ignore)
    has_edits = bool(wanted) or kernels_from is not None
    return ReplayedRun(names, SimulatedReplay(replay), SimulatedReplay(changed) if has_edits else None)


def _with_kernels(replay: Replay, path: Path, ignore: list[str]) -> Replay:
    from presage.traces.replay import replay_of
    from presage.traces.trace_set import read_run
    from presage.whatif.replay_edits import kernels_of

    changed, covered = kernels_of(replay, replay_of(read_run([path], ignore=ignore)))
    if covered < 1:
        print_note(f"{covered:.1%} of the kernel time of {path} was matched to an operator")
    return changed
