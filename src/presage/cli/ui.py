"""`presage ui`: the planning page, in a browser on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.options import option

if TYPE_CHECKING:
    from presage.ui.plans import Plan

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.toml", help="Job file to start from (default: an example; see docs/jobs.md)."),
]
Port = Annotated[int, option("--port", "N", "Port on 127.0.0.1 (0: any free port).", min=0, max=65535)]
Open = Annotated[bool, option("--open/--no-open", "", "Open the page in a browser (--no-open: do not).")]


def command(job: JobFile = None, port: Port = 8765, show: Open = True) -> None:
    """Plan in a browser: change a job's settings, see step time, memory, cost and the end of the run, compare plans.

    presage ui

    presage ui examples/jobs/llama3.1-405b.toml --port 0

    Only browsers on this machine can open it. From another machine: ssh -L 8765:127.0.0.1:8765 MACHINE.
    """
    from presage.ui.server import check_installed, make_app, serve

    check_installed()
    if job is not None:
        _first(job)  # what is wrong with it is said here
    app = make_app(lambda: _first(job))
    for stop in (signal.SIGINT, signal.SIGTERM):  # where a shell has it ignored, too
        signal.signal(stop, signal.default_int_handler)
    serve(app, port, lambda address: _ready(address, show))
    typer.echo("\npresage: the page is closed")


def _first(job: Path | None) -> Plan:
    from presage.ui.plans import first_plan

    return first_plan(job)


def _ready(address: str, show: bool) -> None:
    typer.echo(f"presage: the page is at {address} (Ctrl-C ends it)")
    sys.stdout.flush()
    if show and sys.stdout.isatty() and _screen():
        import webbrowser

        webbrowser.open(address)


def _screen() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
