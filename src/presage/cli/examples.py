"""`presage examples`: the steps, jobs and tables that ship with presage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.options import Json
from presage.cli.output import console, emit, print_brief

if TYPE_CHECKING:
    from rich.table import Table


def command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Copy the examples here; existing files are kept.")
    ] = None,
    json: Json = None,
) -> None:
    """List the examples that ship with presage; with FOLDER, copy them into it.

    presage examples

    presage examples ./examples && presage job examples/jobs/llama3.1-405b.toml
    """
    from presage.examples import copy_examples, examples

    found = examples()
    new = copy_examples(folder) if folder else []
    if emit(json, _to_json(found, folder, new)):
        print_brief("\n".join(e.file for e in found))
        console().print(_table(found))
        if folder:
            console().print(
                f"\n{len(new)} files copied to {folder}, {len(found) - len(new)} existed already", soft_wrap=True
            )


def _to_json(found: list[Any], folder: Path | None, new: list[Path]) -> dict[str, Any]:
    rows = [{"file": e.file, "command": e.command} for e in found]
    return {"examples": rows} | ({"folder": str(folder), "copied": [str(p) for p in new]} if folder else {})


def _table(found: list[Any]) -> Table:
    from presage.report.terminal import plain_table

    table = plain_table("Examples (presage examples FOLDER copies them)", "file", "try", left=2)
    for e in found:
        table.add_row(e.file, e.command)
    return table
