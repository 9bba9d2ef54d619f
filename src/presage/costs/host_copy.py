"""Copies between the host's memory and the GPU's, over PCIe.

Law: a start, and the bytes at a share of what the bus can carry: measured on an H200 with pinned memory (copies.json of
data/h200_pack: 1.4 us and 55.3 of 64 GB/s). Whether memory is pinned a graph does not tell; pageable memory takes 3 to
6 times as long, and the host waits.
"""

from __future__ import annotations

from presage.graph.arguments import references
from presage.graph.graph import HOST_MEMORY, Graph, Op
from presage.hardware import Gpu

__all__ = ["host_bytes", "host_copy_seconds"]

START, REACHED = 1.4e-6, 0.864


def host_bytes(graph: Graph, op: Op) -> int:
    """Bytes that a copy moves between host and GPU; 0 for any other op."""
    if op.name != "aten::copy_":
        return 0
    tensors = [graph.tensors[i] for i in references(op.inputs)][:2]
    there = [graph.storages[t.storage].name == HOST_MEMORY for t in tensors]
    return max(t.nbytes for t in tensors) if any(there) and not all(there) else 0


def host_copy_seconds(nbytes: int, gpu: Gpu) -> float:
    return START + nbytes / (REACHED * gpu.pcie)
