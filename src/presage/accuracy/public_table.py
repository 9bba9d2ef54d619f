"""The table of public runs: its rows, and the platforms its GPUs are on."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from presage.errors import InputError, PresageError

__all__ = ["platform_name", "read_table"]

# What the table calls a GPU, how many a node has, and the platform: the first that fits. None: like none that is known.
PLATFORMS = (
    (r"h100.*96gb|pcie|nvl$|h20\b|h800|a800", None, None),
    (r"a100.*40gb", 8, "dgx-a100-40"),
    (r"a100.*40gb", 4, "4xa100"),
    (r"a100.*80gb", 8, "dgx-a100"),
    (r"h100", 8, "dgx-h100"),
    (r"h100", 4, "4xh100"),
    (r"h200", 8, "dgx-h200"),
    (r"^b200", 8, "dgx-b200"),
    (r"^gb200", 4, "gb200-nvl72"),
)


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows with their lines; the table must have these columns."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            table = csv.DictReader(f)
            missing = [c for c in columns if c not in (table.fieldnames or ())]
            if missing:
                raise InputError(path, "no such column", missing[0])
            yield from enumerate(table, 2)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(path, str(e)) from e


def platform_name(gpu: str, per_node: int) -> str:
    """The platform with so many of a GPU in a node."""
    for pattern, size, name in PLATFORMS:
        if re.search(pattern, gpu.lower()) and size in (None, per_node):
            if name is None:
                break
            return name
    raise PresageError(f"no platform has {per_node} {gpu} a node")
