"""Small results kept on disk between processes, so that the same question is answered at once the second time.

They lie in $PRESAGE_CACHE, or in `presage` of the user's cache folder; PRESAGE_CACHE=off keeps nothing. A key holds
all that the result depends on, and every file of the installed package by size and time: a change of any is a miss.
What cannot be read or written is computed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from presage.files.writing import write_whole

PACKAGE = Path(__file__).resolve().parent.parent
MOST = 500  # results kept: beyond, the oldest go
OFF = "off"


def remembered(key: str, compute: Callable[[], list[float]]) -> list[float]:
    """The numbers that `compute` gives, kept under `key`."""
    folder = _folder()
    if folder is None:
        return compute()
    path = folder / f"{hashlib.sha256(f'{fingerprint()} {key}'.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        if isinstance(value, list) and all(isinstance(x, int | float) for x in value):
            return value
    value = compute()
    with suppress(Exception):  # no room, no right to write: computed again next time
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value).encode())
        _prune(folder)
    return value


@cache
def fingerprint() -> str:
    """Names, sizes and times of the package's files."""
    out = hashlib.sha256()
    for folder, folders, names in os.walk(PACKAGE):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            stat = os.stat(os.path.join(folder, name))
            out.update(f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns};".encode())
    return out.hexdigest()


def _folder() -> Path | None:
    given = os.environ.get("PRESAGE_CACHE", "")
    if given == OFF:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given or os.path.join(home, "presage"))


def _prune(folder: Path) -> None:
    kept = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)
    for path in kept[:-MOST]:
        path.unlink(missing_ok=True)
