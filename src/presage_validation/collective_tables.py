"""Tables of measured collectives, as nccl-tests measures them.

CSV with the columns gpu, nodes, n_gpus, op, bytes and time_us; source and others may be there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from presage.costs.collectives.group import OPS, Group
from presage.errors import InputError, PresageError
from presage.files.reading import lines
from presage.hardware import Platform, platform
from presage_fit.collectives import Measured
from presage_validation.score import Skipped

__all__ = ["Entry", "platform_of", "read_rows"]

COLUMNS = ("gpu", "nodes", "n_gpus", "op", "bytes", "time_us")
# What tables call a GPU, and the platform whose links it has, which may be another GPU's: the first that fits.
NAMES = (
    (r"p4de", "p4de"),
    (r"p4d", "p4d"),
    (r"p5en", "p5en"),
    (r"p5", "p5"),
    (r"gb[23]00", "gb200-nvl72"),
    (r"b[23]00", "dgx-b200"),
    (r"h200|h20\b|h20_|gh200", "dgx-h200"),
    (r"h100.*(pcie|nvl)|h800|a800", None),
    (r"h100", "dgx-h100"),
    (r"a100.*pcie", "8xa100-pcie"),
    (r"a100.*40", "dgx-a100-40"),
    (r"a100", "dgx-a100"),
    (r"mi300", "mi300x-ib"),
    (r"gv100", "4xgv100"),
    (r"v100", "dgx-1-v100"),
    (r"l40s", "8xl40s"),
    (r"\bl4\b|\bl4_", "8xl4"),
)
SPELLINGS = {op.replace("_", ""): op for op in OPS}


@dataclass(frozen=True, slots=True)
class Entry:
    """A row, what it is called, and which curve of the table it is of."""

    row: Measured
    name: str
    gpu: str
    curve: tuple[str, ...]


def platform_of(gpu: str) -> Platform:
    """The platform with the links of a GPU as a table calls it."""
    key = next((key for pattern, key in NAMES if re.search(pattern, gpu.lower())), None)
    if key is not None:
        return platform(key)
    raise PresageError(f"no platform for the GPU name {gpu!r}")


def read_rows(path: Path) -> tuple[list[Entry], list[Skipped]]:
    """Rows that can be used, and those that cannot."""
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(_lines(path), 2):
        try:
            entries.append(_entry(line))
        except PresageError as e:
            skipped.append(Skipped(f"line {number}", str(e)))
    return entries, skipped


def _lines(path: Path) -> Iterator[dict[str, str]]:
    try:
        table = csv.DictReader(lines(path), restval="")
        _check(path, table.fieldnames or ())
        yield from table
    except csv.Error as e:
        raise InputError(path, f"not a CSV file: {e}") from e


def _check(path: Path, there: Iterable[str]) -> None:
    missing = [c for c in COLUMNS if c not in there]
    if missing:
        raise InputError(path, "no such column", missing[0])


def _entry(line: dict[str, str]) -> Entry:
    op = SPELLINGS.get(re.sub(r"[^a-z]|perf", "", line["op"].lower()))
    if op is None:
        raise PresageError(f"no model of the collective {line['op']!r}")
    here = platform_of(line["gpu"])
    nodes, ranks, nbytes, us = (_number(line, c) for c in ("nodes", "n_gpus", "bytes", "time_us"))
    if nodes < 1:
        raise PresageError(f"nodes {nodes:g} is out of range")
    if ranks < 2:
        raise PresageError("one rank has nobody to talk to")
    row = Measured(here, op, group_of(here, int(ranks), int(nodes)), nbytes, us * 1e-6)
    what = (line["gpu"], line["nodes"], line["n_gpus"], op)
    return Entry(row, f"{' '.join(what)} {int(nbytes)}", line["gpu"], (*what, line.get("source") or ""))


def group_of(here: Platform, ranks: int, nodes: int) -> Group:
    """Nodes of one NVLink domain are close; others are not."""
    whole = here.links[0].topology == "switch" and here.domain >= ranks and here.domain > 8
    if whole or (nodes == 1 and ranks <= here.domain):
        return Group(ranks, ranks)
    return Group(ranks, min(max(ranks // nodes, 1), here.domain))


def _number(line: dict[str, str], column: str) -> float:
    try:
        value = float(line[column])
    except (TypeError, ValueError):
        raise PresageError(f"{column} is {line[column]!r}, not a number") from None
    if not 0 < value < float("inf"):
        raise PresageError(f"{column} {value:g} is out of range")
    return value
