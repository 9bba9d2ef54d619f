"""Inputs of the closed-form laws from an op: GEMM or attention sizes, or bytes where it is memory-bound."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from presage.costs.families.attention import AttentionShape
from presage.costs.families.gemm import GemmShape
from presage.costs.kernel_model import Source
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Tensor, argument, flag, tensor
from presage.graph.work import bytes_moved, flops

KINDS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
# Kinds of memory-bound kernels by the families of presage.graph.families.
MEMORY_KINDS = {
    "embedding": "embedding", "normalisation": "norm", "softmax and loss": "softmax", "optimizer": "optimizer",
    "copy and cast": "copy", "index": "permute", "reduction": "reduce", "random": "dropout", "elementwise": "pointwise",
}  # fmt: skip

CAUSAL_AT = {"aten::_flash_attention_forward": 8, "aten::_flash_attention_backward": 11}  # where ops have no names


class Accumulated(Enum):
    """How a GEMM's result is added to what is there."""

    NOT = "not at all"
    IN_FP32 = "by the GEMM itself, in fp32"
    BY_A_KERNEL = "by a kernel of its own"


class OpShape(NamedTuple):
    """A GEMM or a fused attention."""

    shape: GemmShape | AttentionShape
    kind: str  # type of number: bf16, fp16, tf32, fp32, fp8, mxfp8, nvfp4
    nbytes: float  # whose energy counts besides the FLOPs'
    accumulated: Accumulated = Accumulated.NOT


class MemoryBound(NamedTuple):
    """A memory-bound op."""

    nbytes: float
    launches: int = 1
    kind: str = "other"  # how much of the bandwidth such kernels reach
    source: Source = "model"


def shape_of(graph: Graph, op: Op) -> OpShape | MemoryBound:
    """The shape of an op, by its name."""
    rule = RULES.get(op.name)
    return rule(graph, op) if rule else _by_bytes(graph, op)


def _by_bytes(graph: Graph, op: Op) -> MemoryBound:
    """An op without a law of its own."""
    kind = family(op.name)
    nbytes = float(bytes_moved(graph, op).total)
    return MemoryBound(nbytes, 1, MEMORY_KINDS.get(kind, "other"), "roofline" if flops(graph, op) else "likeness")


def _fused(_: Graph, op: Op) -> MemoryBound:
    """Bytes of a fused kernel, from its arguments; of a framework's chain of kernels also their number and kind."""
    read, written = argument(op, "read_bytes", 1), argument(op, "written_bytes", 2)
    launches, kind = argument(op, "launches"), argument(op, "kind")
    assert isinstance(read, (int, float)) and isinstance(written, (int, float))
    usual = "norm" if op.name.endswith("reduction") else "pointwise"
    return MemoryBound(
        float(read + written), launches if isinstance(launches, int) else 1, kind if isinstance(kind, str) else usual
    )


def number_kind(graph: Graph, op: Op, t: Tensor) -> str:
    """The dtype a GEMM computes in: that of its recipe, or that of its operands."""
    recipe = argument(op, "recipe") if op.names else None
    if isinstance(recipe, str):
        return recipe
    return KINDS.get(t.dtype) or ("tf32" if t.dtype == "float32" and graph.flags.get("allow_tf32") else "fp32")


def _gemm_at(place: int) -> Callable[[Graph, Op], OpShape]:
    def rule(graph: Graph, op: Op) -> OpShape:
        a, b = tensor(graph, op, place), tensor(graph, op, place + 1)
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        batch = a.shape[0] if len(a.shape) == 3 else 1
        shape = GemmShape(m, n, k, batch, 1, _column_major(a), _column_major(b))
        added = _accumulated(tensor(graph, op, 0)) if place and op.writes else Accumulated.NOT
        return OpShape(shape, number_kind(graph, op, a), _matrix_bytes(shape, a), added)

    return rule


def _grouped(graph: Graph, op: Op) -> OpShape:
    """Rows cut into groups that meet a matrix each, or a weight gradient: the inner dimension is cut."""
    a, b = tensor(graph, op, 0), tensor(graph, op, 1)
    if len(b.shape) == 3:
        shape = GemmShape(a.shape[0] // b.shape[0], b.shape[2], b.shape[1], 1, b.shape[0])
    else:
        groups = graph.outputs_of(op)[0].shape[0]
        shape = GemmShape(a.shape[0], b.shape[1], a.shape[1] // groups, 1, groups)
    added = _accumulated(graph.tensors[op.writes[0]]) if op.writes else Accumulated.NOT
    return OpShape(shape, number_kind(graph, op, a), _matrix_bytes(shape, a), added)


def _accumulated(total: Tensor) -> Accumulated:
    return Accumulated.IN_FP32 if total.itemsize >= 4 else Accumulated.BY_A_KERNEL


def _matrix_bytes(s: GemmShape, a: Tensor) -> float:
    """Each of the three matrices once, at the operands' width."""
    return float(a.itemsize * s.groups * s.batch) * (s.m * s.k + s.n * s.k + s.m * s.n)


def _column_major(t: Tensor) -> bool:
    """Whether the dimension before the last is the contiguous one."""
    return t.strides[-1] != 1 and t.shape[-1] > 1 and t.strides[-2] == 1


def _attention(heads_at: int) -> Callable[[Graph, Op], OpShape]:
    def rule(graph: Graph, op: Op) -> OpShape:
        backward = op.name.endswith("backward")
        q, k, v = (tensor(graph, op, backward + i) for i in range(3))
        rows_at = 3 - heads_at
        window, packed = (argument(op, name) if op.names else None for name in ("window_size_left", "cum_seq_q"))
        shape = AttentionShape(
            batch=q.shape[0], heads=q.shape[heads_at], kv_heads=k.shape[heads_at], queries=q.shape[rows_at],
            keys=k.shape[rows_at], dim=q.shape[-1], value_dim=v.shape[-1],
            causal=flag(op, "is_causal", CAUSAL_AT.get(op.name)) or flag(op, "custom_mask_type"),
            window=window + 1 if isinstance(window, int) and window >= 0 else 0, backward=backward,
            documents=packed if isinstance(packed, tuple) else (),
        )  # fmt: skip
        return OpShape(shape, KINDS.get(q.dtype, "bf16"), 0.0)

    return rule


def _aten(names: str) -> list[str]:
    return [f"aten::{n}" for n in names.split()]


RULES: dict[str, Callable[[Graph, Op], OpShape | MemoryBound]] = {
    **dict.fromkeys(_aten("mm bmm _scaled_mm _int_mm"), _gemm_at(0)),
    **dict.fromkeys(_aten("addmm addmm_ baddbmm baddbmm_ _addmm_activation"), _gemm_at(1)),
    **dict.fromkeys(_aten("_grouped_mm _scaled_grouped_mm"), _grouped),
    **{
        f"aten::_{by}_attention_{way}": _attention(2)
        for by in ("flash", "efficient")
        for way in ("forward", "backward")
    },
    **{f"aten::_cudnn_attention_{way}": _attention(1) for way in ("forward", "backward")},
    **{
        f"aten::_scaled_dot_product_{by}_attention{way}": _attention(1)
        for by in ("flash", "efficient", "cudnn")
        for way in ("", "_backward")
    },
    **dict.fromkeys((f"{by}::{way}" for by in ("triton", "fused") for way in ("pointwise", "reduction")), _fused),
}
