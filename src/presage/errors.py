"""What presage says when it cannot do what was asked: one sentence, naming the file and the field."""

from __future__ import annotations

from pathlib import Path

__all__ = ["InputError", "PresageError"]


class PresageError(Exception):
    """A mistake the user can mend. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


class InputError(PresageError):
    """A file that cannot be used: which file, which field (where known), what is wrong and what to do."""

    def __init__(self, path: str | Path, problem: str, field: str | None = None) -> None:
        self.path, self.problem, self.field = str(path), problem, field
        where = f"{self.path}: {field}" if field else self.path
        super().__init__(f"{where}: {problem}")
