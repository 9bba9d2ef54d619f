"""The capture claim: what was captured without a GPU is what a GPU run's trace shows, op by op, in order.

A leaf op of a trace is the innermost operator around a launch call. A captured op matches one if both have the same
name and the same shapes and dtypes of their tensor inputs, and stand in the same order within their phase. The score is
the share of kernel time that belongs to matched leaf ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from presage.costs.kernel_model import OpTime
from presage.errors import InputError, PresageError
from presage.graph import Graph, Op, Ref
from presage.graph.dtypes import DTYPES
from presage.graph.families import family
from presage.pool.pool import SERIAL, Pool
from presage.traces import kineto
from presage.traces.trace import HostKind, Step, Trace
from presage_validation.score import Captured, Skipped, run_cases

Key: TypeAlias = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class LeafOp:
    """An op that launched kernels: its key for matching, and the kernel time (0 for a captured one)."""

    key: Key
    seconds: float = 0.0

    def __str__(self) -> str:
        name, inputs = self.key
        return f"{name}({', '.join(f'{dtype}{list(shape)}' for shape, dtype in inputs)})"


@dataclass(frozen=True)
class CaseMatch:
    """One case: kernel time of the trace's step, the part of it matched, and what did not match on either side."""

    case: str
    seconds: float
    matched_seconds: float
    ops: int
    matched_ops: int
    only_in_trace: tuple[tuple[str, LeafOp], ...]  # (phase, op)
    only_in_capture: tuple[tuple[str, LeafOp], ...]

    @property
    def share(self) -> float:
        return self.matched_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class CaptureResult:
    """Every case, and every case that could not be captured or had no trace."""

    path: str
    cases: tuple[CaseMatch, ...]
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        shares = [c.share for c in self.cases]
        total = {"n": len(shares), "min": min(shares, default=None), "mean": float(np.mean(shares)) if shares else None}
        return {
            "kind": "capture",
            "path": self.path,
            "n": len(self.cases),
            "skipped": [{"row": s.row, "reason": s.reason} for s in self.skipped],
            "metrics": {"matched_time_share": total},
            "groups": {
                c.case: {
                    "matched_time_share": {"n": c.ops, "min": c.share, "mean": c.share},
                    "matched_ops": c.matched_ops,
                    "only_in_trace": [f"{phase}: {op}" for phase, op in c.only_in_trace],
                    "only_in_capture": [f"{phase}: {op}" for phase, op in c.only_in_capture],
                }
                for c in self.cases
            },
        }

    def lines(self) -> list[tuple[str, ...]]:
        """Every op that is on one side only, for a CSV file."""
        rows: list[tuple[str, ...]] = [("case", "phase", "side", "op", "kernel_seconds")]
        for c in self.cases:
            rows += [(c.case, p, "trace", str(op), f"{op.seconds:.9g}") for p, op in c.only_in_trace]
            rows += [(c.case, p, "capture", str(op), "") for p, op in c.only_in_capture]
        return rows


def leaf_ops(trace: Trace, step: Step) -> dict[str, list[LeafOp]]:
    """The ops that launched kernels in one step, by phase, in the order the host ran them."""
    kernels = _kernels(trace, step)
    by_phase = _by_phase(trace, step, kernels)
    return {p: [LeafOp(trace_key(trace, e), sum(kernels[e])) for e in events] for p, events in by_phase.items()}


def phases_of(trace: Trace) -> list[str]:
    """For each host event the phase its annotations put it in."""
    host = trace.host
    phase = ["forward"] * len(host)
    for i, parent in enumerate(host.parent):
        if parent >= 0:
            phase[i] = phase[parent]
        if host.kind[i] == HostKind.ANNOTATION and trace.host_name(i).startswith("Optimizer.step"):
            phase[i] = "optimizer"
    return phase


def trace_key(trace: Trace, event: int) -> Key:
    dims = _json(trace, int(trace.host.dims[event]))
    types = _json(trace, int(trace.host.types[event]))
    # a tensor without dimensions may be a wrapped Python number, which no trace tells apart
    found = zip(dims, types, strict=False)
    return trace.host_name(event), tuple(
        (tuple(d), DTYPES[t]) for d, t in found if isinstance(t, str) and t in DTYPES and d
    )


def _json(trace: Trace, place: int) -> list[Any]:
    return msgspec.json.decode(trace.shapes[place]) if place >= 0 else []


def captured_ops(graph: Graph) -> dict[str, list[LeafOp]]:
    """The captured ops that launch kernels, by phase, in order."""
    out: dict[str, list[LeafOp]] = {p: [] for p in PHASES}
    for op in graph.ops:
        if op.kernels:
            out[_phase(op.phase)].append(LeafOp(graph_key(graph, op)))
    return out


def graph_key(graph: Graph, op: Op) -> Key:
    tensors = [graph.tensors[a.id] for a in op.inputs if isinstance(a, Ref)]
    return op.name, tuple((t.shape, t.dtype) for t in tensors if t.shape)


