"""Writing files whole or not at all."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

from presage.errors import PresageError

__all__ = ["write_whole"]


def write_whole(path: str | Path, data: bytes, level: int = 6) -> None:
    """Write to a neighbour, then rename, so that a failure leaves no half file. Names ending in .gz are compressed."""
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data, level, mtime=0)  # the same data, the same file
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    except OSError as e:
        raise PresageError(f"{path}: cannot be written: {e.strerror or e}") from e
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as e:
        Path(name).unlink(missing_ok=True)
        raise PresageError(f"{path}: cannot be written: {e.strerror or e}") from e
