"""`presage compare` (a watched training loop beside its prediction) and `presage diff` (two answers)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli.options import Json, Report
from presage.cli.output import load_runs, show_answer, status


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.json", help="File written by presage.watch or by a presage callback.")
    ],
    predicted: Annotated[
        Path | None,
        typer.Option("--predicted", metavar="PRED.json", help="Prediction to compare with instead of the run's own."),
    ] = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """Compare a training loop with its prediction: step time, memory, and where the difference comes from.

    The loop is watched by `presage.watch(...)`, `presage.trainer_callback(...)` (Hugging Face) or
    `presage.lightning_callback(...)` with out="run.json".

    presage predict train.py:build --json prediction.json

    presage compare run.json --predicted prediction.json
    """
    from dataclasses import replace

    from presage.errors import InputError
    from presage.files.reading import read_json
    from presage.measure.comparison import comparison_from_json
    from presage.measure.prediction import read
    from presage.report.compare_answer import compare_answer

    try:
        comparison = comparison_from_json(read_json(run))
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise InputError(run, f'not a file of presage.watch(out="{run.name}"): {e}') from e
    if predicted is not None:
        comparison = replace(comparison, predicted=read(predicted))
    show_answer(compare_answer(comparison, run.name), json, report)


# ---- `presage diff`: what changed between two answers, traces, graphs or jobs.

WHAT = "An answer written with --json, a Kineto trace (file or folder), a .presage graph, or a job file."


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help=WHAT)],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same kind of thing, to compare with A.")],
    json: Json = None,
    report: Report = None,
) -> None:
    """Show what changed from A to B, by how much, and which parts explain it.

    Both are answers (JSON), traces, graphs or job files of the same kind; job files are predicted first.

    presage predict train.py:build --arg batch=8 --json a.json

    presage predict train.py:build --arg batch=16 --json b.json

    presage diff a.json b.json
    """
    from presage.errors import PresageError
    from presage.report.diff_answer import diff_answer

    a, b = _data(before), _data(after)
    if a.get("kind") != b.get("kind"):
        raise PresageError(f"{before} is a {a.get('kind')}, {after} a {b.get('kind')}: compare two of the same kind")
    show_answer(diff_answer(a, b, (before.name, after.name)), json, report)


def _data(path: Path) -> Mapping[str, Any]:
    """The JSON of an answer: read, or computed from a trace, a graph or a job."""
    if path.suffix == ".presage":
        return _graph(path)
    if path.suffix == ".toml":
        from presage.prediction.jobs.job_prediction import predict_job

        return predict_job(path).to_json()
    if path.suffix == ".json" and path.is_file():
        from presage.files.reading import read_json

        value = read_json(path)
        if isinstance(value, dict) and "kind" in value:
            return value
    return _trace(path)


def _graph(path: Path) -> Mapping[str, Any]:
    from presage.graph import save
    from presage.memory.step_memory import memory_profile
    from presage.report.graph_answer import graph_answer

    graph = save.read(path)
    return graph_answer([graph], memory_profile(graph), 2, None).data


def _trace(path: Path) -> Mapping[str, Any]:
    from presage.report.trace_answer import trace_answer
    from presage.traces.findings import TraceFindings, rank_place
    from presage.traces.replay import replay_of

    runs = load_runs([path], (), False, False)
    with status("explaining"):
        replays = [replay_of(run) for run in runs]
        return trace_answer(TraceFindings(replays, rank_place(replays[0], None), 10), False).data
