"""Linear layers' products in 8-bit numbers, with a scale for each tensor found anew in every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from presage.capture.variants import NotApplicable
from presage.errors import PresageError
from presage.graph.graph import Arg, Graph, Op, Ref, Tensor, references
from presage.whatif.edits.captured import LOW
from presage.whatif.edits.edit import Change, valued
from presage.whatif.edits.op_writer import OpWriter

PRODUCTS = ("aten::mm", "aten::addmm")
STEP = 16  # sizes must be multiples of it
NARROW = "float8_e4m3fn"
NOTE = "fp8 products need a GPU that has them (compute capability 8.9 and up)"


def fp8(graph: Graph, eager: bool = False) -> Graph:
    """All products of linear layers, forward and backward, whose sizes allow it; `eager`: casts in small ops."""
    layers = {
        op.sequence for op in graph.ops if op.thread == "main" and _fits(graph, op) and "aten::linear" in op.within
    }
    if not layers - {-1}:
        raise NotApplicable(
            "no linear layer whose product is in bfloat16 or float16 with sizes that are multiples of 16 "
            "(apply bf16 or autocast first)"
        )
    writer = _Writer(graph)
    scales: dict[tuple[int, int], Tensor] = {}  # by autograd's number and storage: a gradient is used twice
    for i, op in enumerate(graph.ops):
        if op.sequence in layers and _fits(graph, op):
            writer.at(i, replace(op, sync=False))
            _product(writer, op, scales if op.thread == "autograd" and not eager else {}, eager)
    writer.notes.append(NOTE)
    return writer.done()


class _Writer(OpWriter):
    """Writes ops in place of a product, nested as it was, on memory that lives as long as it is used."""

    def emit(self, name: str, inputs: Sequence[Arg], output: Tensor) -> None:
        self.op(name, inputs, [Ref(output.id)], within=self.like.within)

    def scratch(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> Tensor:
        return self.get(self.new(shape, dtype, strides, kept=True))


def _fits(graph: Graph, op: Op) -> bool:
    if op.name not in PRODUCTS or not op.kernels:
        return False
    left, right = _factors(graph, op)
    sizes = (*left.shape, *right.shape)
    return left.dtype in LOW and right.dtype in LOW and len(sizes) == 4 and all(n and not n % STEP for n in sizes)


def _factors(graph: Graph, op: Op) -> Sequence[Tensor]:
    return graph.inputs_of(op)[-2:]


def _product(writer: _Writer, op: Op, scales: dict[tuple[int, int], Tensor], eager: bool) -> None:
    """Both factors scaled and cast, the left one in rows and the right one in columns, and their product."""
    graph = writer.source
    left, right = _factors(graph, op)
    rows, columns = (left.shape[1], 1), (1, right.shape[0])
    if eager:
        (a, scale_a), (b, scale_b) = _in_small_ops(writer, left, rows), _in_small_ops(writer, right, columns)
    else:
        (a, scale_a), (b, scale_b) = _cast(writer, left, rows, scales), _cast(writer, right, columns, scales)
    bias: list[Arg] = [Ref(next(references(op.inputs)))] if op.name == "aten::addmm" else [None]
    out = graph.tensors[op.outputs[0]]
    inputs: list[Arg] = [Ref(a.id), Ref(b.id), Ref(scale_a.id), Ref(scale_b.id), *bias, None, out.dtype, True]
    writer.emit("aten::_scaled_mm", inputs, out)


def _cast(
    writer: _Writer, t: Tensor, strides: tuple[int, int], scales: dict[tuple[int, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """A tensor times its scale in 8 bits, and the scale."""
    key = (writer.like.sequence, t.storage)
    if key not in scales:
        scales[key] = _scale(writer, t)
    new = writer.scratch(t.shape, NARROW, strides)
    _fused(writer, "pointwise", [t, scales[key]], new, t.nbytes, new.nbytes, turned=t.strides != strides)
    return new, scales[key]


def _in_small_ops(writer: _Writer, t: Tensor, strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The same as PyTorch runs it without a compiler: each op a kernel, the numbers in float32 between them."""

    def write(name: str, *inputs: Arg, like: Tensor, dtype: str, shape: tuple[int, ...] | None = None) -> Tensor:
        out = writer.scratch(like.shape if shape is None else shape, dtype, None)
        writer.emit(name, list(inputs), out)
        return out

    if t.strides != strides:  # turned round first
        turned = writer.scratch(t.shape, t.dtype, strides)
        writer.emit("aten::copy_", [Ref(turned.id), Ref(t.id), False], turned)
        t = turned
    size = write("aten::abs", Ref(t.id), like=t, dtype=t.dtype)
    scale = write("aten::max", Ref(size.id), like=t, dtype=t.dtype, shape=())
    for name, rest in (("aten::clamp", [1e-12, None]), ("aten::reciprocal", []), ("aten::mul", [1.0])):
        scale = write(name, Ref(scale.id), *rest, like=scale, dtype="float32")
    wide = writer.scratch(t.shape, "float32", strides)
    writer.emit("aten::copy_", [Ref(wide.id), Ref(t.id), False], wide)
    wide = write("aten::mul", Ref(wide.id), Ref(scale.id), like=wide, dtype="float32")
    wide = write("aten::clamp", Ref(wide.id), -448.0, 448.0, like=wide, dtype="float32")
    narrow = writer.scratch(t.shape, NARROW, strides)
    writer.emit("aten::copy_", [Ref(narrow.id), Ref(wide.id), False], narrow)
    return narrow, scale


def _scale(writer: _Writer, t: Tensor) -> Tensor:
    """The scale that a tensor's largest absolute value asks for."""
    most, scale = (writer.scratch((), "float32", None) for _ in range(2))
    _fused(writer, "reduction", [t], most, t.nbytes, 4, columns=t.shape[1])
    _fused(writer, "pointwise", [most], scale, 4, 4)
    return scale


def _fused(
    writer: _Writer,
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
    writer.emit(f"fused::{kind}", [*refs, given, made, rows, columns, False, 0, 0, 0, turned], out)


def _read(value: str) -> Change:
    if value not in ("", "eager"):
        raise PresageError(f"fp8={value}: write fp8, or fp8=eager for casts without a compiler")
    return partial(fp8, eager=value == "eager")


EDITS = (
    valued(
        "fp8",
        "The products of linear layers in fp8, forward and backward, where sizes are multiples of 16: inputs, weights "
        "and gradients get a scale for each tensor in every step (largest absolute value, then a cast), as torchao "
        "does; the casts are fused kernels, or one op after the other without a compiler (fp8=eager). Needs products "
        "in bfloat16 or float16 to begin with, and a GPU with fp8.",
        "eager",
        _read,
        tried=("",),
        needed=False,
        caution="numbers change: products have 8 bits and scales to keep; needs a library for it; check the loss",
    ),
)
