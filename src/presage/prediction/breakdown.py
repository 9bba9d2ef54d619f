"""Breakdown of a step's time by family of ops and module, costliest ops, and roofline points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from presage.costs.kernel_model import OpTime, rate
from presage.graph import work
from presage.graph.graph import Graph, Op
from presage.hardware import Gpu

MODELLED = ("model", "likeness")
OUTSIDE = {"optimizer": "(optimizer)", "other": "(other)"}


@dataclass(frozen=True)
class BreakdownPart:
    """Part of a step: seconds of its kernels, and host seconds of its ops."""

    name: str
    gpu: float
    share: float  # of the GPU time
    host: float
    ops: int


@dataclass(frozen=True)
class RecordedPart:
    """Kernels of one family: seconds in the profiler's trace that the step is from, and as predicted."""

    name: str
    ops: int
    recorded: float
    predicted: float


@dataclass(frozen=True)
class CostlyOps:
    """All ops of one name, shapes and phase."""

    name: str
    shapes: str
    phase: str
    module: str  # of the first of them
    calls: int
    seconds: float
    share: float  # of the GPU time
    efficiency: float  # the least time the GPU's peaks allow over this
    limit: str  # what the least time is set by: compute or memory
    source: str


@dataclass(frozen=True)
class Coverage:
    """Share of GPU time from fitted models, and the ops without one."""

    modelled_fraction: float
    fallback_ops: tuple[str, ...]  # from FLOPs and bytes alone
    unknown_host_ops: tuple[str, ...]  # their host time is their class's mean


@dataclass(frozen=True)
class StepAssumption:
    """A value that the code read and a capture does not have (see `graph.Assumption`), with its weight."""

    line: str
    what: str
    value: str  # what it was taken to be
    decides: bool  # the code branched on it; else it was only logged or passed on
    share: float  # of the step's time that can hang on it, at most
    given: bool = False  # the value is the user's

    def to_json(self) -> dict[str, Any]:
        """With its place in the code, or the setting of a trace."""
        return {
            "place": self.line,
            "what": self.what,
            "value": self.value,
            "decides": self.decides,
            "share_of_step": self.share,
            "given": self.given,
        }


def assumptions(graph: Graph, times: Sequence[OpTime], host: Sequence[float]) -> tuple[StepAssumption, ...]:
    """What was assumed, heaviest first: the larger of the shares of GPU time and of host time."""
    if not graph.assumptions:
        return ()
    sums = [[0.0, 0.0] for _ in graph.assumptions]
    for op, t, h in zip(graph.ops, times, host, strict=True):
        for number in op.assumed:
            sums[number][0] += t.seconds
            sums[number][1] += h
    whole = (sum(t.seconds for t in times) or 1.0, sum(host) or 1.0)
    shares = [max(part / total for part, total in zip(s, whole, strict=True)) for s in sums]
    found = [
        StepAssumption(a.line, a.what, a.value, a.decides, share if a.decides else 0.0, a.given)
        for a, share in zip(graph.assumptions, shares, strict=True)
    ]
    return tuple(sorted(found, key=lambda a: (-a.share, not a.decides)))


def families(times: Sequence[OpTime], host: Sequence[float]) -> tuple[BreakdownPart, ...]:
    """Ops that launch kernels, by family, most GPU time first."""
    return _parts((t.family, t.seconds, h) for t, h in zip(times, host, strict=True) if t.launches)


def recorded(graph: Graph, times: Sequence[OpTime]) -> tuple[RecordedPart, ...]:
    """Measured against predicted kernels of a step from a profiler's trace, by family, largest first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for op, t in zip(graph.ops, times, strict=True):
        if op.recorded is not None and not op.group:
            found.setdefault(t.family, []).append((op.recorded.seconds, t.seconds))
    parts = [RecordedPart(k, len(v), sum(a for a, _ in v), sum(b for _, b in v)) for k, v in found.items()]
    return tuple(sorted(parts, key=lambda p: -p.recorded))


def modules(graph: Graph, times: Sequence[OpTime], host: Sequence[float]) -> tuple[BreakdownPart, ...]:
    """Ops by top-level module, most GPU time first."""
    rows = zip(graph.ops, times, host, strict=True)
    return _parts((_module(op), t.seconds, h) for op, t, h in rows)


def _module(op: Op) -> str:
    return op.module.split(".")[0] if op.module else OUTSIDE.get(op.phase, "(top level)")


def _parts(rows: Iterable[tuple[str, float, float]]) -> tuple[BreakdownPart, ...]:
    found: dict[str, list[float]] = {}
    for name, gpu, host in rows:
        sums = found.setdefault(name, [0.0, 0.0, 0.0])
        sums[0], sums[1], sums[2] = sums[0] + gpu, sums[1] + host, sums[2] + 1
    total = sum(s[0] for s in found.values())
    parts = [BreakdownPart(name, g, g / total if total else 0.0, h, int(n)) for name, (g, h, n) in found.items()]
    return tuple(sorted(parts, key=lambda p: (-p.gpu, -p.host)))


def costliest(graph: Graph, times: Sequence[OpTime], gpu: Gpu, count: int = 10) -> tuple[CostlyOps, ...]:
    """The ops with the most GPU time, like ops together; without collectives."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, (op, time) in enumerate(zip(graph.ops, times, strict=True)):
        if time.launches and time.family != "communication":
            groups.setdefault((op.name, shapes_of(graph, op), op.phase), []).append(i)
    total = sum(t.seconds for t in times)
    sums = {key: sum(times[i].seconds for i in ops) for key, ops in groups.items()}
    top = sorted(groups, key=lambda key: -sums[key])[:count]
    return tuple(_costly(graph, times, gpu, groups[key], sums[key], total) for key in top)


