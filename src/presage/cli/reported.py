"""`--report`: the answer as one HTML file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.common import console
from presage.cli.manners import OUTPUT

if TYPE_CHECKING:
    from presage.report.html import Page

__all__ = ["Report", "asked_by", "ready", "reported"]

Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="OUT.html",
        help="Write charts and tables as one HTML file (any browser, offline).",
        rich_help_panel=OUTPUT,
    ),
]


def ready(report: Path | None) -> None:
    """Raises, before any work, where a report is wanted and cannot be made."""
    if report is not None:
        from presage.report.html.render import needed

        needed()


def reported(report: Path | None, page: Callable[[], Page], said: bool = True) -> None:
    """Write the page if one is wanted; `said`: tell where it is (not where stdout is JSON)."""
    if report is None:
        return
    from rich.markup import escape

    from presage.report.html import write_page

    write_page(page(), report)
    if said:
        console().print(f"\nreport: {escape(str(report))} (open it in a browser)", soft_wrap=True)


def asked_by() -> str:
    """The command that makes the page, as it was typed."""
    return shlex.join(["presage", *sys.argv[1:]])
