"""Errors of presage: one sentence that names the file and the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

LONGEST = 1500  # characters of a sentence: a file's own words may be in it


class PresageError(Exception):
    """A user error. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, sentence: str = "") -> None:
        super().__init__(_printable(sentence))


class InputError(PresageError):
    """An unusable file: the file, the field if known, what is wrong and what to do."""

    def __init__(self, path: str | Path, problem: str, field: str | None = None) -> None:
        self.path, self.problem, self.field = str(path), problem, field and field[:LONGEST]
        where = f"{self.path}: {self.field}" if field else self.path
        super().__init__(f"{where}: {problem}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str | None]]:
        return type(self), (self.path, self.problem, self.field)


# What working with a value of the wrong kind raises, where a row or an entry that cannot be used is left out and named.
WRONG_VALUE = (PresageError, ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)


def near(name: str, known: Iterable[str]) -> str:
    """': did you mean X or Y?' for names similar to a known one, else nothing."""
    from difflib import get_close_matches

    every, wanted = [*known], name.lower()
    longer = [k for k in every if wanted and k.startswith(wanted)][:3]
    close = list(dict.fromkeys([*longer, *get_close_matches(wanted, every, n=3, cutoff=0.6)]))[:3]
    return f": did you mean {', '.join([*close[:-2], ' or '.join(close[-2:])])}?" if close else ""


def missing_file(path: str | Path) -> InputError:
    """The error for a file that is not there: files of its folder with similar names, and where examples are."""
    path = Path(path)
    try:
        there = [p.name for p in path.parent.iterdir()] if len(path.name) < 256 else []
    except (OSError, ValueError):
        there = []
    hint = near(path.name, there)
    return InputError(
        path,
        f"cannot be read: there is no such file{hint or ' (`presage examples FOLDER` copies examples to start from)'}",
    )


def _printable(text: str) -> str:
    """The text on one line, shortened, without control characters."""
    kept = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    if kept.isprintable():
        return kept
    words = " ".join(kept.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def compile_pattern(text: str) -> re.Pattern[str]:
    """A regular expression that a user wrote."""
    try:
        return re.compile(text)
    except re.error as e:
        raise PresageError(f"{text!r} is not a regular expression: {e}") from e