def _costly(
    graph: Graph, times: Sequence[OpTime], gpu: Gpu, ops: Sequence[int], seconds: float, total: float
) -> CostlyOps:
    op = graph.ops[ops[0]]
    least = sum(_least(graph, graph.ops[i], gpu) for i in ops)
    by_memory = work.bytes_touched(graph, op).total / gpu.memory_bandwidth
    limit = "compute" if _least(graph, op, gpu) > by_memory else "memory"
    share, efficiency = seconds / total if total else 0.0, least / seconds if seconds else 0.0
    source = times[ops[0]].source
    where = (op.name, shapes_of(graph, op), op.phase, op.module)
    return CostlyOps(*where, len(ops), seconds, share, efficiency, limit, source)


def _least(graph: Graph, op: Op, gpu: Gpu) -> float:
    """Seconds at the GPU's peaks: every FLOP, or every byte that the op touches."""
    by_compute = work.flops(graph, op) / rate(graph, op, gpu)
    return max(by_compute, work.bytes_touched(graph, op).total / gpu.memory_bandwidth)


def shapes_of(graph: Graph, op: Op, most: int = 3) -> str:
    """The inputs in short: bf16[8192x1024] bf16[1024x4096]."""
    tensors = [t for t in graph.inputs_of(op) if t.shape and t.elements]
    told = [f"{_short(t.dtype)}[{'x'.join(map(str, t.shape))}]" for t in tensors[:most]]
    return " ".join(told) + (f" and {len(tensors) - most} more" if len(tensors) > most else "")


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "i")


def coverage(graph: Graph, times: Sequence[OpTime], unknown_host_ops: tuple[str, ...]) -> Coverage:
    total = sum(t.seconds for t in times)
    modelled = sum(t.seconds for t in times if t.source in MODELLED)
    without = {op.name for op, t in zip(graph.ops, times, strict=True) if t.source == "roofline"}
    return Coverage(modelled / total if total else 1.0, tuple(sorted(without)), unknown_host_ops)


# ---- How near the GPU's limits each kind of op runs: what it computes, what it moves, and how long it takes.


@dataclass(frozen=True)
class RooflinePoint:
    """All ops of one name (or block of a layer), shapes and phase: time, work and the limits of the GPU."""

    name: str
    shapes: str
    phase: str
    family: str
    calls: float
    seconds: float
    flops: float  # of matrix products
    moved: float  # bytes, each tensor once
    least: float  # seconds that the GPU's peaks allow
    peak: float  # FLOP/s of the units it runs on

    @property
    def of_peak(self) -> float:
        return self.least / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """What the least time is set by: compute or memory."""
        return "compute" if self.flops and self.flops / self.peak >= (1 - 1e-9) * self.least else "memory"


def roofline_points(graph: Graph, times: Sequence[OpTime], gpu: Gpu) -> tuple[RooflinePoint, ...]:
    """Roofline points, longest first; without collectives."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, (op, time) in enumerate(zip(graph.ops, times, strict=True)):
        if time.launches and time.seconds > 0 and time.family != "communication":
            groups.setdefault((op.name, shapes_of(graph, op), op.phase), []).append(i)
    found = [_worked(graph, times, gpu, key, ops) for key, ops in groups.items()]
    return tuple(sorted(found, key=lambda w: -w.seconds))


def _worked(
    graph: Graph, times: Sequence[OpTime], gpu: Gpu, key: tuple[str, str, str], places: Sequence[int]
) -> RooflinePoint:
    ops = [graph.ops[i] for i in places]
    return RooflinePoint(
        *key,
        family=times[places[0]].family,
        calls=len(ops),
        seconds=sum(times[i].seconds for i in places),
        flops=float(sum(work.flops(graph, op) for op in ops)),
        moved=float(sum(work.bytes_touched(graph, op).total for op in ops)),
        least=sum(_least(graph, op, gpu) for op in ops),
        peak=rate(graph, ops[0], gpu),
    )
