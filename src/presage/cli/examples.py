"""`presage examples`: the steps, jobs and tables that ship with presage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli.options import Json
from presage.cli.output import show_answer


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
    from presage.report.answer import Answer, Section, data_table

    found = examples()
    new = copy_examples(folder) if folder else []
    data: dict[str, Any] = {"examples": [{"file": e.file, "command": e.command} for e in found]}
    title = "Examples (presage examples FOLDER copies them)"
    sections = [Section(title, (data_table(title, ("file", "try"), [(e.file, e.command) for e in found], text=2),))]
    if folder:
        data |= {"folder": str(folder), "copied": [str(p) for p in new]}
        text = f"{len(new)} files copied to {folder}, {len(found) - len(new)} existed already"
        sections.append(Section("Copied", text=text))
    brief = "\n".join(e.file for e in found)
    show_answer(Answer("examples", sections=tuple(sections), to_data=lambda: data, brief=brief), json)
