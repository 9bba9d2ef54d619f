"""How many bytes an op has to read and write.

Each tensor an op needs is read once, each it makes is written once, as if caches held everything in between: the least
any kernel can move. An element that a stride of zero repeats counts once. Lookups read only the rows they gather, and
never more than the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from presage.graph.graph import Graph, Op, Tensor, argument, aten, flag, output_mask, tensor, tensors


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Bytes read from and written to GPU memory."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: MemoryTraffic) -> MemoryTraffic:
        return MemoryTraffic(self.read + other.read, self.written + other.written)


Rule: TypeAlias = Callable[[Graph, Op], MemoryTraffic]


def bytes_moved(graph: Graph, op: Op) -> MemoryTraffic:
    """What one op moves; nothing where it launches nothing (views, bookkeeping)."""
    if not op.kernels:
        return MemoryTraffic()
    if op.cost is not None and op.cost.bytes:
        return MemoryTraffic(int(op.cost.bytes), 0)
    rule = _RULES.get(op.name)
    return rule(graph, op) if rule else _plain(graph, op)


def bytes_touched(graph: Graph, op: Op) -> MemoryTraffic:
    """What an op's own kernel moves: as `bytes_moved`, but a loss gradient that was filled with zeros by an op of its
    own is written at one place per target."""
    moved = bytes_moved(graph, op)
    if op.name in _SPARSE_WRITES and moved.written:
        gradient, target = graph.outputs_of(op)[0], tensor(graph, op, 2)
        return MemoryTraffic(moved.read, min(moved.written, target.elements * gradient.itemsize))
    return moved


def footprint(graph: Graph, views: Iterable[Tensor]) -> int:
    """Bytes under these tensors. What two of them share counts once, as far as their storage's extent tells."""
    by_storage: dict[int, dict[tuple[object, ...], Tensor]] = {}
    for t in views:
        by_storage.setdefault(t.storage, {})[(t.offset, t.shape, t.strides, t.dtype)] = t
    return sum(_under(graph, list(group.values())) for group in by_storage.values())


def is_sparse(t: Tensor) -> bool:
    """A sparse tensor has a size but no strides; its storage holds its values."""
    return bool(t.shape) and not t.strides


def _under(graph: Graph, group: list[Tensor]) -> int:
    if any(is_sparse(t) for t in group):
        return graph.storages[group[0].storage].nbytes
    spans = [_span(t) for t in group if t.elements]
    if not spans:
        return 0
    extent = max(end for _, end in spans) - min(start for start, _ in spans)
    return min(sum(_distinct(t) for t in group), extent)


def _distinct(t: Tensor) -> int:
    return prod(n for n, stride in zip(t.shape, t.strides, strict=True) if stride or not n) * t.itemsize


def _span(t: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the byte after its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.strides, strict=True))
    return t.offset * t.itemsize, (t.offset + last + 1) * t.itemsize


# ---- the plain rule: all inputs in, all outputs out


def _plain(graph: Graph, op: Op, unread: Iterable[int] = ()) -> MemoryTraffic:
    """`unread` are places of inputs that the op takes only for their shape, or overwrites without a look."""
    return MemoryTraffic(footprint(graph, _inputs(graph, op, unread)), footprint(graph, _written(graph, op)))


def _inputs(graph: Graph, op: Op, unread: Iterable[int] = ()) -> list[Tensor]:
    skipped = {*unread, *_destinations(graph, op)}
    return [t for place, value in enumerate(op.inputs) if place not in skipped for t in tensors(graph, value)]


def _written(graph: Graph, op: Op) -> list[Tensor]:
    return [*graph.outputs_of(op), *(graph.tensors[i] for i in op.writes)]


_DESTINATION = re.compile(r"out\d?|grad_input|output")


def _destinations(graph: Graph, op: Op) -> list[int]:
    """Places of `out=` arguments."""
    if not op.overload or not op.writes or not op.names:
        return []
    places = [i for i, name in enumerate(op.names[: len(op.inputs)]) if _DESTINATION.fullmatch(name)]
    return [i for i in places if any(t.id in op.writes for t in tensors(graph, op.inputs[i]))]


