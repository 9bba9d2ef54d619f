"""The examples that ship with presage: next to the package in a clone, inside it when installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from presage.errors import PresageError
from presage.files import write_whole

# How each kind of file is used; others belong to one of these.
COMMANDS = {
    "gpt.py": "presage predict {}:build --arg batch=8",
    "gpus.csv": "presage fit {} --out noise.toml",
    "dlrm/*.toml": "presage dlrm {}",
    "dlrm/*_tables.json": "presage shard {} --ranks 8 --platform dgx-h100 --batch 65536",
    "jobs/*.toml": "presage job {}",
}


@dataclass(frozen=True)
class Example:
    """An example file, by its path in the examples folder, and a command that uses it (may be empty)."""

    file: str
    command: str


def home() -> Path:
    """The folder of the examples."""
    package = Path(str(files("presage")))
    for folder in (package / "examples_shipped", package.parent.parent / "examples"):
        if folder.is_dir():
            return folder
    raise PresageError("the examples are not installed with presage: install its wheel anew, or use a clone")


def examples() -> list[Example]:
    """All example files, those with a command first."""
    found = [p.relative_to(home()) for p in sorted(home().rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    told = [Example(p.as_posix(), _command(p)) for p in found]
    return sorted(told, key=lambda e: not e.command)


def copy_examples(folder: Path) -> list[Path]:
    """Copy the examples that do not exist yet; returns the new files."""
    new = []
    for example in examples():
        target = folder / example.file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, (home() / example.file).read_bytes())
            new.append(target)
    return new


def _command(file: Path) -> str:
    return next((c.format(f"examples/{file.as_posix()}") for g, c in COMMANDS.items() if _matches(file, g)), "")


def _matches(file: Path, pattern: str) -> bool:
    """Whether a path matches a pattern of the same depth."""
    return file.match(pattern) and len(file.parts) == len(Path(pattern).parts)
