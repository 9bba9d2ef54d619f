"""`presage gpus`: the known GPUs and the sources of their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.options import Json
from presage.cli.output import console, emit, print_brief

if TYPE_CHECKING:
    from presage.hardware.gpu import Gpu


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One GPU, by presage's name or the driver's, or a .toml file.",
            autocompletion=complete.gpus,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """List the GPUs presage knows, with the source and date of every figure.

    A GPU is a TOML file: give its path here to check yours, and to --gpu to predict for it. A calibration pack of the
    GPU (`presage calibrate`) makes predictions more accurate.

    presage gpus

    presage gpus h200
    """
    from presage.hardware import gpu, gpus

    found = [gpu(name)] if name is not None else list(gpus())
    if emit(json, {"kind": "gpus", "gpus": [_value(g) for g in found]}):
        _print(found, one=name is not None)


def _value(g: Gpu) -> dict[str, Any]:
    """Figures in the units of their keys, each with its source."""
    figures = {
        key: {"value": value, "source": g.facts.sources[key].text, "date": g.facts.sources[key].date}
        for key, value in g.facts.as_written().items()
    }
    return {"key": g.key, **g.facts.texts, "figures": figures}


def _print(found: list[Gpu], one: bool) -> None:
    from presage.report.hardware_tables import figure_table, gpu_table, source_table

    print_brief("\n".join(f"{g.key}: {g.name}" if one else g.key for g in found))
    out = console()
    for table in [figure_table(found[0])] if one else [gpu_table(found), source_table(found)]:
        out.print(table)
        out.print()
