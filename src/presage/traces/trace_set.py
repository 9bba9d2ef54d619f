"""TraceSet: the traces of one job's ranks, on one clock, with their collectives matched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.files.reading import open_bytes
from presage.traces import kineto
from presage.traces.chakra import read_chakra
from presage.traces.execution_graph import ExecutionGraph
from presage.traces.execution_trace import read_et
from presage.traces.links import gpu_clock_shift
from presage.traces.trace import HostKind, Trace
from presage.traces.waits import launch_times

# Collectives known by their kernel's name, where the trace has no metadata.
KIND = re.compile(
    r"(AllReduce|AllGather|ReduceScatter|Broadcast|AllToAll|SendRecv|Reduce|Gather|Scatter|Send|Recv)", re.IGNORECASE
)
# How far apart in time the members of one collective may seem, clocks being what they are.
APART_NS = 200_000
CLOCKS_APART_NS = 200_000  # more between the clocks of host and GPU is worth a note; traces seen have 41 us at most
SOME = 8  # missing ranks that are named
DEMO = Path(__file__).resolve().parent.parent / "data" / "dlrm_mlperf_b2048.json.gz"


@dataclass(frozen=True)
class Meeting:
    """One collective as its members saw it: (rank's place in the run, GPU event)."""

    kind: str
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class TraceSet:
    """All given ranks. `offset_ns[i]` is added to rank i's times to bring them onto the first rank's clock."""

    traces: tuple[Trace, ...]
    offset_ns: tuple[int, ...]
    meetings: tuple[Meeting, ...] = field(repr=False)
    gpu_shift_ns: tuple[int, ...] = ()
    mismatched: int = 0  # collectives matched by kind and order that cannot have met: each rank's is on its own
    one_clock: bool = False  # all times are of one clock, so that times of different ranks compare exactly

    def __len__(self) -> int:
        return len(self.traces)

    def rank(self, i: int) -> int:
        found = self.traces[i].rank
        return i if found is None else found

    @property
    def notes(self) -> list[str]:
        """What in the traces contradicts itself, so that times taken from them are in doubt."""
        shifts = self.gpu_shift_ns or (0,) * len(self)
        return [
            f"{Path(t.path).name}: {text}" for t, ns in zip(self.traces, shifts, strict=True) for text in _doubts(t, ns)
        ]


def _doubts(trace: Trace, shift_ns: int) -> Iterator[str]:
    over = [a.name for a, b in pairwise(trace.steps) if a.end > b.start]
    if over:
        yield f"{len(over)} of {len(trace.steps)} steps overlap the next ({over[0]}): step times are in doubt"
    if shift_ns > CLOCKS_APART_NS:
        yield f"kernels start before their launch: the GPU's times were moved by {shift_ns / 1e6:.3g} ms"
    calls = trace.host.correlation[(trace.host.kind == HostKind.CALL) & (trace.host.correlation > 0)]
    ids, count = np.unique(calls, return_counts=True)
    shared = np.isin(trace.gpu.correlation, ids[count > 1])
    if shared.any():
        share = f"{shared.sum():,} of {len(shared):,} GPU events"
        yield f"{share} share a correlation id: which call launched them is unknown"


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """The named files, and the trace files of the named folders; `demo` is the trace that comes with presage."""
    out: list[Path] = []
    for path in map(Path, paths):
        found = [DEMO if path == Path("demo") and not path.exists() else path]
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
            found = [p for p in files if kind(p) == "kineto"]
            if not found:
                raise InputError(path, "no Kineto trace (.json or .json.gz) in this folder")
        out += found
    return out


def read_run(
    paths: Iterable[str | Path], *, ignore: Iterable[str] = (), partial: bool = False, need_gpu: bool = True
) -> TraceSet:
    """Read one run: its files, their folder, or "demo". Of several files every rank must be there unless `partial`."""
    traces = _read(files_of(paths), ignore, need_gpu)
    if not partial:
        _check_ranks(traces)
    return run_of(traces)


def read_runs(
    paths: Iterable[str | Path], *, ignore: Iterable[str] = (), partial: bool = False, need_gpu: bool = True
) -> list[TraceSet]:
    """Read one run of many ranks, or several runs of one rank each: files that name no world are runs of their own."""
    traces = _read(paths, ignore, need_gpu)
    if all((t.world or 1) == 1 for t in traces):
        return [run_of([t]) for t in traces]
    if not partial:
        _check_ranks(traces)
    return [run_of(traces)]


def _read(paths: Iterable[str | Path], ignore: Iterable[str], need_gpu: bool) -> list[Trace]:
    traces = [kineto.read(p, ignore) for p in paths]
    for t in traces:
        if need_gpu and not len(t.gpu):
            raise InputError(
                t.path,
                "no GPU events (kernel, gpu_memcpy, gpu_memset); profile with CUDA activities, or pass --cpu-only",
                "traceEvents[].cat",
            )
    return traces


def run_of(traces: Sequence[Trace]) -> TraceSet:
    """Put traces on one clock and match their collectives."""
    ordered = sorted(traces, key=lambda t: (t.rank is None, t.rank or 0))
    shifts = [gpu_clock_shift(t) for t in ordered]
    moved = [t.shifted_gpu(ns) if ns else t for t, ns in zip(ordered, shifts, strict=True)]
    origin = min(t.origin_ns for t in moved)
    nominal = [t.origin_ns - origin for t in moved]
    if len(moved) == 1:
        return TraceSet(tuple(moved), (0,), (), tuple(shifts))
    matched, offsets = _match(moved, nominal)
    one_clock = _one_clock(moved)
    if one_clock:
        offsets = [n - nominal[0] for n in nominal]
    meetings = tuple(m for m in matched if _were_together(m, moved, offsets))
    return TraceSet(tuple(moved), tuple(offsets), meetings, tuple(shifts), len(matched) - len(meetings), one_clock)


def _one_clock(traces: Sequence[Trace]) -> bool:
    """Whether all times come from the clock of one machine: its name is the same, and no GPU's clock is involved."""
    machines = {t.machine for t in traces}
    return len(machines) == 1 and machines != {""} and all(t.cpu_only for t in traces)


def _were_together(meeting: Meeting, traces: Sequence[Trace], offsets: Sequence[int]) -> bool:
    """A collective ends on no rank before it has begun on all: what does was matched wrongly (or is no collective)."""
    starts = [int(traces[r].gpu.start[e]) + offsets[r] for r, e in meeting.members]
    ends = [int(traces[r].gpu.end[e]) + offsets[r] for r, e in meeting.members]
    return max(starts) <= min(ends) + APART_NS


def _check_ranks(traces: Sequence[Trace]) -> None:
    if len(traces) < 2:
        return
    for t in traces:
        if t.rank is None:
            raise InputError(t.path, "has no rank; give only one file of a single run", "distributedInfo.rank")
    seen: dict[int, Trace] = {}
    for t in traces:
        if t.rank in seen:
            raise InputError(t.path, f"is rank {t.rank}, as is {seen[t.rank].path}", "distributedInfo.rank")
        seen[t.rank or 0] = t
    world = traces[0].world or len(traces)
    missing = list(islice((rank for rank in range(world) if rank not in seen), SOME + 1))
    if missing:
        some = ", ".join(map(str, missing[:SOME])) + (" ..." if len(missing) > SOME else "")
        raise InputError(
            traces[0].path,
            f"rank {some} of {world} missing; give all ranks, or --partial",
            "distributedInfo.world_size",
        )


def _match(traces: Sequence[Trace], nominal: Sequence[int]) -> tuple[list[Meeting], list[int]]:
    """Match collectives rank by rank against the first that has them; the ends of matched ones set the offsets."""
    lists = [_by_kind(t) for t in traces]
    kinds = dict.fromkeys(k for found in lists for k in found)
    members: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    differences: list[list[NDArray[np.int64]]] = [[] for _ in traces]
    for kind in kinds:
        having = [r for r in range(len(traces)) if kind in lists[r]]
        lead = max(having, key=lambda r: (len(lists[r][kind]), -r))
        ours = lists[lead][kind]
        for r in having:
            theirs = lists[r][kind]
            ends = traces[r].gpu.end[theirs] + nominal[r]
            place = _shift(traces[lead].gpu.end[ours] + nominal[lead], ends)
            for k, event in enumerate(theirs):
                members[kind, place + k].append((r, int(event)))
            if r != lead:
                reference = traces[lead].gpu.end[ours[place : place + len(theirs)]] + nominal[lead]
                differences[r].append(reference - ends[: len(reference)] if lead == 0 else np.empty(0, np.int64))
    offsets = [n + _centre(d) for n, d in zip(nominal, differences, strict=True)]
    meetings = [Meeting(kind, tuple(m)) for (kind, _), m in members.items() if len(m) > 1]
    return meetings, [o - offsets[0] for o in offsets]


def _centre(parts: list[NDArray[np.int64]]) -> int:
    values = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return int(np.median(values)) if len(values) else 0


def _by_kind(trace: Trace) -> dict[str, NDArray[np.int64]]:
    """A rank's collectives in time order, by what must agree between the ranks of one collective."""
    out: dict[str, list[int]] = defaultdict(list)
    found = np.flatnonzero(trace.is_collective)
    # host threads take up collectives side by side, in an order of their own; they were asked for in the same order
    order = launch_times(trace.host, trace.gpu) if trace.cpu_only else trace.gpu.start
    for event in found[np.argsort(order[found], kind="stable")]:
        meta = trace.collectives.get(int(event))
        if meta is not None and meta.name:
            out[f"{meta.name}|{meta.group}|{meta.ranks}"].append(int(event))
        else:
            name = trace.gpu_name(int(event))
            said = KIND.search(name)
            out[said.group(1) if said else name].append(int(event))
    return {k: np.array(v, np.int64) for k, v in out.items()}


def _shift(reference: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """How many of the reference's collectives precede this rank's first: where the differences of ends agree best."""
    most = len(reference) - len(ends)
    if most <= 0:
        return 0
    spread = [_disagreement(reference[k : k + len(ends)] - ends) for k in range(most + 1)]
    return int(np.argmin(spread))


def _disagreement(difference: NDArray[np.int64]) -> float:
    return float(np.median(np.abs(difference)) + np.median(np.abs(difference - np.median(difference))))


# ---- What kind of trace file this is, by its first bytes.

HEAD = 1 << 16


def kind(path: Path) -> str:
    """'kineto', 'et' (PyTorch execution trace), 'chakra', or 'unknown'."""
    with open_bytes(path) as stream:
        head = stream.read(HEAD)
    start = head.lstrip()[:1]
    if start == b"[" or b'"traceEvents"' in head:
        return "kineto"
    if start != b"{":
        return "chakra" if path.name.removesuffix(".gz").endswith(".et") else "unknown"
    if re.search(rb'"(GlobalMetadata|global_metadata|Id|dataDeps|data_deps)"', head):
        return "chakra"
    return "et" if re.search(rb'"nodes"', head) else "unknown"


def is_graph(path: Path) -> bool:
    """Whether the file is an execution graph: ops and tensors, but (mostly) no times."""
    return kind(path) in ("et", "chakra")


def read_graph(path: Path) -> ExecutionGraph:
    return read_chakra(path) if kind(path) == "chakra" else read_et(path)
