"""What an op makes, from what it was given: a profiler's trace has the inputs of ops and not their results.

A rule for each family of ops; all others are taken to be elementwise: they make one tensor, as large as their inputs
broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from presage.graph.builder import row_major_strides
from presage.graph.graph import DTYPE_BYTES
from presage.traces.execution_graph import Argument, TensorRef, tensors

Shape: TypeAlias = tuple[int, ...]
SCALAR_TYPES = {0: "uint8", 1: "int8", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
                15: "bfloat16"}  # fmt: skip
RANKING = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class NotTold(LookupError):
    """An argument that the rule needs is not in the trace."""


class OpInputs:
    """The arguments of an op, by place."""

    def __init__(self, values: Sequence[Argument]) -> None:
        self.values = values

    def tensor(self, place: int) -> TensorRef:
        found = self.values[place] if place < len(self.values) else None
        if not isinstance(found, TensorRef):
            raise NotTold
        return found

    def number(self, place: int) -> int:
        found = self.values[place] if place < len(self.values) else None
        if not isinstance(found, int):
            raise NotTold
        return int(found)

    def numbers(self, place: int) -> tuple[int, ...]:
        found = self.values[place] if place < len(self.values) else None
        if isinstance(found, int):
            return (found,)
        if not isinstance(found, tuple) or not all(isinstance(n, int) for n in found):
            raise NotTold
        return tuple(int(n) for n in found if isinstance(n, int))

    def flag(self, place: int) -> bool:
        return bool(place < len(self.values) and self.values[place] is True)


Rule: TypeAlias = Callable[[OpInputs], list[TensorRef]]


def new_tensor(like: TensorRef, shape: Sequence[int], dtype: str = "") -> TensorRef:
    """A tensor of another shape; of the same one, also of its strides where they leave no gap. Of images, channels stay
    last."""
    sizes, kind = tuple(shape), dtype or like.dtype
    strides = row_major_strides(sizes)
    if like.strides is not None and len(sizes) == len(like.shape):
        if sizes == like.shape and sorted(like.strides) == sorted(strides):
            strides = like.strides
        elif len(sizes) >= 4 and like.strides[1] == 1 and like.shape[1] > 1:
            moved = row_major_strides((sizes[0], *sizes[2:], sizes[1]))
            strides = (moved[0], moved[-1], *moved[1:-1])
    count = prod(sizes)
    size = DTYPE_BYTES.get(kind, like.itemsize)
    return replace(like, elements=count, itemsize=size, shape=sizes, dtype=kind, strides=strides, device="cuda:0")


def _like(*places: int) -> Rule:
    return lambda a: [new_tensor(a.tensor(p), a.tensor(p).shape) for p in places]


def broadcast(some: Iterable[TensorRef]) -> list[TensorRef]:
    """One tensor, as elementwise ops make it."""
    found = list(some)
    if not found:
        return []
    shape: list[int] = []
    for t in found:
        padded = [1] * (len(t.shape) - len(shape)) + shape
        sizes = [1] * (len(padded) - len(t.shape)) + list(t.shape)
        shape = [a if b == 1 else b for a, b in zip(padded, sizes, strict=True)]
    deep = [t for t in found if t.shape] or found
    dtype = max((t.dtype for t in deep), key=lambda d: RANKING.index(d) if d in RANKING else 0)
    largest = max(found, key=lambda t: t.elements)
    return [new_tensor(largest, shape, dtype)]


# ---- products and convolutions


def _product(left: int) -> Rule:
    def rule(a: OpInputs) -> list[TensorRef]:
        x, y = a.tensor(left), a.tensor(left + 1)
        return [new_tensor(x, (*x.shape[:-1], *y.shape[-1:]) if len(y.shape) > 1 else x.shape[:-1])]

    return rule


def _linear(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), (*a.tensor(0).shape[:-1], a.tensor(1).shape[0]))]


def _convolved(x: TensorRef, out: int, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape) -> TensorRef:
    space = []
    for i, n in enumerate(x.shape[2:]):
        k, s, p, d = (
            v[i] if i < len(v) else v[-1] for v in (kernel, stride or kernel, padding or (0,), dilation or (1,))
        )
        space.append((n + 2 * p - d * (k - 1) - 1) // max(s, 1) + 1)
    return new_tensor(x, (x.shape[0], out, *space))


def _convolution(stride: int, padding: int, dilation: int) -> Rule:
    def rule(a: OpInputs) -> list[TensorRef]:
        x, w = a.tensor(0), a.tensor(1)
        where = a.numbers(stride), a.numbers(padding), a.numbers(dilation)
        return [_convolved(x, w.shape[0], w.shape[2:], *where)]

    return rule


def _masked(mask: int, *places: int) -> Rule:
    """Like those inputs whose gradient was asked for."""

    def rule(a: OpInputs) -> list[TensorRef]:
        wanted = a.values[mask] if mask < len(a.values) else None
        chosen = wanted if isinstance(wanted, tuple) and len(wanted) >= len(places) else (True,) * len(places)
        inputs = [a.values[p] if p < len(a.values) else None for p, on in zip(places, chosen, strict=False) if on]
        return [new_tensor(t, t.shape) for t in inputs if isinstance(t, TensorRef)]

    return rule


def _convolution_backward(a: OpInputs) -> list[TensorRef]:
    made = _masked(10, 1, 2)(a)
    wanted = a.values[10] if len(a.values) > 10 else None
    if isinstance(wanted, tuple) and wanted[-1:] == (True,):
        made.append(new_tensor(a.tensor(2), a.tensor(2).shape[:1]))
    return made


def _pooled(a: OpInputs) -> list[TensorRef]:
    x, kernel = a.tensor(0), a.numbers(1)
    place = _convolved(x, x.shape[1], kernel, a.numbers(2), a.numbers(3), a.numbers(4) if len(a.values) > 5 else (1,))
    return [place]


def _max_pooled(a: OpInputs) -> list[TensorRef]:
    (made,) = _pooled(a)
    return [made, new_tensor(made, made.shape, "int64")]


def _resized(a: OpInputs) -> list[TensorRef]:
    x, size = a.tensor(0), a.numbers(1)
    return [new_tensor(x, (*x.shape[: len(x.shape) - len(size)], *size))]


# ---- reductions, norms, softmax


def _reduced(a: OpInputs) -> list[TensorRef]:
    x = a.tensor(0)
    listed = a.values[1] if len(a.values) > 1 else ()
    dims = a.numbers(1) if isinstance(listed, tuple | int) and not isinstance(listed, bool) else ()
    over = {d % max(len(x.shape), 1) for d in dims} or set(range(len(x.shape)))
    keep = a.flag(2)
    shape = [1 if i in over else n for i, n in enumerate(x.shape) if keep or i not in over]
    return [new_tensor(x, shape, _dtype(a, 3))]


def _dtype(a: OpInputs, place: int) -> str:
    code = a.values[place] if place < len(a.values) else None
    return SCALAR_TYPES.get(code, "") if type(code) is int else ""


def _found(a: OpInputs) -> list[TensorRef]:
    """Values and where they were found."""
    (made,) = _reduced(a)
    return [made, new_tensor(made, made.shape, "int64")] if len(a.values) > 1 else [made]


def _softmax(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), a.tensor(0).shape, "float32" if a.flag(2) else "")]


def _softmax_backward(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), a.tensor(0).shape, _dtype(a, 3))]


def _layer_norm(a: OpInputs) -> list[TensorRef]:
    x, over = a.tensor(0), len(a.numbers(1))
    kept = (*x.shape[: len(x.shape) - over], *(1,) * over)
    return [new_tensor(x, x.shape), new_tensor(x, kept, "float32"), new_tensor(x, kept, "float32")]


def _batch_norm(a: OpInputs) -> list[TensorRef]:
    x = a.tensor(0)
    stats = new_tensor(x, x.shape[1:2], "float32")
    return [new_tensor(x, x.shape), stats, stats]


def _group_norm(a: OpInputs) -> list[TensorRef]:
    x = a.tensor(0)
    stats = new_tensor(x, (x.shape[0], a.number(6)))
    return [new_tensor(x, x.shape), stats, stats]


# ---- lookups, lists, attention and the rest


def _embedding(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), (*a.tensor(1).shape, *a.tensor(0).shape[1:]))]


def _rows(width_of: int, count: int) -> Rule:
    return lambda a: [new_tensor(a.tensor(width_of), (a.number(count), a.tensor(width_of).shape[-1]))]


def _bag(a: OpInputs) -> list[TensorRef]:
    table, index, offsets = a.tensor(0), a.tensor(1), a.tensor(2)
    bags = offsets.shape[0] - (1 if a.flag(7) else 0)
    return [new_tensor(table, (bags, table.shape[-1])), new_tensor(index, index.shape), new_tensor(offsets, (bags,))]


def _selected(a: OpInputs) -> list[TensorRef]:
    x, dim = a.tensor(0), a.number(1)
    shape = list(x.shape)
    shape[dim] = a.tensor(2).elements
    return [new_tensor(x, shape)]


def _gathered(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), a.tensor(2).shape)]


def _joined(a: OpInputs) -> list[TensorRef]:
    parts = [t for t in tensors(a.values[:1]) if t.elements]
    if not parts:
        raise NotTold
    dim = a.number(1) % max(len(parts[0].shape), 1)
    shape = list(parts[0].shape)
    shape[dim] = sum(t.shape[dim] for t in parts)
    return [new_tensor(parts[0], shape)]


def _attention(a: OpInputs) -> list[TensorRef]:
    q, v = a.tensor(0), a.tensor(2)
    return [new_tensor(q, (*q.shape[:-1], v.shape[-1])), new_tensor(q, q.shape[:-1], "float32")]


def _dropout(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), a.tensor(0).shape), new_tensor(a.tensor(0), a.tensor(0).shape, "bool")]


def _loss(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), ()), new_tensor(a.tensor(0), ())]


def _range(a: OpInputs) -> list[TensorRef]:
    begin, end, step = (a.number(i) for i in range(3))
    return [new_tensor(a.tensor(3), (max(0, -(-(end - begin) // max(step, 1))),))]


def _true_or_false(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(t, t.shape, "bool") for t in broadcast(tensors(a.values))]


def _chosen(a: OpInputs) -> list[TensorRef]:
    made = broadcast(tensors(a.values))
    return [new_tensor(t, t.shape, a.tensor(1).dtype) for t in made]


def _each(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(t, t.shape) for t in tensors(a.values[:1])]


def _top(a: OpInputs) -> list[TensorRef]:
    x = a.tensor(0)
    made = new_tensor(x, (*x.shape[:-1], a.number(1)))
    return [made, new_tensor(made, made.shape, "int64")]


def _sorted(a: OpInputs) -> list[TensorRef]:
    return [new_tensor(a.tensor(0), a.tensor(0).shape), new_tensor(a.tensor(0), a.tensor(0).shape, "int64")]


RULES: dict[str, Rule] = {
    name: rule
    for names, rule in (
        ("mm bmm mv dot matmul _scaled_mm _int_mm", _product(0)),
        ("addmm baddbmm addmv addbmm _addmm_activation", _product(1)),
        ("linear", _linear),
        ("cudnn_convolution miopen_convolution", _convolution(3, 2, 4)),
        ("convolution _convolution convolution_overrideable conv2d", _convolution(3, 4, 5)),
        ("_conv_depthwise2d conv_depthwise3d _slow_conv2d_forward thnn_conv2d", _convolution(4, 5, 6)),
        ("convolution_backward", _convolution_backward),
        ("cudnn_convolution_backward", _like(0, 2)),
        ("max_pool2d_with_indices max_pool3d_with_indices", _max_pooled),
        ("avg_pool2d avg_pool3d", _pooled),
        (
            "adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
            _resized,
        ),
        ("max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward", _like(1)),
        ("sum mean amax amin prod any all logsumexp nansum argmax argmin", _reduced),
        ("max min median mode", _found),
        ("_softmax _log_softmax", _softmax),
        ("_softmax_backward_data _log_softmax_backward_data", _softmax_backward),
        ("native_layer_norm", _layer_norm),
        ("native_layer_norm_backward", _masked(7, 1, 5, 6)),
        ("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit", _batch_norm),
        ("native_batch_norm_backward", _masked(9, 1, 2, 2)),
        ("cudnn_batch_norm_backward miopen_batch_norm_backward", _like(0, 2, 2)),
        ("native_group_norm", _group_norm),
        ("native_group_norm_backward", _masked(9, 1, 4, 4)),
        ("embedding", _embedding),
        ("embedding_dense_backward", _rows(0, 2)),
        ("_embedding_bag _embedding_bag_forward_only", _bag),
        ("_embedding_bag_dense_backward", _rows(0, 5)),
        ("index_select", _selected),
        ("gather", _gathered),
        ("cat concat", _joined),
        ("_efficient_attention_forward _flash_attention_forward _cudnn_attention_forward", _attention),
        ("_efficient_attention_backward _flash_attention_backward _cudnn_attention_backward", _like(1, 2, 3)),
        ("native_dropout", _dropout),
        ("native_dropout_backward", _like(0)),
        ("nll_loss_forward nll_loss2d_forward", _loss),
        ("nll_loss_backward nll_loss2d_backward", _like(1)),
        ("arange", _range),
        ("eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite", _true_or_false),
        ("where", _chosen),
        ("topk", _top),
        ("sort", _sorted),
    )
    for name in names.split()
}


def results(name: str, inputs: Sequence[Argument]) -> list[TensorRef] | None:
    """What an op makes, by the rule of its family; None where none holds, or not with what the trace tells."""
    short, given = name.removeprefix("aten::"), OpInputs(inputs)
    rule = _each if short.startswith("_foreach_") else RULES.get(short)
    try:
        return None if rule is None else rule(given)
    except (NotTold, IndexError):
        return None


LOOKED_UP = {"aten::index": -1, "aten::_index_put_impl_": 2, "aten::index_put_": 2}  # where the values are; -1: made


def with_indices(name: str, inputs: tuple[Argument, ...], made: Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments of an op that looks up by tensors, with those: the profiler leaves them out. They are as large as
    what the values have in place of the dimensions that are looked up."""
    place = LOOKED_UP.get(name)
    x = inputs[0] if inputs else None
    if place is None or not isinstance(x, TensorRef) or len(inputs) < 2 or inputs[1] is not None:
        return inputs
    values = next(tensors(made if place < 0 else inputs[place : place + 1]), None)
    if values is None:
        return inputs
    pairs = zip(x.shape, values.shape, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), max(0, len(x.shape) - 1))
    left = len(values.shape) - same
    over = len(x.shape) - same if left == 1 else 1  # x[:, i, j]; else rows, as in x[i]
    rest = len(x.shape) - same - over
    index = new_tensor(x, values.shape[same : len(values.shape) - rest] or (1,), "int64")
    return (x, (None,) * same + (index,) * over, *inputs[2:])
