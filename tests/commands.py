"""Commands, run as a user would, in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

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


def shell(*args: str | Path) -> CompletedProcess[str]:
    """`presage ARGS` as a shell sees it: exit code, output, errors; in this process, which has loaded all it needs."""
    from presage.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    call, code = ["presage", *map(str, args)], 0
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", call):
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
    printed = (stream.buffer.getvalue().decode() for stream in (out, err))
    return CompletedProcess(call, code, *printed)
