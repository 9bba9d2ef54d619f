"""Collectives among a graph's ops: what they do, and how many bytes that is as NCCL's own tests count them."""

from __future__ import annotations

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op

__all__ = ["COLLECTIVES", "collective", "collective_bytes"]

# The collective that an op is, by the names PyTorch's profiler shows.
COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send_recv",
    "c10d::recv_": "send_recv",
}


def collective(op: Op) -> str | None:
    """all_reduce, all_gather, ...; None where the op is none."""
    return COLLECTIVES.get(op.name)


def collective_bytes(graph: Graph, op: Op) -> int:
    """The largest buffer: the whole for all-gather and reduce-scatter, the rank's own for the others.

    A list of tensors is one buffer in pieces.
    """
    sizes = [sum(graph.tensors[i].nbytes for i in references([value])) for value in op.inputs]
    return max([*sizes, sum(t.nbytes for t in graph.outputs_of(op))])
