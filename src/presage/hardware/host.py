"""One kind of host: the machine around a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from presage.hardware.facts import Figure, SourcedFigures, find_file, read_figures, shipped_files, unknown_name

KIND = "hosts"
TEXTS = {"name": str, "processor": str}
FIGURES = {
    "cpus": Figure(1, 1, 4096, whole=True),
    "memory_GiB": Figure(1024.0**3, 1, 65_536, required=False),
}


@dataclass(frozen=True, slots=True)
class Host:
    """Figures of a host. Its time costs are in calibration packs and traces."""

    key: str
    name: str
    processor: str
    cpus: int  # as the operating system counts them
    memory: int | None
    facts: SourcedFigures = field(compare=False, repr=False)


def host(name: str) -> Host:
    """A host by its short name, or from a .toml file."""
    path = find_file(KIND, name)
    if path is None:
        raise unknown_name("host", name)
    return read_host(path)


@cache
def hosts() -> tuple[Host, ...]:
    """All hosts that ship with presage."""
    return tuple(read_host(path) for path in shipped_files(KIND))


def read_host(path: str | Path) -> Host:
    """A host from its data file."""
    facts = read_figures(Path(path), TEXTS, FIGURES)
    f = facts.figures
    memory = int(f["memory_GiB"]) if "memory_GiB" in f else None
    return Host(facts.key, facts.texts["name"], facts.texts["processor"], int(f["cpus"]), memory, facts)