def _without_reading(*unread: int) -> Rule:
    return lambda graph, op: _plain(graph, op, unread)


# ---- lookups and scatters


def _lookup(graph: Graph, op: Op) -> MemoryTraffic:
    """The output holds what was gathered from the first input."""
    return _gather(graph, op, sum(t.elements for t in graph.outputs_of(op)[:1]))


def _bag_lookup(graph: Graph, op: Op) -> MemoryTraffic:
    table, indices = tensor(graph, op, 0), tensor(graph, op, 1)
    return _gather(graph, op, indices.elements * prod(table.shape[1:]))


def _loss_lookup(graph: Graph, op: Op) -> MemoryTraffic:
    """A negative log-likelihood looks at one score per target."""
    return _gather(graph, op, tensor(graph, op, 1).elements)


def _gather(graph: Graph, op: Op, elements: int) -> MemoryTraffic:
    source = tensor(graph, op, 0)
    gathered = min(elements * source.itemsize, footprint(graph, [source]))
    rest = _plain(graph, op, [0])
    return MemoryTraffic(gathered + rest.read, rest.written)


def _scatter(elements: Callable[[Graph, Op], int], adds: bool | Callable[[Op], bool]) -> Rule:
    """A part of the first input is overwritten, or added to."""

    def rule(graph: Graph, op: Op) -> MemoryTraffic:
        target = tensor(graph, op, 0)
        touched = min(elements(graph, op) * target.itemsize, footprint(graph, [target]))
        added = adds if isinstance(adds, bool) else adds(op)
        return MemoryTraffic(footprint(graph, _inputs(graph, op, [0])) + (touched if added else 0), touched)

    return rule


def _elements_at(place: int) -> Callable[[Graph, Op], int]:
    return lambda graph, op: tensor(graph, op, place).elements


def _indexed(graph: Graph, op: Op) -> int:
    """Elements that `x[i, :, j]` names. A mask may name any number up to all."""
    target, indices = tensor(graph, op, 0), op.inputs[1] if len(op.inputs) > 1 else None
    found = tensors(graph, indices)
    if any(i.dtype in ("bool", "uint8") for i in found):
        return target.elements
    shape: list[int] = []
    for index in found:
        shape = _broadcast(shape, list(index.shape))
    places = indices if isinstance(indices, list) else []
    free = [n for i, n in enumerate(target.shape) if i >= len(places) or places[i] is None]
    return prod(shape) * prod(free)


def _broadcast(a: list[int], b: list[int]) -> list[int]:
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    return [y if x == 1 else x for x, y in zip(a, b, strict=True)]


def _filled(graph: Graph, op: Op) -> int:
    """`index_fill_` names whole slices along one dimension."""
    target, dim = tensor(graph, op, 0), argument(op, "dim", 1)
    size = target.shape[dim] if isinstance(dim, int) and target.shape else 1
    return target.elements // max(size, 1) * tensor(graph, op, 2).elements


def _sparse_update(graph: Graph, op: Op) -> MemoryTraffic:
    """Adding a sparse tensor to a dense one touches only the rows it has."""
    target, other = tensor(graph, op, 0), tensors(graph, op.inputs[1] if len(op.inputs) > 1 else None)
    if is_sparse(target) or not other or not is_sparse(other[0]):
        return _plain(graph, op)
    values = footprint(graph, other)
    touched = min(values, footprint(graph, [target]))
    return MemoryTraffic(values + touched, touched)


# ---- ops that leave some of their arguments alone


def _scaled_add(graph: Graph, op: Op) -> MemoryTraffic:
    """beta * self + a b: with beta 0, self is not looked at."""
    return _plain(graph, op, [0] if argument(op, "beta", 3) == 0 and "beta" in op.names else ())


def _convolution_backward(graph: Graph, op: Op) -> MemoryTraffic:
    """The data gradient needs the weight, the weight gradient needs the input."""
    data, weight, *_ = output_mask(op)
    return _plain(graph, op, [place for place, needed in ((1, weight), (2, data)) if not needed])


