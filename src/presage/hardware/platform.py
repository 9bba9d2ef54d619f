"""One kind of machine with many GPUs: which GPUs, and the links between them, tier by tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError
from presage.hardware.facts import (
    Figure,
    SourcedFigures,
    check_figures,
    find_file,
    load_toml,
    shipped_files,
    unknown_name,
)
from presage.hardware.gpu import Gpu, gpu

KIND = "platforms"
TEXTS = {"name": str, "gpu": str}
LINK_TEXTS = {"name": str, "fabric": str, "topology": str, "in_network": str}
TOPOLOGIES = ("switch", "mesh", "cube", "pairs", "host", "fat-tree")
IN_NETWORK = {"none": False, "nvls": True, "sharp": True}
GB, US = 1e9, 1e-6
FIGURES = {
    "ranks": Figure(1, 2, 10_000_000, whole=True),
    "bandwidth_GBps": Figure(GB, 0.1, 20_000, required=False),
    "latency_us": Figure(US, 0.01, 1000),
    "nics": Figure(1, 1, 1024, required=False, whole=True),
}
OF_GPU = {"gpu link": "link", "gpu pcie": "pcie"}  # what `bandwidth` may refer to


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """One tier of the network, in SI units: bytes/s one way per GPU, seconds per hop."""

    name: str  # nvlink, pcie, infiniband ...
    fabric: str  # its generation; machines of one fabric share what was measured on it
    ranks: int  # GPUs within its reach
    bandwidth: float
    latency: float
    topology: str  # switch, mesh, cube (DGX-1), pairs (bridges), host (PCIe, CPUs), fat-tree (a network of nodes)
    in_network: bool  # the switch reduces: NVLS, SHARP
    nics: int | None = None  # network cards in a node
    facts: SourcedFigures | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """Seconds of a collective by bytes, measured on a platform in one group of ranks."""

    op: str
    ranks: int
    per_domain: int
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Platform:
    """GPUs and their links, innermost tier first."""

    key: str
    name: str
    gpu: Gpu
    links: tuple[NetworkLink, ...]
    facts: tuple[SourcedFigures, ...] = field(default=(), compare=False, repr=False)
    measured: tuple[MeasuredCurve, ...] = field(default=(), repr=False)  # on the user's own machines

    @property
    def domain(self) -> int:
        """GPUs of the innermost tier: a node, an NVLink domain, a bridged pair."""
        return self.links[0].ranks

    @property
    def fabrics(self) -> str:
        """Fabrics of all links, innermost first: "nvlink4 infiniband"."""
        return " ".join(link.fabric for link in self.links)


def platform(name: str) -> Platform:
    """A platform by its short name (dgx-h100), or from a .toml file."""
    path = platform_file(name)
    return _shipped(path) if not name.endswith(".toml") else read_platform(path)


def platform_file(name: str) -> Path:
    """The file of a platform by its short name, or the path of a .toml file itself."""
    path = find_file(KIND, name)
    if path is None:
        raise unknown_name("platform", name)
    return path


@cache
def _shipped(path: Path) -> Platform:
    return read_platform(path)


@cache
def platforms() -> tuple[Platform, ...]:
    """All platforms that ship with presage."""
    return tuple(_shipped(path) for path in shipped_files(KIND))


def read_platform(path: str | Path) -> Platform:
    """A platform from its data file."""
    path = Path(path)
    table = load_toml(path)
    tiers, curves = table.pop("links", None), table.pop("collectives", [])
    if not isinstance(tiers, list) or not tiers or not all(isinstance(t, dict) for t in tiers):
        raise InputError(path, "no [[links]] in it", "links")
    top = check_figures(path, table | {"figures": []}, TEXTS, {})
    chip = _gpu(path, top.texts["gpu"])
    links = tuple(_link(path, tier, chip) for tier in tiers)
    _check(path, links)
    facts = tuple(link.facts for link in links if link.facts)
    return Platform(path.stem, top.texts["name"], chip, links, facts, _measured(path, curves, links))


def _gpu(path: Path, name: str) -> Gpu:
    """A GPU by name, or from a .toml file next to the platform's file."""
    if name.endswith(".toml"):
        return gpu(str(path.parent / name))
    try:
        return gpu(name)
    except PresageError as e:
        raise InputError(path, str(e), "gpu") from e


