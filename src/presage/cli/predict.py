"""`presage predict`: how long a training step will take on GPUs that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.common import Json, emit, status
from presage.cli.graph import Arguments, Step, graph_of
from presage.cli.predicted import draw, show
from presage.cli.ranks import (
    Asked,
    Options,
    PlatformName,
    RankCount,
    RankSpecs,
    StrategyName,
    Tensor,
    asked,
)

if TYPE_CHECKING:
    from presage.engine import Timeline
    from presage.prediction.step import Prediction

__all__ = ["command"]

DRAWN_STEPS = 3


def command(
    step: Step,
    arg: Arguments = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="The GPU to predict for (presage gpus), or the folder of a calibration pack; h200 if nothing is said.",
        ),
    ] = None,
    platform: PlatformName = None,
    ranks: RankCount = None,
    strategy: StrategyName = None,
    tensor: Tensor = 1,
    option: Options = [],  # noqa: B006
    rank: RankSpecs = [],  # noqa: B006
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

    Many ranks: the step that FUNCTION builds is one rank's, as on one GPU (the batch is the rank's own); the strategy
    makes of it what each rank runs.

    presage predict train.py:build --arg batch=8 --gpu h200

    presage predict train.py:build --ranks 8 --strategy fsdp --platform dgx-h100

    presage predict step.presage --json - --trace out.json
    """
    many = asked(gpu, platform, ranks, strategy, tensor, option, rank)
    if many is not None:
        found, drawn = _ranks(step, arg, many, draws, steps, trace)
    else:
        found, drawn = _one(step, arg, gpu or "h200", draws, steps, trace)
    if trace is not None and drawn is not None:
        draw(drawn, found, trace)
    if emit(json, found.to_json()):
        _print(found, trace)


def _one(
    step: str, arg: list[str], gpu: str, draws: int, steps: int, trace: Path | None
) -> tuple[Prediction, Timeline | None]:
    from presage.prediction.api import predict, program_of

    graph = graph_of(step, arg)
    with status(f"predicting {step}"):
        found = predict(graph, gpu, draws=draws, steps=steps)
        return found, program_of(graph, gpu).timeline(DRAWN_STEPS) if trace else None


def _ranks(
    step: str, arg: list[str], many: Asked, draws: int, steps: int, trace: Path | None
) -> tuple[Prediction, Timeline | None]:
    from presage.prediction.api import machine, team_of
    from presage.prediction.team import predict_team

    graphs = [graph_of(step, arg), *(graph_of(step, _instead(arg, own)) for own in many.variants)]
    with status(f"predicting {step} on {many.ranks} ranks"):
        found = team_of(
            graphs, many.ranks, many.strategy, many.platform, options=many.options, tensor=many.tensor, kinds=many.kinds
        )
        told = predict_team(found, machine(found.platform.gpu.key), draws=draws, steps=steps)
        return told, found.timeline() if trace else None


def _instead(arg: list[str], own: tuple[str, ...]) -> list[str]:
    """A rank's own arguments in place of those for all."""
    names = {item.partition("=")[0] for item in own}
    return [*(a for a in arg if a.partition("=")[0] not in names), *own]


def _print(found: Prediction, trace: Path | None) -> None:
    from presage.report.prediction_tables import costly_table, part_table

    families = part_table("Families of ops", "family", found.families)
    modules = part_table("Modules", "module", found.modules)
    show(found, trace, [families, modules, costly_table(found.costliest)])
