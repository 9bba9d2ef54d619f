"""LayerGraph: a layer of a job as graph ops, in blocks that are kept or recomputed as one.

Ops are those a capture of the layer would have: GEMMs by the shapes, strides and types of their operands, fused
attention, collectives over the groups tp, cp and ep. Memory-bound work of a framework is one op for each chain of
kernels, with its bytes and its number of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from presage.costs.families.attention import AttentionShape
from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import DTYPE_BYTES, Graph, Phase, Ref, Tensor, Thread
from presage.parallel.plan import Axis

DTYPES = {
    "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn", "nvfp4": "bfloat16",
}  # fmt: skip
# Low precisions whose operands' type does not tell them; graphs have no 4-bit type, so such operands count in 16 bits.
RECIPES = ("mxfp8", "nvfp4")
LOW = ("fp8", "mxfp8", "nvfp4")
COLLECTIVES = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_to_all": "c10d::alltoall_base_",
}
REDUCTIONS = ("norm", "norm_backward", "softmax", "loss", "reduce")
FUSED_NAMES = ("tensors", "read_bytes", "written_bytes", "launches", "kind")
FORWARD_NAMES = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    "scale", "window_size_left",
)  # fmt: skip
BACKWARD_NAMES = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
    "is_causal", "rng_state", "unused", "scale", "window_size_left",
)  # fmt: skip


class ComputeOverlap(NamedTuple):
    """What a collective may run under, where the framework does so."""

    compute: int  # place of a GEMM or an attention in the graph
    whole: bool  # under another op than the one whose operand or result it transfers, so not cut up


class LayerBlock(NamedTuple):
    """A part of a layer that is kept or recomputed as one, by the places of its ops in the graph."""

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    has_gemm: bool  # in its forward pass


class LayerGraph(NamedTuple):
    """One microbatch forward and backward through a layer, or through what comes before or after them all."""

    graph: Graph
    blocks: tuple[LayerBlock, ...]
    overlaps: dict[int, ComputeOverlap]  # by place of the collective


class PendingOp(NamedTuple):
    """An op before it has a place in a pass."""

    name: str
    inputs: tuple[Any, ...]  # as Op.inputs
    outputs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    writes: tuple[int, ...] = ()
    group: str = ""
    under: PendingOp | None = None  # what a collective may run under
    whole: bool = False


class LayerBuilder(GraphBuilder):
    """Writes a LayerGraph: makes ops, and puts them into the passes of blocks."""

    def __init__(self, precision: str, gradient_bytes: int = 4) -> None:
        super().__init__(flags={"allow_tf32": precision != "fp32"})
        self.precision = precision
        self.gradient = "float32" if gradient_bytes == 4 else "bfloat16"
        self._blocks: list[tuple[str, list[PendingOp], list[PendingOp]]] = []

    # ---- ops

    def gemm(
        self, m: int, n: int, k: int, kind: str, *, batch: int = 1, groups: int = 1, weight_k_major: bool = True
    ) -> PendingOp:
        """y[m, n] = x[m, k] w[k, n], for each of a batch, or for each group of rows in one launch."""
        dtype = DTYPES[kind]
        if groups > 1:
            x, w = self._tensor((groups * m, k), dtype), self._tensor((groups, k, n), dtype)
            return self._product("_grouped_mm", kind, x, w, self._tensor((groups * m, n), dtype))
        lead = (batch,) if batch > 1 else ()
        strides = (*((k * n,) if lead else ()), 1, k) if weight_k_major else None
        x, w = self._tensor((*lead, m, k), dtype), self._tensor((*lead, k, n), dtype, strides)
        return self._product("bmm" if lead else "mm", kind, x, w, self._tensor((*lead, m, n), dtype))

    def weight_gradient(self, m: int, n: int, k: int, kind: str, groups: int = 1) -> PendingOp:
        """total[m, n] += dy[k, m]' x[k, n]: the gradient of a weight, added to what is there."""
        dtype = DTYPES[kind]
        if groups > 1:
            x, w = self._tensor((m, groups * k), dtype, (1, m)), self._tensor((groups * k, n), dtype)
            total = self._tensor((groups, m, n), self.gradient)
            return self._product("_grouped_mm", kind, x, w, total)._replace(writes=(total.id,))
        x, w, total = (
            self._tensor((m, k), dtype, (1, m)),
            self._tensor((k, n), dtype),
            self._tensor((m, n), self.gradient),
        )
        names, recipe = self._recipe(kind, ("self", "mat1", "mat2"))
        inputs = (Ref(total.id), Ref(x.id), Ref(w.id), *recipe)
        return PendingOp("aten::addmm_", inputs, (), names, (total.id,))

    def _product(self, name: str, kind: str, x: Tensor, w: Tensor, out: Tensor) -> PendingOp:
        names, recipe = self._recipe(kind, ("self", "mat2"))
        scaled = {"mm": "_scaled_mm", "_grouped_mm": "_scaled_grouped_mm"}
        name = scaled.get(name, name) if kind in LOW else name
        return PendingOp(f"aten::{name}", (Ref(x.id), Ref(w.id), *recipe), (out.id,), names)

    def _recipe(self, kind: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """An argument that says what the operands' type does not: block scales, or fp32 in a graph of tf32."""
        if kind in RECIPES or (kind == "fp32" and self.precision != "fp32"):
            return (*names, "recipe"), (kind,)
        return (), ()

    def attention(self, s: AttentionShape) -> PendingOp:
        """Fused attention, forward or backward."""
        dtype = "float16" if self.precision == "fp16" else "bfloat16"
        q, o = ((s.batch, s.queries, s.heads, d) for d in (s.dim, s.value_dim))
        k, v = ((s.batch, s.keys, s.kv_heads, d) for d in (s.dim, s.value_dim))
        window = s.window - 1 if s.window else None
        args = (s.documents or None, None, s.queries, s.keys, 0.0, s.causal)
        if not s.backward:
            made = [self._tensor(shape, dtype).id for shape in (q, k, v, o)]
            inputs = (*map(Ref, made[:3]), *args, False, None, window)
            return PendingOp("aten::_flash_attention_forward", inputs, (made[3],), FORWARD_NAMES)
        made = [self._tensor(shape, dtype).id for shape in (o, q, k, v, o, q, k, v)]
        inputs = (*map(Ref, made[:5]), None, *args, None, None, None, window)
        return PendingOp("aten::_flash_attention_backward", inputs, tuple(made[5:]), BACKWARD_NAMES)

    def memory_bound(self, nbytes: float, launches: int = 1, kind: str = "pointwise") -> PendingOp:
        """A chain of kernels that memory bounds: bytes read and written, number of kernels, kind of work."""
        name = "fused::reduction" if kind in REDUCTIONS else "fused::pointwise"
        return PendingOp(name, ([], nbytes / 2, nbytes / 2, launches, kind), (), FUSED_NAMES)

    def collective(
        self, name: str, nbytes: float, axis: Axis, under: PendingOp | None = None, whole: bool = False
    ) -> PendingOp:
        """A collective over the ranks of an axis. `nbytes` is a mean where routing decides, so not always whole."""
        buffer = self._tensor((round(nbytes),), "uint8")
        inputs = (Ref(buffer.id), nbytes)
        return PendingOp(COLLECTIVES[name], inputs, (), ("buffer", "bytes"), (buffer.id,), axis.value, under, whole)

    def _tensor(self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> Tensor:
        storage = self.add_storage(prod(shape) * DTYPE_BYTES[dtype], "activation", lifetime="always")
        return self.tensors[self.add_tensor(storage, shape, dtype, 0, strides)]

    # ---- blocks

    def block(self, name: str, forward: Sequence[PendingOp | None], backward: Sequence[PendingOp | None]) -> None:
        """The next block; ops that are None are left out."""
        self._blocks.append((name, [o for o in forward if o], [o for o in backward if o]))

    def layer(self) -> LayerGraph:
        """All forward passes in order, then all backward passes in the opposite order."""
        overlaps: dict[int, ComputeOverlap] = {}
        ahead = [self._place(overlaps, name, pending, "forward") for name, pending, _ in self._blocks]
        back = [self._place(overlaps, name, pending, "backward") for name, _, pending in reversed(self._blocks)]
        blocks = tuple(
            LayerBlock(name, f, b, any(o.name.endswith("mm") for o in pending))
            for (name, pending, _), f, b in zip(self._blocks, ahead, reversed(back), strict=True)
        )
        return LayerGraph(self.build(), blocks, overlaps)

    def _place(
        self, overlaps: dict[int, ComputeOverlap], block: str, pending: list[PendingOp], phase: Phase
    ) -> tuple[int, ...]:
        start = len(self.ops)
        thread: Thread = "main" if phase == "forward" else "autograd"
        for i, o in enumerate(pending):
            if o.under is not None:
                overlaps[start + i] = ComputeOverlap(start + pending.index(o.under), o.whole)
            self.append(
                new_op(
                    o.name, o.inputs, outputs=o.outputs, writes=o.writes, phase=phase, thread=thread, module=block,
                    names=o.names, group=o.group,
                )
            )  # fmt: skip
        return tuple(range(start, len(self.ops)))


def memory_bound_graph(nbytes: float, kind: str) -> Graph:
    """A single memory-bound kernel: the optimizer's update."""
    builder = GraphBuilder()
    inputs: tuple[Any, ...] = ([], nbytes / 2, nbytes / 2, 1, kind)
    builder.append(new_op("fused::pointwise", inputs, phase="optimizer", names=FUSED_NAMES))
    return builder.build()
