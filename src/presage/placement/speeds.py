"""Speeds of GPUs from a CSV file: which column names a GPU, its node and its time, and whether larger is slower.

One row for each GPU or several (its median counts); rows in the order of ranks unless there is a `rank` column. Where
several kinds of work were timed, each is taken relative to its own median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from presage.errors import InputError, PresageError
from presage.files.csv_table import DEVICE, WORK, Row, number, read_table
from presage.placement.fleet import Fleet

__all__ = ["read_speeds"]

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

    def told(self) -> str:
        return f"column {self.value}: larger is {'faster' if self.faster else 'slower'}"


@dataclass(frozen=True)
class _Timed:
    gpu: str
    node: str
    work: str
    time: float
    rank: int


def read_speeds(path: str | Path, columns: Mapping[str, str] | None = None) -> Fleet:
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


def _row(told: Row, c: _Columns, line: int) -> _Timed | None:
    """None where it has no number above 0."""
    value, at = number(told.get(c.value)), number(told.get(c.rank)) if c.rank else None
    gpu = "-".join((told.get(k) or "").strip() for k in c.gpu) or f"row {line}"
    node = "-".join((told.get(k) or "").strip() for k in c.node)
    if value is None or value <= 0 or not gpu.strip("-") or (c.rank and at is None):
        return None
    known = "" if all((told.get(k) or "").strip() in UNKNOWN for k in c.node) else node
    work = " ".join((told.get(k) or "").strip() for k in c.work)
    return _Timed(gpu, known, work, 1 / value if c.faster else value, line if at is None else int(at))


def _fleet(path: Path, rows: list[_Timed], c: _Columns, skipped: list[int]) -> Fleet:
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
    fleet = Fleet.of(factors, list(times), [nodes[g] for g in times])
    return replace(fleet, notes=_notes(path, rows, c, fleet, skipped))


def _notes(path: Path, rows: list[_Timed], c: _Columns, fleet: Fleet, skipped: list[int]) -> tuple[str, ...]:
    many = f", medians of {len(rows) / len(fleet):.3g} rows each" if len(rows) > len(fleet) else ""
    unknown = sum(not n for n in fleet.nodes)
    nodes = f"{len(set(fleet.nodes) - {''})} nodes" if fleet.known_nodes else "no nodes known: any may be grouped"
    nodes += f", {unknown} GPUs of unknown nodes" if unknown and fleet.known_nodes else ""
    notes = [f"{path.name}: {len(fleet)} GPUs ({c.told()}{many}), {nodes}"]
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
