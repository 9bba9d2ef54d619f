"""Fleet: GPUs with their names, their nodes and how slow each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError, PresageError
from presage.files.csv_table import DEVICE, WORK, Row, number, read_table
from presage.noise.sampling import RandomStreams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SLOWEST = 1e6  # times as long as a usual GPU


@dataclass(frozen=True, eq=False)
class GpuFleet:
    """In the order of ranks, spare GPUs last. Factors are times, of the fleet's median: above 1 is slow."""

    gpus: tuple[str, ...]
    nodes: tuple[str, ...]  # of each GPU; empty where unknown
    factors: Floats
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(factors: Sequence[float] | Floats, gpus: Sequence[str] = (), nodes: Sequence[str] = ()) -> GpuFleet:
        """Times in any unit; names are made up where none are given."""
        values = np.asarray(factors, np.float64)
        if not values.size or not np.isfinite(values).all() or values.min() <= 0:
            raise PresageError("a fleet needs a time above 0 for each GPU")
        names = tuple(gpus) or tuple(f"gpu{i}" for i in range(len(values)))
        return GpuFleet(names, tuple(nodes) or ("",) * len(values), values / float(np.median(values)))

    def __len__(self) -> int:
        return len(self.gpus)

    @cached_property
    def members(self) -> dict[str, Ints]:
        """GPUs of each node, in order; where no node is known, all of them are one."""
        names, index = np.unique(np.array(self.nodes), return_inverse=True)
        first = {str(n): np.flatnonzero(index == i) for i, n in enumerate(names)}
        return dict(sorted(first.items(), key=lambda item: int(item[1][0])))

    @property
    def known_nodes(self) -> bool:
        return len(self.members) > 1

    def unit(self, gpu: int) -> str:
        """What would be evicted for a GPU: its node, or itself where no node is known."""
        return self.nodes[gpu] if self.known_nodes and self.nodes[gpu] else self.gpus[gpu]

    def of_unit(self, name: str) -> Ints:
        """GPUs of a node, or the one GPU of this name."""
        return self.members[name] if self.known_nodes and name in self.members else np.array([self.gpus.index(name)])

    def hot(self, node: str, factor: float) -> GpuFleet:
        """The same with a node whose GPUs take `factor` as long. What is usual stays."""
        if node not in self.members:
            raise PresageError(f"unknown node {node}: choose from {', '.join(list(self.members)[:5])} ...")
        factors = self.factors.copy()
        factors[self.members[node]] *= factor
        return replace(self, factors=factors)


def random_fleet(
    gpus: int, node: int, sd: float, rng: np.random.Generator, share: float = 0.0, factor: float = 1.0
) -> GpuFleet:
    """For planning without data: a spread (of the logarithm), and a `share` of GPUs that take `factor` as long."""
    factors = np.exp(sd * rng.standard_normal(gpus))
    factors[rng.random(gpus) < share] *= factor
    nodes = [f"node{i // node}" for i in range(gpus)]
    return GpuFleet.of(factors, [f"{n}.{i % node}" for i, n in enumerate(nodes)], nodes)


# ---- Speeds of GPUs from a CSV file: which column names a GPU, its node and its time, and whether larger is slower.

RANK = ("rank", "global_rank")
GPU = ("gpu", "uuid", "gpu_uuid", "gpu_id", "gpuid", "serial", "name")
NODE = ("cab-node", "node", "host", "hostname", "node_id", "server", "machine")
RACK = ("cabinet", "rack")
SLOWER = (
    "factor",
    "time",
    "perf",
    "seconds",
    "duration",
    "latency",
    "slowdown",
    "slowness",
    "relative_time",
    "perfvar",
)
FASTER = ("speed", "tflops", "gflops", "throughput", "bandwidth", "clock", "tokens_per_second", "samples_per_second")
KEYS = ("gpu", "node", "time", "speed", "rank")
UNKNOWN = ("", "-1")  # nodes


@dataclass(frozen=True)
class _Columns:
    gpu: tuple[str, ...]
    node: tuple[str, ...]
    value: str
    faster: bool  # larger is
    work: tuple[str, ...]
    rank: str | None

    def text(self) -> str:
        return f"column {self.value}: larger is {'faster' if self.faster else 'slower'}"


@dataclass(frozen=True)
class _SpeedRow:
    gpu: str
    node: str
    work: str
    time: float
    rank: int


def read_speeds(path: str | Path, columns: Mapping[str, str] | None = None) -> GpuFleet:
    """A fleet; its notes say what was read. `columns` says which column is gpu, node, rank, time or speed."""
    path = Path(path)
    names, lines = read_table(path)
    found = _columns(path, names, columns or {})
    rows = {line: _row(told, found, line) for line, told in lines}
    kept = [r for r in rows.values() if r is not None]
    if not kept:
        raise InputError(path, "no row of it has a GPU and a number above 0", found.value)
    try:
        return _fleet(path, kept, found, [line for line, r in rows.items() if r is None])
    except PresageError as e:
        raise InputError(path, str(e), found.value) from e


def _row(told: Row, c: _Columns, line: int) -> _SpeedRow | None:
    """None where it has no number above 0."""
    value, at = number(told.get(c.value)), number(told.get(c.rank)) if c.rank else None
    gpu = "-".join((told.get(k) or "").strip() for k in c.gpu) or f"row {line}"
    node = "-".join((told.get(k) or "").strip() for k in c.node)
    if value is None or value <= 0 or not gpu.strip("-") or (c.rank and at is None):
        return None
    known = "" if all((told.get(k) or "").strip() in UNKNOWN for k in c.node) else node
    work = " ".join((told.get(k) or "").strip() for k in c.work)
    return _SpeedRow(gpu, known, work, 1 / value if c.faster else value, line if at is None else int(at))


