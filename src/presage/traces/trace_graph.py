"""Graphs from execution traces: of one file, or of a folder with a file for each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from presage.errors import InputError, PresageError
from presage.graph.diff import alike
from presage.graph.graph import Graph, Op, faults
from presage.traces.profiled_step import ProfiledStep
from presage.traces.trace_set import is_graph, kind, read_graph
from presage.traces.traced_groups import world_size
from presage.traces.traced_step import TracedStep

# PyTorch's defaults: a trace does not say how they were set.
FLAGS: dict[str, bool | str] = {
    "allow_tf32": False,
    "cudnn.allow_tf32": True,
    "float32_matmul_precision": "highest",
    "deterministic_algorithms": False,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.enabled": True,
}
SETTINGS = ("allow_tf32", "cudnn.allow_tf32")  # what a user may say of a trace
SUFFIXES = (".json", ".json.gz", ".et", ".et.gz")
NUMBER = re.compile(r"\d+(?=\D*$)")  # the rank in a file's name: the last number
VALUES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def is_trace(path: str | Path) -> bool:
    """Whether a path is named as a trace is, or as a pattern of some, or is a folder that holds some."""
    place = Path(path)
    return bool(_files(place)) if place.is_dir() else place.name.endswith(SUFFIXES)


def _files(place: Path) -> list[Path]:
    """The traces of a folder, or of a pattern such as run/et_*.json.gz; the profiler's if there are no others."""
    found = place.iterdir() if place.is_dir() else place.parent.glob(place.name)
    kinds = {p: kind(p) for p in sorted(found) if p.name.endswith(SUFFIXES) and p.is_file()}
    return [p for p, k in kinds.items() if k in ("et", "chakra")] or [p for p, k in kinds.items() if k == "kineto"]


def _stem(file: Path) -> str:
    return next(file.name.removesuffix(s) for s in (*SUFFIXES[::-1], "") if file.name.endswith(s))


def _one_run(place: Path) -> list[Path]:
    """The files of one run: all whose names are the same but for the rank. The star of et_*.json is such a rank."""
    files = _files(place)
    names = {file: f"{NUMBER.sub('*', _stem(file))}{file.name.removeprefix(_stem(file))}" for file in files}
    runs = sorted(set(names.values()))
    if len(runs) > 1 and place.is_dir():
        raise InputError(place, f"holds traces of several runs: give one of them, as in '{place / runs[0]}' (quoted)")
    return [file for file in files if names[file] == place.name] or files


def trace_graphs(path: str | Path, assume: Mapping[str, str] | None = None) -> list[Graph]:
    """The steps of the ranks in a trace, or in a folder with a file for each rank. Ranks that do the same are one step.

    `assume`: settings that a trace does not hold, by name ("allow_tf32", "cudnn.allow_tf32").
    """
    place, flags = Path(path), _flags(assume or {})
    if place.is_file() and kind(place) == "unknown":
        raise InputError(path, "is neither a trace of PyTorch (execution trace, profiler) nor a Chakra graph")
    files = [place] if place.is_file() else _one_run(place)
    if not files:
        raise InputError(path, "no execution trace is called so")
    steps = [_step(file, flags, frozenset(assume or ())) for file in files]
    world = max(world_size(c for s in steps for c in s.collectives.values()), len(steps))
    if 1 < len(steps) < world:
        raise InputError(path, f"holds {len(steps)} ranks of {world}: give all of them, or the file of one alone")
    ranks = _rank_numbers([s.trace.rank for s in steps], files)
    graphs = [s.graph(rank, world, len(steps) == 1) for s, rank in zip(steps, ranks, strict=True)]
    for file, graph in zip(files, graphs, strict=True):
        for where, problem in faults(graph):
            raise InputError(file, f"makes no step: {problem}", where)
    return _folded(graphs)


def _step(file: Path, flags: Mapping[str, bool | str], given: frozenset[str]) -> TracedStep:
    if is_graph(file):
        return TracedStep(read_graph(file), flags, given)
    found = ProfiledStep(file)
    seen = {name: value for name, value in found.settings().items() if name not in given}
    return TracedStep(found.graph, {**flags, **seen}, given, seen.keys(), found.notes())


def with_recorded_kernels(graphs: Sequence[Graph]) -> list[Graph]:
    """The steps of profiler's traces with the kernel times that these hold. Collectives are predicted: their times hold
    waits for other ranks."""
    if not any(op.recorded for g in graphs for op in g.ops):
        raise PresageError(
            "--kernels-from trace: the step is not from a profiler's trace, which alone has kernel times"
        )
    note = "kernels take what they took in the trace, whatever the GPU"
    return [replace(g, ops=tuple(map(_as_recorded, g.ops)), notes=(note, *g.notes)) for g in graphs]


def _as_recorded(op: Op) -> Op:
    return replace(op, cost=op.recorded, assumed=()) if op.recorded is not None and not op.group else op


def _flags(assume: Mapping[str, str]) -> dict[str, bool | str]:
    flags = dict(FLAGS)
    for name, text in assume.items():
        if name not in SETTINGS:
            raise PresageError(f"--assume {name}={text}: of a trace, {' and '.join(SETTINGS)} can be given")
        if text.lower() not in VALUES:
            raise PresageError(f"--assume {name}={text}: should be true or false")
        flags[name] = VALUES[text.lower()]
    return flags


def _rank_numbers(said: Sequence[int | None], files: Sequence[Path]) -> list[int]:
    """Ranks as the traces say, else by the last number in their files' names, else in order."""
    if len(said) == 1:
        return [said[0] or 0]
    for file, rank in zip(files, said, strict=True):
        if rank is not None and said.count(rank) > 1 and (first := files[said.index(rank)]) != file:
            raise InputError(file, f"is of rank {rank}, and so is {first.name}: give the files of one run alone")
    numbers = [NUMBER.search(_stem(file)) for file in files]
    for found in (list(said), [int(n[0]) if n else None for n in numbers]):
        if sorted(-1 if r is None else r for r in found) == list(range(len(files))):
            return [r or 0 for r in found]
    return list(range(len(files)))


def _folded(graphs: Sequence[Graph]) -> list[Graph]:
    """Graphs of ranks that do the same as one."""
    out: list[Graph] = []
    for graph in sorted(graphs, key=lambda g: g.ranks[:1]):
        place = next((k for k, g in enumerate(out) if g.ranks and alike(g, graph)), None)
        if place is None:
            out.append(graph)
        else:
            out[place] = replace(out[place], ranks=(*out[place].ranks, *graph.ranks))
    return out