def _link(path: Path, tier: dict[str, Any], chip: Gpu) -> NetworkLink:
    refers = tier.pop("bandwidth", None)
    facts = check_figures(path, tier, LINK_TEXTS, FIGURES)
    texts, f = facts.texts, facts.figures
    for name, known in (("topology", TOPOLOGIES), ("in_network", tuple(IN_NETWORK))):
        if texts[name] not in known:
            raise InputError(path, f"is {texts[name]!r}: choose from {', '.join(known)}", name)
    return NetworkLink(
        name=texts["name"],
        fabric=texts["fabric"],
        ranks=int(f["ranks"]),
        bandwidth=_bandwidth(path, refers, f.get("bandwidth_GBps"), chip),
        latency=f["latency_us"],
        topology=texts["topology"],
        in_network=IN_NETWORK[texts["in_network"]],
        nics=int(f["nics"]) if "nics" in f else None,
        facts=facts,
    )


def _bandwidth(path: Path, refers: Any, given: float | None, chip: Gpu) -> float:
    """The given bandwidth, or that of the GPU's own link."""
    if (refers is None) == (given is None):
        raise InputError(path, f"give one of bandwidth ({' or '.join(OF_GPU)}) and bandwidth_GBps", "bandwidth")
    if given is not None:
        return given
    if not isinstance(refers, str) or refers not in OF_GPU:
        raise InputError(path, f"is {refers!r}: choose from {', '.join(OF_GPU)}", "bandwidth")
    bandwidth = getattr(chip, OF_GPU[refers])
    if bandwidth is None:
        raise InputError(path, f"is {refers!r}, which {chip.key} has none of", "bandwidth")
    return float(bandwidth)


WORDS = {str: "a text", int: "a whole number", list: "a list of numbers"}
CURVE = {"op": str, "ranks": int, "ranks_per_domain": int, "bytes": list, "time_us": list}


def _measured(path: Path, curves: Any, links: tuple[NetworkLink, ...]) -> tuple[MeasuredCurve, ...]:
    """The tables [[collectives]] of a platform file, as `presage fit --collectives` writes them."""
    if not isinstance(curves, list) or not all(isinstance(c, dict) for c in curves):
        raise InputError(path, "should be tables: [[collectives]]", "collectives")
    return tuple(_measured_curve(path, c, links) for c in curves)


def _measured_curve(path: Path, table: dict[str, Any], links: tuple[NetworkLink, ...]) -> MeasuredCurve:
    for key, of in CURVE.items():
        if not isinstance(table.get(key), of) or isinstance(table[key], bool):
            raise InputError(path, f"should be {WORDS[of]}", f"collectives.{key}")
    if more := table.keys() - CURVE.keys():
        raise InputError(path, f"is unknown: choose from {', '.join(CURVE)}", f"collectives.{sorted(more)[0]}")
    ranks, near, nbytes, times = (table[k] for k in ("ranks", "ranks_per_domain", "bytes", "time_us"))
    if not 2 <= ranks <= links[-1].ranks or not 1 <= near <= min(ranks, links[0].ranks):
        raise InputError(path, f"{ranks} ranks, {near} in a domain, are no group of this platform", "collectives.ranks")
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e18 for v in [*nbytes, *times])
    if not numbers or not nbytes or len(nbytes) != len(times) or sorted(set(nbytes)) != nbytes:
        raise InputError(path, "should be as many rising sizes as times, all above 0", "collectives.bytes")
    return MeasuredCurve(table["op"], ranks, near, tuple(map(float, nbytes)), tuple(t * US for t in times))


def _check(path: Path, links: tuple[NetworkLink, ...]) -> None:
    """Raise for tiers that contradict each other."""
    for inner, outer in pairwise(links):
        if outer.ranks <= inner.ranks:
            raise InputError(path, f"of {outer.name} should be more than that of {inner.name} within it", "ranks")
        if outer.ranks % inner.ranks:
            raise InputError(path, f"of {outer.name} should be a multiple of that of {inner.name} within it", "ranks")
        if outer.bandwidth > inner.bandwidth:
            raise InputError(path, f"of {outer.name} is more than of {inner.name} within it", "bandwidth_GBps")
