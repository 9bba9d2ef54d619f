"""A CSV table of GPUs: its columns, its rows, and synonyms of column names."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from presage.errors import InputError
from presage.files.reading import lines

Row = dict[str, str | None]
DEVICE = ("device", "dev_id", "gpu_index", "local_gpu_id", "local_rank", "device_id", "index")
WORK = ("kern", "kernel", "work", "exp", "benchmark", "workload", "op", "input_size", "size")


def read_table(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    """Column names, and the non-empty rows with their line numbers; plain or gzip."""
    try:
        reader = csv.DictReader(lines(path))
        names = [n for n in reader.fieldnames or [] if n]
        return names, [(line, row) for line, row in enumerate(reader, start=2) if any(row.values())]
    except csv.Error as e:
        raise InputError(path, f"not a CSV table ({e})") from e


def number(text: str | None) -> float | None:
    """The number in a text, or None if it is not a finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
