"""`presage calibrate` and `presage measure`: commands that run on this machine's GPU.

Their options are those of `python -m presage_fit.calibrate` and `python -m presage.measure`, which need no typer.
"""

from __future__ import annotations

import typer

from presage.cli.options import current_output
from presage.cli.plugins import load_command


def calibrate_command(context: typer.Context) -> None:
    """Measure this machine's GPU into a calibration pack, or its host (needs torch; a pack a GPU)."""
    load_command("calibrate")(_arguments(context))


def measure_command(context: typer.Context) -> None:
    """Run a step on this machine's GPU and compare with its prediction (needs torch and a GPU)."""
    from presage.measure.__main__ import main

    main(_arguments(context))


def _arguments(context: typer.Context) -> list[str]:
    return [*(["--quiet"] if current_output().quiet else []), *context.args]
