"""Products of 8-bit numbers with scales (`aten::_scaled_mm`): the law of products that was fitted on the H200's, for
which see `costs/chip`; a GPU without such units takes the time of the next wider type."""

from __future__ import annotations

from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.graph.graph import Graph, Op
from presage.hardware import Gpu

__all__ = ["SCALED", "seconds"]

SCALED = "aten::_scaled_mm"


def seconds(graph: Graph, op: Op, gpu: Gpu) -> float:
    """At the full clock. The left matrix lies in rows and the right one in columns, as the units want them."""
    left, right = graph.inputs_of(op)[:2]
    shape = GemmShape(left.shape[0], right.shape[1], left.shape[1], rhs_k_major=True)
    return ClosedFormKernels.of(gpu).gemm(shape, "fp8")
