"""The table of public runs: its rows, and the platforms its GPUs are on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from presage.accuracy.interconnect import Interconnect, read_interconnect
from presage.errors import InputError, PresageError
from presage.hardware import Gpu, Platform, cluster, gpu, gpu_named, platforms
from presage.hardware.cluster import usual_network

__all__ = ["platform_name", "platform_of_run", "read_table"]

USUAL_NODE = 8
TRAY = 8  # cards that are counted are those of a tray, where a node is said to be a whole rack
PCIE_TWIN = {"a100_40gb": "a100_pcie_40gb", "a100_80gb": "a100_pcie_80gb", "h100_sxm": "h100_pcie"} | {
    "v100_16gb": "v100_pcie_32gb",
    "v100_32gb": "v100_pcie_32gb",
}


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
    """The platform that ships with presage with so many of a GPU in a node."""
    found = platform_of_run(gpu, per_node)
    if found not in platforms():
        raise PresageError(f"no platform has {per_node} {gpu} a node")
    return found.key


@cache
def platform_of_run(gpu_text: str, per_node: int = 0, interconnect: str = "") -> Platform:
    """The platform of a run as a table describes it: the GPU's name, GPUs a node (0: not said), and the links."""
    chip, size = gpu_named(gpu_text), per_node or USUAL_NODE
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
