"""Run what pages show again and put its output below it: `python docs/refresh.py [PAGE.md...]`, all without a name."""

from __future__ import annotations

import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from shown import PAGES, Command, commands, place, played, run, snippets

NOT_RUN = ("pip ", "make ", "python ", "git ", "cd ")
KNOWN: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}


def again(command: Command, folder: Path) -> str:
    """The console lines of a command, with what it prints now."""
    key = (command.text, command.files)
    if key not in KNOWN:
        KNOWN[key] = run(command.text, place(folder / str(len(KNOWN)), command.files))
    return "\n".join([f"$ {command.line}", *command.shown(KNOWN[key])]) + "\n"


def refresh(page: Path, folder: Path) -> None:
    text = page.read_text()
    for command in commands(page):
        if command.output is not None and not command.line.startswith(NOT_RUN):
            text = text.replace(f"$ {command.line}\n{command.output}", again(command, folder), 1)
    page.write_text(printed(page, text, folder))


def printed(page: Path, text: str, folder: Path) -> str:
    """The text with what its Python prints now, where the page shows that. Another process runs it: a page may register
    what commands of the next would then show."""
    shown = snippets(page)
    if all(snippet.output is None for snippet in shown):
        return text
    with get_context("spawn").Pool(1) as pool:
        outputs = pool.apply(played, (shown, place(folder / page.stem), {}))
    for snippet, out in zip(shown, outputs, strict=True):
        if snippet.output is not None:
            block = f"{snippet.code}```\n\n```text\n"
            text = text.replace(f"{block}{snippet.output}```", f"{block}{out.rstrip()}\n```")
    return text


def main() -> None:
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            if not wanted or page.name in wanted:
                refresh(page, Path(folder))


if __name__ == "__main__":
    main()
