"""`presage compare`: a training loop watched by presage beside its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from presage.cli.options import Json, Report
from presage.cli.output import show_answer


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
