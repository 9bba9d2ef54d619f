"""The table of public runs: its rows, the numbers in them, and the platforms its GPUs are on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from math import inf
from pathlib import Path

from presage.errors import InputError, PresageError
from presage.files.reading import lines
from presage.hardware import Gpu, Platform, cluster, gpu, gpu_by_name, platforms
from presage.hardware.cluster import usual_network
from presage_validation.interconnect import Interconnect, read_interconnect

__all__ = ["count", "number", "platform_name", "platform_of_run", "read_table", "run_seconds"]

MOST = 10_000_000  # of what a row counts
USUAL_NODE = 8
TRAY = 8  # cards that are counted are those of a tray, where a node is said to be a whole rack
PCIE_TWIN = {"a100_40gb": "a100_pcie_40gb", "a100_80gb": "a100_pcie_80gb", "h100_sxm": "h100_pcie"} | {
    "v100_16gb": "v100_pcie_32gb",
    "v100_32gb": "v100_pcie_32gb",
}


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows with their lines; the table must have these columns."""
    try:
        table = csv.DictReader(lines(path), restval="")
        missing = [c for c in columns if c not in (table.fieldnames or ())]
        if missing:
            raise InputError(path, "no such column", missing[0])
        yield from enumerate(table, 2)
    except csv.Error as e:
        raise InputError(path, str(e)) from e


def run_seconds(row: Mapping[str, str]) -> float:
    """Of a step, as measured."""
    found = number(row, "step_time_s") or number(row, "step_time_s_derived")
    if not found:
        raise PresageError("no step time")
    return found


def number(row: Mapping[str, str], column: str) -> float | None:
    """What a column says, above 0; None where it says nothing."""
    text = row.get(column, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        raise PresageError(f"{column} is {text!r}, not a number") from None
    if found is not None and not 0 < found < inf:
        raise PresageError(f"{column} is {text}: it should be above 0")
    return found


def count(row: Mapping[str, str], column: str, default: int | None = None, most: int = MOST) -> int:
    """A number from 1 on; where a row says nothing or 0, the default."""
    text = row.get(column, "").strip()
    if default is not None and text in ("", "0"):
        return default
    try:
        found = float(text)
    except ValueError:
        raise PresageError(f"{column} is {text!r}, not a number") from None
    if not 1 <= found <= most:
        raise PresageError(f"{column} is {text}: it should be between 1 and {most:,}")
    return int(found)


def platform_name(gpu: str, per_node: int) -> str:
    """The platform that ships with presage with so many of a GPU in a node."""
    found = platform_of_run(gpu, per_node)
    if found not in platforms():
        raise PresageError(f"no platform has {per_node} {gpu} a node")
    return found.key


@cache
def platform_of_run(gpu_text: str, per_node: int = 0, interconnect: str = "") -> Platform:
    """The platform of a run as a table describes it: the GPU's name, GPUs a node (0: not said), and the links."""
    chip, size = gpu_by_name(gpu_text), per_node or USUAL_NODE
    said = read_interconnect(interconnect, size, usual_network(chip, size) / size)
    if said.pcie_only and "sxm" not in gpu_text.lower():
        chip = gpu(PCIE_TWIN.get(chip.key, chip.key))
    tray = said.cards if said.cards and said.cards <= TRAY < size else size
    domain = _domain(chip, said, tray, size)
    return cluster(chip, tray, said.node_Gbps, fabric=said.fabric or "infiniband", domain=domain, nics=said.cards)


def _domain(chip: Gpu, said: Interconnect, tray: int, size: int) -> int | None:
    """GPUs that share NVLink, where that is not a node: a rack that is named, or counted as a node."""
    named = said.domain if chip.link and said.domain and said.domain % tray == 0 else None
    return named or (size if tray < size else None)
