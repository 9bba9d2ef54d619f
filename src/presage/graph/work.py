"""The work of an op and of a whole graph: floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from presage.graph import flops as _flops
from presage.graph import traffic
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.graph.traffic import MemoryTraffic

__all__ = ["MemoryTraffic", "OpWork", "bytes_moved", "family", "flops", "total", "useful_flops", "work"]


@dataclass(frozen=True, slots=True)
class OpWork:
    """Work adds up."""

    ops: int = 0
    kernels: int = 0  # ops that launch something
    flops: int = 0
    bytes: MemoryTraffic = field(default_factory=MemoryTraffic)

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.ops + other.ops,
            self.kernels + other.kernels,
            self.flops + other.flops,
            self.bytes + other.bytes,
        )


def flops(graph: Graph, op: Op) -> int:
    """Floating-point operations, counted as torch's FlopCounterMode does: matrix products only, causal not halved."""
    return _flops.count(graph, op)


def useful_flops(graph: Graph, op: Op) -> int:
    """As `flops`, without the attention scores a causal mask throws away."""
    return _flops.useful(graph, op)


def bytes_moved(graph: Graph, op: Op) -> MemoryTraffic:
    """The least the op must read and write: each input once, each output once."""
    return traffic.memory_traffic(graph, op)


def work(graph: Graph, op: Op) -> OpWork:
    return OpWork(1, int(op.kernels), flops(graph, op), bytes_moved(graph, op))


def total(graph: Graph, ops: Iterable[Op] | None = None) -> OpWork:
    """The work of these ops, or of all."""
    return sum((work(graph, op) for op in (graph.ops if ops is None else ops)), OpWork())
