"""Commands, run as a user would, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from presage.cli.options import output_options


def runner(command: Callable[..., Any] | typer.Typer) -> Callable[..., str]:
    """What the command (or one of an app's) prints with --verbose, given its arguments; its errors are raised."""
    app = command if isinstance(command, typer.Typer) else typer.Typer()
    if not isinstance(command, typer.Typer):
        app.command()(command)

    def run(*args: str | Path) -> str:
        with output_options(quiet=False, verbose=True):
            found = CliRunner().invoke(app, [str(a) for a in args])
        if found.exception and not isinstance(found.exception, SystemExit):
            raise found.exception
        assert found.exit_code == 0, found.output
        return found.stdout

    return run
