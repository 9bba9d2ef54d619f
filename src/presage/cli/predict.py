"""`presage predict`: how long a training step will take on a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.common import Json, console, emit, status
from presage.cli.graph import Arguments, Step, graph_of

if TYPE_CHECKING:
    from presage.graph.graph import Graph
    from presage.prediction.step import Prediction

__all__ = ["command"]

DRAWN_STEPS = 3


def command(
    step: Step,
    arg: Arguments = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", metavar="NAME", help="The GPU to predict for (presage gpus), or the folder of a calibration pack."
        ),
    ] = "h200",
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", min=1, help="Runs to draw for the spread of the step time.")
    ] = 200,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=2, help="Steps a run has; the first two are not counted.")
    ] = 8,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT.json", help="Write the predicted timeline for Perfetto.")
    ] = None,
    json: Json = None,
) -> None:
    """How long will this training step take, and how sure is that? No GPU is needed and no weights are made.

    The step time is that of a run on a machine of this kind: its host may be faster or slower than usual, so it comes
    with the range that nine runs of ten lie in.

    presage predict train.py:build --arg batch=8 --gpu h200

    presage predict step.presage --json - --trace out.json
    """
    from presage.prediction.api import predict

    graph = graph_of(step, arg)
    with status(f"predicting {step}"):
        found = predict(graph, gpu, draws=draws, steps=steps)
        if trace is not None:
            _draw(graph, gpu, trace)
    if emit(json, found.to_json()):
        _print(found, trace)


def _draw(graph: Graph, gpu: str, path: Path) -> None:
    """The first steps at the host's usual pace."""
    from presage.files import write_whole
    from presage.prediction.api import program_of
    from presage.traces.perfetto import timeline_trace

    write_whole(path, timeline_trace(program_of(graph, gpu).timeline(DRAWN_STEPS), f"predicted: {graph.source}"))


def _print(found: Prediction, trace: Path | None) -> None:
    from rich.markup import escape

    from presage.report import prediction_tables as tables

    out = console()
    out.print(tables.headline(found), soft_wrap=True)
    for table in (
        tables.step_table(found),
        tables.part_table("Families of ops", "family", found.families),
        tables.part_table("Modules", "module", found.modules),
        tables.costly_table(found.costliest),
    ):
        out.print()
        out.print(table)
    for remark in tables.remarks(found):
        out.print(f"\n{escape(remark)}", soft_wrap=True)
    if trace is not None:
        out.print(f"\ntimeline: {escape(str(trace))} (open it at ui.perfetto.dev)", soft_wrap=True)
