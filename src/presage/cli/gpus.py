"""`presage gpus`: the known GPUs and the sources of their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.options import Json
from presage.cli.output import show_answer

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
    from presage.report.hardware_answer import gpus_answer

    found = [gpu(name)] if name is not None else list(gpus())
    to_data = lambda: {"kind": "gpus", "gpus": [_value(g) for g in found]}  # noqa: E731
    show_answer(gpus_answer(found, name is not None, to_data), json)


def _value(g: Gpu) -> dict[str, Any]:
    """Figures in the units of their keys, each with its source."""
    figures = {
        key: {"value": value, "source": g.facts.sources[key].text, "date": g.facts.sources[key].date}
        for key, value in g.facts.as_written().items()
    }
    return {"key": g.key, **g.facts.texts, "figures": figures}
