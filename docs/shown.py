"""What the pages show, and how to run it as a reader would: commands with their output, Python, files to copy.

On a page, in order:

- a `console` block has lines `$ COMMAND`, each with the output below it; `| head -N` and `| tail -N` show a part of it;
- an indented block with a line that begins with a program's name shows commands without output;
- a `python` block is run; a `text` block right below it is what it prints;
- a block with a title (`toml title="mine.toml"`) is a file of that name, there for what comes after it.

Commands of presage run in this process, which has loaded already what each of them would load again.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PAGES",
    "ROOT",
    "Command",
    "Snippet",
    "commands",
    "inline",
    "inside",
    "lines",
    "place",
    "played",
    "run",
    "snippets",
]

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$(?:\n\n?(?=```text\n)```text\n(.*?)^```$)?', re.M | re.S)
PART = re.compile(r" \| (head|tail) -(\d+)$")
PROGRAMS = re.compile(r"^(?:presage|python|pip|make|torchrun|mkdocs|git|cd|source|uv|ray) ")
LINKED = ("examples", "data", "workloads", "src", "tools", "docs", "bench")  # what commands may name


@dataclass(frozen=True)
class Command:
    """A line that a page tells its reader to type."""

    page: str
    line: str  # with what stands behind a pipe
    output: str | None  # None: not shown
    files: tuple[tuple[str, str], ...] = ()  # that the page has made by then

    @property
    def text(self) -> str:
        return PART.sub("", self.line)

    def shown(self, printed: str) -> list[str]:
        """The lines of what was printed that the page shows: all, the first or the last ones."""
        found, part = lines(printed), PART.search(self.line)
        if part is None:
            return found
        some = found[: int(part[2])] if part[1] == "head" else found[-int(part[2]) :]
        return lines("\n".join(some))


@dataclass(frozen=True)
class Snippet:
    """Python on a page."""

    page: str
    code: str
    output: str | None
    files: tuple[tuple[str, str], ...] = ()


def commands(page: Path) -> list[Command]:
    """All lines to type, of console blocks and of indented ones."""
    files: list[tuple[str, str]] = []
    text, out = page.read_text(), []
    for block in FENCE.finditer(text):
        language, title, body = block.group(1, 2, 3)
        if title:
            files.append((title, body))
        elif language in ("console", "sh", "bash", "shell"):
            out += [Command(page.name, line, shown, tuple(files)) for line, shown in _typed(language, body)]
    plain = FENCE.sub("", text)
    found = (
        line.strip().removeprefix("$ ").partition("  #")[0].strip()
        for line in plain.splitlines()
        if line.startswith("    ")
    )
    return out + [Command(page.name, line, None) for line in found if PROGRAMS.match(line)]


def _typed(language: str, body: str) -> Iterator[tuple[str, str | None]]:
    if language != "console":
        yield from ((line.partition("  #")[0].strip(), None) for line in body.splitlines() if line.strip())
        return
    for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
        line, _, shown = part.partition("\n")
        yield line, shown


def snippets(page: Path) -> list[Snippet]:
    files: list[tuple[str, str]] = []
    out = []
    for block in FENCE.finditer(page.read_text()):
        language, title, body, shown = block.groups()
        if title:
            files.append((title, body))
        elif language == "python":
            out.append(Snippet(page.name, body, shown, tuple(files)))
    return out


def inline(page: Path) -> list[str]:
    """Commands of presage in sentences."""
    found = re.findall(r"`(presage [^`]+)`", FENCE.sub("", page.read_text()))
    return [" ".join(text.split()) for text in found]


def lines(text: str) -> list[str]:
    """Output as it is compared: without spaces at ends of lines, and empty lines around it."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def place(folder: Path, files: tuple[tuple[str, str], ...] = ()) -> Path:
    """A folder that looks like the repository's root to commands, with the files that a page makes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKED:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    (folder / "out").mkdir(exist_ok=True)
    for name, body in files:
        (folder / name).write_text(body)
    return folder


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """As the working folder, from which Python imports too, for a while."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def run(command: str, folder: Path) -> str:
    """What it prints; and what it says when it fails, with its exit code."""
    args = shlex.split(command)
    if args[0] != "presage":
        done = subprocess.run(args, capture_output=True, text=True, cwd=folder, check=True)
        return done.stdout
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with inside(folder), redirect_stdout(out), redirect_stderr(err):
        code = _presage(args)
    printed = out.buffer.getvalue().decode()
    if code:
        printed += err.getvalue()
    return printed


def played(shown: list[Snippet], folder: Path, known: dict[str, Any]) -> list[str]:
    """What each piece of a page's Python prints, one after the other, with the names that are known before."""
    out = []
    for snippet in shown:
        place(folder, snippet.files)
        printed = io.StringIO()
        with inside(folder), redirect_stdout(printed):
            exec(compile(snippet.code, snippet.page, "exec"), known)
        out.append(printed.getvalue())
    return out


def _presage(args: list[str]) -> int:
    from presage.cli import main

    before, sys.argv = sys.argv, args
    try:
        main()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.argv = before
    return 0
