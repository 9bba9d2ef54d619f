"""How a sweep that was killed goes on: the rows it has, and the draws that never came back.

A sweep appends a line per draw; a torn last line is cut off. The draw under way is written down, for a kernel may take
minutes for a shape nobody uses. What a killed sweep was at is tried once more when it goes on, for there are other
reasons to be killed; a draw that ends a sweep a second time is left out from then on.

Rows of two sweeps do not mix: one run at a time measures into a folder, and a sweep goes on only on the GPU and with
the software and the draws that it began with.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.files.reading import read_json

SAME = ("gpu", "torch", "cuda", "cudnn")  # of a header, for a sweep to go on


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Holds a folder against other runs; the system lets go of it when the process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise PresageError(f"{folder}: another run measures into it: wait for it, or give another folder") from e
    finally:
        os.close(handle)


def check_same_machine(folder: Path, now: Mapping[str, Any]) -> None:
    """Raise where what is in a folder was measured on another GPU or with other software."""
    path = folder / "header.json"
    if not path.exists():
        return
    before = read_json(path)
    for name in SAME:
        if not isinstance(before, dict) or before.get(name) != now[name]:
            held = before.get(name) if isinstance(before, dict) else None
            raise InputError(
                path, f"is {held}, and here it is {now[name]}: give another folder (presage pack merges packs)", name
            )


def check_same_draws(path: Path, draws: Sequence[Any]) -> None:
    """Raise where the rows of a sweep are not of its first draws."""
    rows = path.read_bytes().splitlines() if path.exists() else []
    for number, (row, wanted) in enumerate(zip(rows, draws, strict=False), 1):
        try:
            same = json.loads(row)["p"] == json.loads(json.dumps(wanted))
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(path, f"line {number} is damaged: remove the file, and it is measured again") from e
        if not same:
            raise InputError(
                path, f"line {number} is of another sweep (--seed, or another version): give another folder"
            )


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


class StuckDraws:
    """The draws of one family that ended sweeps, each as often as it did, in FAMILY.stuck beside its rows."""

    def __init__(self, folder: Path, family: str) -> None:
        self.under_way, self.file = folder / f"{family}.now", folder / f"{family}.stuck"
        ended: list[int] = json.loads(self.file.read_text()) if self.file.exists() else []
        if self.under_way.exists():
            draw = self.under_way.read_text()
            if draw.isdigit():  # it is empty where the kill came between its making and its writing
                ended.append(int(draw))
                write_whole(self.file, json.dumps(sorted(ended)).encode())
            self.under_way.unlink()
        self.draws = {draw for draw, times in Counter(ended).items() if times > 1}

    def at(self, draw: int) -> None:
        self.under_way.write_text(str(draw))

    def done(self) -> None:
        self.under_way.unlink(missing_ok=True)
