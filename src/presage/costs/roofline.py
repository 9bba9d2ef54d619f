"""How near a GPU's limits ops run: the least time their FLOPs and bytes allow, over the time they take."""

from __future__ import annotations

from presage.graph import work
from presage.graph.graph import Graph, Op, Tensor
from presage.hardware import Gpu

__all__ = ["least_seconds", "rate"]

SHORT = {"float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


def least_seconds(graph: Graph, op: Op, gpu: Gpu, flops_share: float = 1.0, bytes_share: float = 1.0) -> float:
    """Every FLOP at this share of the peak rate, or every byte once through memory; at the peaks the least possible."""
    flops, moved = work.flops(graph, op), work.bytes_moved(graph, op).total
    return max(flops / (flops_share * rate(graph, op, gpu)), moved / (bytes_share * gpu.memory_bandwidth))


def rate(graph: Graph, op: Op, gpu: Gpu) -> float:
    """The peak FLOP/s of the units an op's products run on."""
    dtype = SHORT.get(_dtype(graph.inputs_of(op)), "fp32")
    if dtype == "fp32" and graph.flags.get("cudnn.allow_tf32" if "conv" in op.name else "allow_tf32"):
        dtype = "tf32"
    return gpu.peak.get(dtype) or gpu.peak["fp32"]


def _dtype(tensors: list[Tensor]) -> str:
    """The dtype of the first floating-point tensor."""
    return next((t.dtype for t in tensors if "float" in t.dtype), "float32")
