"""Linear layers' products in 8-bit numbers, with a scale for each tensor found anew in every step."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.edits.edit import NotApplicable, plain
from presage.graph.edits.rewriting.draft import Draft
from presage.graph.edits.rewriting.sdpa import Pen
from presage.graph.edits.rewriting.types import LOW
from presage.graph.graph import Arg, Graph, Op, Ref, Tensor

__all__ = ["EDITS", "fp8"]

PRODUCTS = ("aten::mm", "aten::addmm")
STEP = 16  # sizes must be multiples of it
NARROW = "float8_e4m3fn"
NOTE = "fp8 products need a GPU that has them (compute capability 8.9 and up)"


def fp8(graph: Graph) -> Graph:
    """All products of linear layers, forward and backward, whose sizes allow it."""
    layers = {
        op.sequence for op in graph.ops if op.thread == "main" and _fits(graph, op) and "aten::linear" in op.within
    }
    if not layers - {-1}:
        raise NotApplicable(
            "no linear layer whose product is in bfloat16 or float16 with sizes that are multiples of 16 "
            "(apply bf16 or autocast first)"
        )
    draft = Draft(graph)
    scales: dict[tuple[int, int], Tensor] = {}  # by autograd's number and storage: a gradient is used twice
    for i, op in enumerate(graph.ops):
        draft.begin(i)
        if op.sequence in layers and _fits(graph, op):
            _product(graph, draft, op, scales if op.thread == "autograd" else {})
        else:
            draft.add(op)
    made = draft.done()
    return replace(made, notes=(*made.notes, NOTE))


def _fits(graph: Graph, op: Op) -> bool:
    if op.name not in PRODUCTS or not op.kernels:
        return False
    left, right = _factors(graph, op)
    sizes = (*left.shape, *right.shape)
    return left.dtype in LOW and right.dtype in LOW and len(sizes) == 4 and all(n and not n % STEP for n in sizes)


def _factors(graph: Graph, op: Op) -> Sequence[Tensor]:
    return graph.inputs_of(op)[-2:]


def _product(graph: Graph, draft: Draft, op: Op, scales: dict[tuple[int, int], Tensor]) -> None:
    """Both factors scaled and cast, the left one in rows and the right one in columns, and their product."""
    left, right = _factors(graph, op)
    pen = Pen(draft, op, op.within)
    a, scale_a = _cast(pen, left, (left.shape[1], 1), scales)
    b, scale_b = _cast(pen, right, (1, right.shape[0]), scales)
    bias: list[Arg] = [Ref(next(references(op.inputs)))] if op.name == "aten::addmm" else [None]
    out = draft.tensors[op.outputs[0]]
    inputs: list[Arg] = [Ref(a.id), Ref(b.id), Ref(scale_a.id), Ref(scale_b.id), *bias, None, out.dtype, True]
    pen.op("aten::_scaled_mm", inputs, [out])


def _cast(
    pen: Pen, t: Tensor, strides: tuple[int, int], scales: dict[tuple[int, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """A tensor times its scale in 8 bits, and the scale."""
    key = (pen.like.sequence, t.storage)
    if key not in scales:
        scales[key] = _scale(pen, t)
    new = pen.draft.new(t.shape, NARROW, strides, pen.like.module)
    _fused(pen, "pointwise", [t, scales[key]], new, t.nbytes, new.nbytes, turned=t.strides != strides)
    return new, scales[key]


def _scale(pen: Pen, t: Tensor) -> Tensor:
    """The scale that a tensor's largest absolute value asks for."""
    most, scale = (pen.draft.new((), "float32", None, pen.like.module) for _ in range(2))
    _fused(pen, "reduction", [t], most, t.nbytes, 4, columns=t.shape[1])
    _fused(pen, "pointwise", [most], scale, 4, 4)
    return scale


def _fused(
    pen: Pen,
    kind: str,
    read: Sequence[Tensor],
    out: Tensor,
    given: int,
    made: int,
    columns: int = 1,
    turned: bool = False,
) -> None:
    """One kernel, as the compiler's are written: bytes read and made, rows, columns, sums down, functions, turned."""
    rows = max(1, read[0].elements // max(1, columns))
    refs: list[Arg] = [[Ref(t.id) for t in read]]
    pen.op(f"fused::{kind}", [*refs, given, made, rows, columns, False, 0, 0, 0, turned], [out])


EDITS = (
    plain(
        "fp8",
        "The products of linear layers in fp8, forward and backward, where sizes are multiples of 16: inputs, weights "
        "and gradients get a scale for each tensor in every step (largest absolute value, then a cast), as torchao "
        "does; the casts are fused kernels. Needs products in bfloat16 or float16 to begin with, and a GPU with fp8.",
        fp8,
    ),
)
