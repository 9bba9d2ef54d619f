"""Kernel times of a captured step's ops as a trace has them: to judge all but the kernel models."""

from __future__ import annotations

from collections import defaultdict

from presage.costs.kernel_model import OpTime
from presage.graph.families import family
from presage.graph.graph import Graph
from presage.traces.trace import Step, Trace
from presage.whatif.transplant import innermost_op
from presage_validation.capture import PHASES, aligned, graph_key, phases_of, trace_key

__all__ = ["measured_times"]


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
    host, gpu, inner = trace.host, trace.gpu, innermost_op(trace)
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