def _batch_norm(graph: Graph, op: Op) -> MemoryTraffic:
    """In training the running statistics are written too, which the op's schema does not say."""
    running = [t for place in (3, 4) for t in tensors(graph, op.inputs[place] if place < len(op.inputs) else None)]
    written = [*_written(graph, op), *(running if flag(op, "training", 5) else ())]
    return MemoryTraffic(footprint(graph, _inputs(graph, op)), footprint(graph, written))


def _batch_norm_backward(train_at: int | None) -> Rule:
    """In training the saved statistics are read, not the running ones."""

    def rule(graph: Graph, op: Op) -> MemoryTraffic:
        trained = train_at is None or flag(op, "train", train_at)
        return _plain(graph, op, (3, 4) if trained else ())

    return rule


def _fused_optimizer(graph: Graph, op: Op) -> MemoryTraffic:
    """Gradients are written back only where they are unscaled on the way."""
    written = _written(graph, op)
    if not tensors(graph, argument(op, "grad_scale")):
        gradients = {t.id for t in tensors(graph, op.inputs[1] if len(op.inputs) > 1 else None)}
        written = [t for t in written if t.id not in gradients]
    return MemoryTraffic(footprint(graph, _inputs(graph, op)), footprint(graph, written))


def _stated(_: Graph, op: Op) -> MemoryTraffic:
    """A fused kernel says itself what it moves: of a table that it looks things up in, only those."""
    read, written = argument(op, "read_bytes", 1), argument(op, "written_bytes", 2)
    return MemoryTraffic(read if isinstance(read, int) else 0, written if isinstance(written, int) else 0)


_OVERWRITES = aten(
    "fill_ zero_ copy_ normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_ "
    "_foreach_copy_ _foreach_zero_ zeros_like ones_like full_like empty_like rand_like randn_like randint_like "
    "new_zeros new_ones new_full new_empty new_empty_strided"
)
_SHAPE_OF_INPUT = aten(
    "nll_loss_backward nll_loss2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
)

_SPARSE_WRITES = aten("nll_loss_backward nll_loss2d_backward")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_OVERWRITES, _without_reading(0)),
    **dict.fromkeys(_SHAPE_OF_INPUT, _without_reading(1)),
    "aten::native_layer_norm_backward": _without_reading(6),  # the bias
    **dict.fromkeys(aten("embedding index_select gather index take"), _lookup),
    **dict.fromkeys(aten("_embedding_bag _embedding_bag_forward_only"), _bag_lookup),
    **dict.fromkeys(aten("nll_loss_forward nll_loss2d_forward"), _loss_lookup),
    **dict.fromkeys(aten("index_put_ _index_put_impl_"), _scatter(_indexed, adds=lambda op: flag(op, "accumulate", 3))),
    **dict.fromkeys(aten("scatter_add_ scatter_reduce_"), _scatter(_elements_at(2), adds=True)),
    "aten::scatter_": _scatter(_elements_at(2), adds=lambda op: "reduce" in op.overload),
    "aten::index_add_": _scatter(_elements_at(3), adds=True),
    "aten::index_copy_": _scatter(_elements_at(3), adds=False),
    **dict.fromkeys(aten("add_ sub_"), _sparse_update),
    "aten::index_fill_": _scatter(_filled, adds=False),
    **dict.fromkeys(aten("addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ addmv addmv_ _addmm_activation"), _scaled_add),
    **dict.fromkeys(aten("convolution_backward _conv_depthwise2d_backward"), _convolution_backward),
    **dict.fromkeys(aten("cudnn_batch_norm native_batch_norm"), _batch_norm),
    "aten::cudnn_batch_norm_backward": _batch_norm_backward(None),
    "aten::native_batch_norm_backward": _batch_norm_backward(7),
    **dict.fromkeys([f"{by}::{kind}" for by in ("triton", "fused") for kind in ("pointwise", "reduction")], _stated),
    **dict.fromkeys(aten("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"), _fused_optimizer),
}
