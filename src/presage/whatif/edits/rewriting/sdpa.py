"""Fused attention as CUDA runs it: which kernel takes some queries, keys and values, and its ops in both passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, TypeAlias

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Arg, Op, Ref, Tensor
from presage.whatif.edits.memory_layout import contiguous, dense
from presage.whatif.edits.rewriting.draft import Draft
from presage.whatif.edits.rewriting.runs import ENGINE
from presage.whatif.edits.rewriting.types import LOW

__all__ = ["AROUND", "Attention", "Backend", "Fused", "Pen", "backend", "backward", "forward", "given"]

Backend: TypeAlias = Literal["cudnn", "flash", "efficient", "math"]
AROUND = "aten::scaled_dot_product_attention"
# Where the ops of the kernels have the bias, the dropout, the causal flag and the scale.
PLACES: dict[str, tuple[int, int, int, int]] = {
    "aten::_cudnn_attention_forward": (3, 9, 10, 12),
    "aten::_efficient_attention_forward": (3, 8, 9, 11),
    "aten::_flash_attention_forward": (-1, 7, 8, 10),
}
TURNED = ("flash", "efficient")  # kernels that have [batch, position, head, width]


@dataclass(frozen=True)
class Attention:
    """What attention is given; tensors are [batch, head, position, width]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    learnt: bool = False  # the bias has a gradient


@dataclass(frozen=True)
class Fused:
    """Attention that ran, with what the backward pass needs of it."""

    attention: Attention
    backend: Backend
    out: Tensor
    sums: Tensor
    seed: Tensor
    offset: Tensor


def backend(a: Attention) -> Backend:
    """The first of CUDA's kernels, in its order of preference, that takes this (PyTorch 2.11, cuDNN 9.19, an H200)."""
    q, k, v = a.q, a.k, a.v
    odd = a.bias is not None and a.bias.shape[-1] > 1 and a.bias.strides[-1] != 1
    if odd or len(q.shape) != 4 or not q.dtype == k.dtype == v.dtype or 0 in (*q.shape, *k.shape):
        return "math"
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[1] % k.shape[1]:
        return "math"
    if not all(t.strides[-1] == 1 or t.shape[-1] == 1 for t in (q, k, v)):
        return "math"
    if q.dtype in LOW:
        if _cudnn_takes(a):
            return "cudnn"
        if a.bias is None and q.shape[-1] == v.shape[-1] <= 256 and not (a.causal and q.shape[2] != k.shape[2]):
            return "flash"
    step = 4 if q.dtype == "float32" else 8
    wide = q.dtype in (*LOW, "float32") and q.shape[1] == k.shape[1]
    return "efficient" if wide and not q.shape[-1] % step and not v.shape[-1] % step else "math"


def _cudnn_takes(a: Attention) -> bool:
    if a.learnt:
        return False
    widths, (s, t) = (a.q.shape[-1], a.v.shape[-1]), (a.q.shape[2], a.k.shape[2])
    if any(w % 8 for w in widths) or max(widths) > 256 or min(s, t) <= 1:
        return False
    return not (a.causal and (s != t or a.bias is not None))


def given(op: Op, tensors: Sequence[Tensor], draft: Draft, learnt: bool = False) -> Attention:
    """What a forward kernel's op is given, its tensors (in this order) as they are now."""
    bias, dropout, causal, scale = PLACES[op.name]
    swapped = "cudnn" not in op.name
    q, k, v = (turned(draft, t) if swapped else t for t in tensors[:3])
    has = bias >= 0 and isinstance(op.inputs[bias], Ref)
    amount, factor = op.inputs[dropout], op.inputs[scale]
    return Attention(
        q, k, v, tensors[3] if has else None, float(amount) if isinstance(amount, int | float) else 0.0,
        bool(op.inputs[causal]), factor if isinstance(factor, float) else None, learnt,
    )  # fmt: skip


def turned(draft: Draft, t: Tensor) -> Tensor:
    """Heads and positions change places."""
    order = (0, 2, 1, 3)
    return draft.tensor(t.storage, [t.shape[i] for i in order], [t.strides[i] for i in order], t.dtype, t.offset)