def _fleet(path: Path, rows: list[_SpeedRow], c: _Columns, skipped: list[int]) -> GpuFleet:
    """Medians by kind of work and by GPU."""
    by_work: dict[str, list[float]] = {}
    for r in rows:
        by_work.setdefault(r.work, []).append(r.time)
    usual = {work: median(times) for work, times in by_work.items()}
    times: dict[str, list[float]] = {}
    nodes: dict[str, str] = {}
    for r in sorted(rows, key=lambda r: r.rank):
        times.setdefault(r.gpu, []).append(r.time / usual[r.work])
        nodes[r.gpu] = nodes.get(r.gpu) or r.node
    factors = np.array([median(t) for t in times.values()])
    fleet = GpuFleet.of(factors, list(times), [nodes[g] for g in times])
    return replace(fleet, notes=_notes(path, rows, c, fleet, skipped))


def _notes(path: Path, rows: list[_SpeedRow], c: _Columns, fleet: GpuFleet, skipped: list[int]) -> tuple[str, ...]:
    many = f", medians of {len(rows) / len(fleet):.3g} rows each" if len(rows) > len(fleet) else ""
    unknown = sum(not n for n in fleet.nodes)
    nodes = f"{len(set(fleet.nodes) - {''})} nodes" if fleet.known_nodes else "no nodes known: any may be grouped"
    nodes += f", {unknown} GPUs of unknown nodes" if unknown and fleet.known_nodes else ""
    notes = [f"{path.name}: {len(fleet)} GPUs ({c.text()}{many}), {nodes}"]
    if skipped:
        notes.append(
            f"{path.name}: {len(skipped)} rows skipped for want of a GPU or a number above 0, line {skipped[0]} first"
        )
    return tuple(notes)


def _columns(path: Path, names: list[str], told: Mapping[str, str]) -> _Columns:
    for key, name in told.items():
        if key not in KEYS:
            raise InputError(path, f"unknown column key {key}: choose from {', '.join(KEYS)}")
        if name not in names:
            raise InputError(path, f"is not a column: choose from {', '.join(names)}", name)
    lower = {n.strip().lower(): n for n in names}
    value, faster = _value(path, lower, told)
    rank = told.get("rank") or next((lower[n] for n in RANK if n in lower), None)
    node = (told["node"],) if "node" in told else _node(lower)
    gpu = (told["gpu"],) if "gpu" in told else _gpu(lower, node, rank)
    work = tuple(lower[n] for n in WORK if n in lower and lower[n] != value)
    return _Columns(gpu, node, value, faster, work, rank)


def _value(path: Path, lower: dict[str, str], told: Mapping[str, str]) -> tuple[str, bool]:
    """The column of times or speeds, and whether larger is faster."""
    if "time" in told or "speed" in told:
        return (told["time"], False) if "time" in told else (told["speed"], True)
    for words, faster in ((SLOWER, False), (FASTER, True)):
        for word in words:
            found = [n for n in lower if n == word] or [n for n in lower if n.startswith(f"{word}_")]
            if len(found) > 1:
                several = ", ".join(lower[n] for n in found)
                raise InputError(path, f"which of {several} counts? Say --column time=NAME or --column speed=NAME")
            if found:
                return lower[found[0]], faster
    raise InputError(
        path,
        "no column gives the speed of a GPU: use --column time=NAME if larger is slower, --column speed=NAME if faster",
    )


def _node(lower: dict[str, str]) -> tuple[str, ...]:
    """A node's name; with its rack's, where nodes are numbered within one."""
    name = next((n for n in NODE if n in lower), None)
    rack = next((lower[n] for n in RACK if n in lower), None)
    if name is None:
        return ()
    return (lower[name],) if name == "cab-node" or rack is None else (rack, lower[name])


def _gpu(lower: dict[str, str], node: tuple[str, ...], rank: str | None) -> tuple[str, ...]:
    one = next((lower[n] for n in GPU if n in lower), None)
    device = next((lower[n] for n in DEVICE if n in lower), None)
    if one is not None:
        return (*node, one) if node and one.strip().lower() == "gpu" and device is None else (one,)
    if node and device is not None:
        return (*node, device)
    return (rank,) if rank is not None else ()


def parse_fleet(speeds: str, columns: Mapping[str, str], gpus: int, node: int, seed: int) -> GpuFleet:
    """The fleet of a CSV file, or one drawn at random: random:SD or random:SD:SHARE:FACTOR."""
    kind, _, numbers = speeds.partition(":")
    if kind != "random":
        return read_speeds(speeds, columns)
    try:
        sd, *few = (float(x) for x in numbers.split(":"))
        share, factor = few or (0.0, 1.0)
    except ValueError:
        raise PresageError(f"--speeds {speeds}: should be random:SD or random:SD:SHARE:FACTOR") from None
    if not (0 <= sd < 1 and 0 <= share <= 1 and 0 < factor < SLOWEST):
        raise PresageError(f"--speeds {speeds}: SD and SHARE should lie in [0, 1], FACTOR in (0, {SLOWEST:g})")
    return random_fleet(gpus, node, sd, RandomStreams(seed)("fleet"), share, factor)
