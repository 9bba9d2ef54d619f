"""A file of rows that a sweep appends to: a line a row, a last line that a killed run has left torn cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def count_rows(path: Path) -> int:
    """How many rows are in the file, once it ends with a whole one."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    _cut(path, data.rfind(b"\n") + 1)
    return data.count(b"\n")


def whole_parts(path: Path) -> set[str]:
    """The parts whose rows are all there. A torn line takes the part before it along, which may have lost rows too."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    rows: list[dict[str, Any]] = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    if data.endswith(b"\n") or not rows:
        _cut(path, data.rfind(b"\n") + 1)
        return {row["part"] for row in rows}
    kept = [row for row in rows if row["part"] != rows[-1]["part"]]
    lines = data.splitlines(keepends=True)
    _cut(path, sum(len(line) for line in lines[: len(kept)]))
    return {row["part"] for row in kept}


def _cut(path: Path, size: int) -> None:
    if size < path.stat().st_size:
        os.truncate(path, size)