class Pen:
    """Writes ops in the place of one, nested in some."""

    def __init__(self, draft: Draft, like: Op, within: tuple[str, ...]) -> None:
        self.draft, self.within = draft, within
        self.like = replace(like, overload="", names=(), writes=(), sync=False, opaque=False)

    def op(
        self, name: str, inputs: Sequence[Arg], outputs: Sequence[Tensor] = (), *inner: str, overload: str = "",
        writes: Sequence[Tensor] = (), kernels: bool = True,
    ) -> None:  # fmt: skip
        self.draft.add(
            replace(
                self.like,
                name=name,
                inputs=tuple(inputs),
                outputs=tuple(t.id for t in outputs),
                overload=overload,
                within=(*self.within, *inner),
                writes=tuple(t.id for t in writes),
                kernels=kernels,
            )
        )

    def turned(self, t: Tensor) -> Tensor:
        self.op("aten::as_strided", [Ref(t.id)], (), "aten::transpose", kernels=False)
        return turned(self.draft, t)


def forward(
    draft: Draft, like: Op, around: tuple[str, ...], a: Attention, out: int | None = None, was: Backend = "efficient"
) -> Fused:
    """Write the forward ops. `out`: the storage that holds the result, where it has one; `was`: the kernel that took it
    before, for what none is known to take."""
    kind = backend(a)
    kind = was if kind == "math" else kind
    pen = Pen(draft, like, (*around, f"aten::_scaled_dot_product_{kind}_attention"))
    batch, heads, rows, _ = a.q.shape
    shape = (batch, heads, rows, a.v.shape[-1])
    strides = _out_strides(a, kind, shape)
    result = draft.new(shape, a.q.dtype, strides, like.module)
    if out is not None:
        draft.resize(out, result.nbytes)
        result = draft.tensor(out, shape, strides, a.q.dtype)
    padded = -(-rows // 32) * 32 if kind == "efficient" else rows
    sums = draft.new((batch, heads, padded, *[1] * (kind == "cudnn")), "float32", None, like.module)
    seed, offset = (draft.new((), "int64", None, like.module) for _ in range(2))
    if kind == "cudnn" and a.bias is not None:
        a = dataclasses.replace(a, bias=_once(draft, a.bias))
    made = Fused(a, kind, result, sums, seed, offset)
    qkv = [pen.turned(t) if kind in TURNED else t for t in (a.q, a.k, a.v)]
    inputs = _forward_inputs(made, [Ref(t.id) for t in qkv])
    pen.op(f"aten::_{kind}_attention_forward", inputs, (result, sums, seed, offset))
    return made


def _once(draft: Draft, t: Tensor) -> Tensor:
    """A tensor without the dimensions it is repeated along, which cuDNN repeats itself."""
    shape = [1 if s == 0 else n for n, s in zip(t.shape, t.strides, strict=True)]
    return draft.tensor(t.storage, shape, t.strides, t.dtype, t.offset)


def _out_strides(a: Attention, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    if kind == "efficient":
        _batch, heads, rows, width = shape
        return (rows * heads * width, width, heads * width, 1)
    return dense(replace(a.q, shape=tuple(shape))) if a.q.shape == tuple(shape) else contiguous(shape)


def _forward_inputs(f: Fused, qkv: Sequence[Arg]) -> list[Arg]:
    a, rows, keys = f.attention, f.attention.q.shape[2], f.attention.k.shape[2]
    bias = Ref(a.bias.id) if a.bias is not None else None
    if f.backend == "cudnn":
        return [*qkv, bias, None, None, rows, keys, True, a.dropout, a.causal, False, a.scale]
    if f.backend == "flash":
        return [*qkv, None, None, rows, keys, a.dropout, a.causal, False, a.scale, None, None, None, None]
    return [*qkv, bias, None, None, None, None, a.dropout, int(a.causal), True, a.scale, None, None]


def backward(
    draft: Draft, like: Op, f: Fused, grad: Tensor, storages: Sequence[int | None], more: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Write the backward ops; the gradients of queries, keys and values go into these storages, or new ones; `more` is
    what else they make."""
    name = f"ScaledDotProduct{f.backend.capitalize()}AttentionBackward0"
    whole = f"aten::_scaled_dot_product_{f.backend}_attention_backward"
    pen = Pen(draft, like, (ENGINE + name, name, whole))
    a = f.attention
    made = [_gradient(draft, f, t, s, like.module) for t, s in zip((a.q, a.k, a.v), storages, strict=True)]
    parts = [grad, a.q, a.k, a.v, f.out]
    if f.backend in TURNED:
        parts = [pen.turned(t) for t in parts]
    pen.op(f"aten::_{f.backend}_attention_backward", _backward_inputs(f, [Ref(t.id) for t in parts]), [*made, *more])
    if f.backend == "efficient":
        _efficient_parts(pen, parts)
    return made


def _gradient(draft: Draft, f: Fused, t: Tensor, storage: int | None, module: str) -> Tensor:
    strides = _out_strides(f.attention, f.backend, t.shape) if f.backend == "efficient" else dense(t)
    new = draft.new(t.shape, t.dtype, strides, module)
    if storage is None:
        return new
    draft.resize(storage, new.nbytes)
    return draft.tensor(storage, t.shape, strides, t.dtype)


def _backward_inputs(f: Fused, parts: Sequence[Arg]) -> list[Arg]:
    a, (rows, keys) = f.attention, (f.attention.q.shape[2], f.attention.k.shape[2])
    grad, q, k, v, out = parts
    bias = Ref(a.bias.id) if a.bias is not None else None
    kept: list[Arg] = [Ref(f.sums.id), Ref(f.seed.id), Ref(f.offset.id)]
    if f.backend == "cudnn":
        return [grad, q, k, v, out, *kept, bias, None, None, rows, keys, a.dropout, a.causal, a.scale]
    if f.backend == "flash":
        return [*parts, kept[0], None, None, rows, keys, a.dropout, a.causal, *kept[1:], a.scale]
    return [grad, q, k, v, bias, out, None, None, 0, 0, kept[0], a.dropout, *kept[1:], int(a.causal), False, a.scale,
            None, None, False]  # fmt: skip


def _efficient_parts(pen: Pen, parts: Sequence[Tensor]) -> None:
    """The memory-efficient kernel's helpers: the dot product of output and gradient, and room for the queries'."""
    inner, draft = "aten::_efficient_attention_backward", pen.draft
    grad, q, k, _, out = parts
    both = []
    for t in (grad, out):
        if t.dtype == "float32":
            both.append(t)
            continue
        wide = draft.new(t.shape, "float32")
        pen.op("aten::empty_strided", (), (), inner, "aten::to", "aten::_to_copy", kernels=False)
        pen.op("aten::copy_", [Ref(wide.id), Ref(t.id), False], [wide], inner, "aten::to", "aten::_to_copy",
               writes=[wide])  # fmt: skip
        both.append(wide)
    product, rows = draft.new(grad.shape, "float32"), draft.new(grad.shape[:3], "float32")
    pen.op("aten::mul", [Ref(t.id) for t in both], [product], inner, overload="Tensor")
    pen.op("aten::sum", [Ref(product.id), [-1], False, None], [rows], inner, overload="dim_IntList")
    batch, length, heads, depth = q.shape
    across = draft.tensor(rows.storage, (batch, heads, length), (heads * length, 1, heads), "float32")
    straight = draft.new(across.shape, "float32")
    pen.op("aten::empty", (), (), inner, "aten::contiguous", "aten::clone", "aten::empty_like", kernels=False)
    copied: list[Arg] = [Ref(straight.id), Ref(across.id), False]
    pen.op("aten::copy_", copied, [straight], inner, "aten::contiguous", "aten::clone", writes=[straight])
    if q.dtype == "float32" and k.shape[1] > 64:
        size = batch * heads * ceil(length / 64) * ceil(depth / 64) * (64 * 64 * 4 + 16)
        room = draft.new((size,), "uint8")
        pen.op("aten::empty", [[size]], [room], inner, kernels=False)
        pen.op("aten::fill_", [Ref(room.id), 0], [room], inner, "aten::zero_", overload="Scalar", writes=[room])


def incoming(op: Op) -> int:
    """The gradient that a backward kernel's op is given."""
    return next(references(op.inputs))
