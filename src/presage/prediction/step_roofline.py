"""How near the GPU's limits each kind of op runs: what it computes, what it moves, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.costs.kernel_model import OpTime, least_seconds, rate
from presage.graph import work
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.prediction.breakdown import shapes_of

__all__ = ["RooflinePoint", "roofline_points"]


@dataclass(frozen=True)
class RooflinePoint:
    """Ops alike in name, shapes and phase, all of them together."""

    name: str
    shapes: str
    phase: str
    family: str
    calls: int
    seconds: float
    flops: float  # of matrix products
    moved: float  # bytes, each tensor once
    least: float  # seconds that the GPU's peaks allow
    peak: float  # FLOP/s of the units it runs on

    @property
    def of_peak(self) -> float:
        return self.least / self.seconds if self.seconds else 0.0


def roofline_points(graph: Graph, times: Sequence[OpTime], gpu: Gpu) -> tuple[RooflinePoint, ...]:
    """Those that take the GPU longest first; collectives are told of elsewhere."""
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
        moved=float(sum(work.bytes_moved(graph, op).total for op in ops)),
        least=sum(least_seconds(graph, op, gpu) for op in ops),
        peak=rate(graph, ops[0], gpu),
    )