def match(case: str, traced: dict[str, list[LeafOp]], captured: dict[str, list[LeafOp]]) -> CaseMatch:
    """Align the two sequences of each phase."""
    matched_seconds, matched_ops = 0.0, 0
    missing: list[tuple[str, LeafOp]] = []
    extra: list[tuple[str, LeafOp]] = []
    for phase in PHASES:
        theirs, ours = traced[phase], captured[phase]
        blocks = aligned([x.key for x in theirs], [x.key for x in ours])
        paired = {i + k for i, _, n in blocks for k in range(n)}
        used = {j + k for _, j, n in blocks for k in range(n)}
        matched_seconds += sum(theirs[i].seconds for i in paired)
        matched_ops += len(paired)
        missing += [(phase, x) for i, x in enumerate(theirs) if i not in paired]
        extra += [(phase, x) for j, x in enumerate(ours) if j not in used]
    everything = [x for p in PHASES for x in traced[p]]
    seconds = sum(x.seconds for x in everything)
    missing.sort(key=lambda row: -row[1].seconds)
    return CaseMatch(case, seconds, matched_seconds, len(everything), matched_ops, tuple(missing), tuple(extra))


def aligned(a: Sequence[Key], b: Sequence[Key]) -> list[tuple[int, int, int]]:
    numbers: dict[Key, int] = {}
    left, right = ([numbers.setdefault(k, len(numbers)) for k in side] for side in (a, b))
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [(m.a, m.b, m.size) for m in blocks]


def score_capture(
    workloads: str | Path, traces: str | Path, tell: Callable[[str], None] = lambda _: None, pool: Pool = SERIAL
) -> CaptureResult:
    """Capture every case of a workloads file that has a trace, and match it with the trace's last step."""
    build = Captured(str(workloads))
    files = {p.name.removesuffix(".gz").removesuffix(".json"): p for p in sorted(Path(traces).glob("*.json*"))}
    if not files:
        raise InputError(traces, "no traces (.json or .json.gz) in this folder")
    done, skipped = run_cases(partial(_matched, build, files), build.functions, tell, str, pool)
    return CaptureResult(f"{workloads} {traces}", tuple(case for _, case in done), tuple(skipped))


def _matched(build: Captured, files: Mapping[str, Path], name: str) -> CaseMatch:
    if name not in files:
        raise PresageError("no trace of that name")
    trace = kineto.read(files[name])
    return match(name, leaf_ops(trace, last_step(trace)), captured_ops(build.graph(name)))


def last_step(trace: Trace) -> Step:
    if not trace.steps:
        raise InputError(trace.path, "no ProfilerStep in it: profile with schedule() and step()", "traceEvents")
    return trace.steps[-1]


# Kernel times of a captured step's ops as a trace has them: to judge all but the kernel models.


def measured_times(graph: Graph, trace: Trace, step: Step) -> list[OpTime]:
    """For each op the kernels that the same op launched in a traced step; nothing where the trace has no such op."""
    kernels, found = _kernels(trace, step), dict[int, list[float]]()
    by_phase = _by_phase(trace, step, kernels)
    for phase in PHASES:
        mine = [i for i, op in enumerate(graph.ops) if op.kernels and _phase(op.phase) == phase]
        theirs = by_phase[phase]
        left, right = [trace_key(trace, e) for e in theirs], [graph_key(graph, graph.ops[i]) for i in mine]
        for a, b, size in aligned(left, right):
            found |= {mine[b + k]: kernels[theirs[a + k]] for k in range(size)}
    return [_time(op.name, found.get(i, [])) for i, op in enumerate(graph.ops)]


def _time(name: str, seconds: list[float]) -> OpTime:
    return OpTime(sum(seconds), len(seconds), family(name), "model" if seconds else "none")


def _phase(phase: str) -> str:
    return phase if phase in PHASES else "forward"


def _kernels(trace: Trace, step: Step) -> dict[int, list[float]]:
    """Seconds of the GPU events that each op launched in the step."""
    host, gpu = trace.host, trace.gpu
    inner = host.innermost(host.kind == HostKind.OP).tolist()
    out: dict[int, list[float]] = defaultdict(list)
    for launch, ns in zip(gpu.launch.tolist(), (gpu.end - gpu.start).tolist(), strict=True):
        if launch >= 0 and step.start <= host.start[launch] < step.end and inner[launch] >= 0:
            out[inner[launch]].append(ns * 1e-9)
    return out


def _by_phase(trace: Trace, step: Step, kernels: dict[int, list[float]]) -> dict[str, list[int]]:
    """The ops that launched something, in the order the host ran them."""
    phase, out = phases_of(trace), {p: list[int]() for p in PHASES}
    for event in sorted(kernels, key=lambda e: int(trace.host.start[e])):
        out["backward" if trace.host.thread[event] != step.thread else phase[event]].append(event)
    return out
