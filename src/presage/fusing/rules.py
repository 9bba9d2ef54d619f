"""How ops are taken apart for fusing: norms and softmax into statistics of rows and what is done with them, losses into
a reduction, lookups into elementwise work. What has no rule is elementwise, a reduction, or runs as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from presage.fusing.dataflow import Function, reduction_splits
from presage.fusing.lower import OUTSIDE, RANDOM, Lowering, sort_of
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Tensor, aten

Rule: TypeAlias = Callable[[Lowering, Op], None]

JOINED = 8  # tensors that one kernel puts side by side
_CHAINED = ("elementwise", "random", "copy and cast")
_ERF = re.compile(r"erf|lgamma|digamma|logit|atan|asin|acos")
_EXP = re.compile(r"exp|tanh|sigmoid|silu|mish|[^r]elu|softplus|log(?!ical)|::a?(sin|cos)")


def lower_for_compile(graph: Graph, region: Sequence[int]) -> Lowering:
    """The graph's values and nodes; `region` says of each op which region it is in, OUTSIDE for none."""
    low = Lowering(graph, region)
    around: tuple[str, ...] = ()  # an op that is told whole, and by its parts after it
    parent, last = -1, OUTSIDE
    for i, op in enumerate(graph.ops):
        low.at = i
        if region[i] != last:
            low.seen, last = {}, region[i]
        if region[i] == OUTSIDE:
            low.outside(op)
        elif not op.kernels:
            continue
        elif around and op.within[: len(around)] == around:
            _part(low, op, graph.ops[parent])
        else:
            whole = _lower(low, op)
            around, parent = ((*op.within, op.name), i) if whole else ((), -1)
    return low


def lower_op_by_op(graph: Graph, region: Sequence[int]) -> Lowering:
    """The graph's values and nodes with every op as it is: elementwise, a sum along rows, or something else."""
    low = Lowering(graph, region)
    for i, op in enumerate(graph.ops):
        low.at = i
        known = region[i] == OUTSIDE or not op.kernels or op.name in RULES
        kind = "extern" if known else sort_of(op)
        if op.name == "aten::native_dropout" or (kind == "pointwise" and family(op.name) in _CHAINED):
            _pointwise(low, op)
        elif kind == "reduction" and not _wide(low, op):
            _reduction(low, op, whole=True)
        elif op.kernels or region[i] == OUTSIDE:
            low.outside(op)
    return low


def _wide(low: Lowering, op: Op) -> bool:
    """Whether a reduction is more than sums along rows or down columns."""
    whole = max(low.inputs(op), key=lambda t: t.elements, default=None)
    result = max(low.written(op), key=lambda t: t.elements, default=None)
    if whole is None or result is None or not whole.shape or "pool" in op.name:
        return True
    rows, columns = result.elements, -(-whole.elements // max(1, result.elements))
    if _down(whole, result):
        return op.name not in ("aten::sum", "aten::mean")
    return columns == 1 or reduction_splits(rows, columns, False) > 1


def _lower(low: Lowering, op: Op) -> bool:
    """One op; whether ops within it are told too, and belong to it."""
    rule = RULES.get(op.name)
    kind = sort_of(op)
    if kind == "extern" and rule is None:
        low.extern(op)
        return True
    key = low.key(op)
    if low.reuse(op, key):
        return rule is not None
    before = len(low.flow.nodes)
    try:
        (rule or _BY_KIND[kind])(low, op)
    except (IndexError, ValueError, ZeroDivisionError):  # not as the rule expects it: it runs as it is
        del low.flow.nodes[before:], low.flow.region[before:]
        low.extern(op)
    low.remember(op, key)
    return rule is not None


def _part(low: Lowering, op: Op, parent: Op) -> None:
    """An op within another that is told whole: part of it, unless a compiler would do it by itself."""
    if "convolution" in parent.name and op.name == "aten::sum":
        _reduction(low, op)  # the gradient of a bias
    elif parent.name not in RULES:
        low.extern(op)


# ---- ops without a rule


def _pointwise(low: Lowering, op: Op) -> None:
    reads, outputs = low.reads(op), low.written(op)
    if not outputs:
        return
    elements = max(t.elements for t in outputs)
    if "aten::convolution" in op.within:
        low.flow.stored |= {v for v in reads if low.flow.values[v].elements < elements}  # a bias
    for t in outputs:  # a write of a part keeps the rest
        if t.nbytes < low.graph.storages[t.storage].nbytes and t.storage in low.now and t.id in op.writes:
            reads.append(low.now[t.storage])
            elements = max(elements, low.graph.storages[t.storage].nbytes // t.itemsize)
    turned = any(_order(t) != _order(outputs[0]) for t in low.inputs(op) if t.shape == outputs[0].shape)
    slices = low.slices(op)
    low.pointwise(reads, [low.write(t) for t in outputs], elements, _function(op), turned=turned, slices=slices)


def _order(t: Tensor) -> list[int]:
    """Dimensions from the narrowest stride to the widest."""
    return sorted((d for d, n in enumerate(t.shape) if n > 1 and t.strides), key=lambda d: t.strides[d])


def _function(op: Op) -> Function:
    if RANDOM.search(op.name):
        return "random"
    if "gelu" in op.name:
        return "exp" if "tanh" in op.inputs else "erf"
    return "erf" if _ERF.search(op.name) else "exp" if _EXP.search(op.name) else ""


def _reduction(low: Lowering, op: Op, whole: bool = False) -> None:
    inputs, outputs = low.inputs(op), low.written(op)
    source = max(inputs, key=lambda t: t.elements, default=None)
    rows = max((t.elements for t in outputs), default=1)
    if source is None or source.elements <= rows:
        return _pointwise(low, op)
    reads = low.reads(op)
    writes = [low.write(t) for t in outputs]
    low.reduction(reads, writes, rows, -(-source.elements // max(1, rows)), _down(source, outputs[0]), whole=whole)
    return None


def _down(whole: Tensor, result: Tensor) -> bool:
    """Whether neighbours in memory go to different results: the dimension that memory runs along is kept."""
    if not whole.strides or result.elements <= 1:
        return False
    inner = min((d for d, n in enumerate(whole.shape) if n > 1), key=lambda d: whole.strides[d] or 1 << 62, default=0)
    if len(result.shape) == len(whole.shape):
        return result.shape[inner] == whole.shape[inner]
    from_end = len(whole.shape) - inner
    return len(result.shape) >= from_end and result.shape[-from_end] == whole.shape[inner]


def _scatter(low: Lowering, op: Op) -> None:
    """Adds to, or overwrites, parts of what is there."""
    target = low.written(op)[0]
    inputs = [t for t in low.inputs(op) if t.storage != target.storage]
    reads, before = [low.read(t) for t in inputs], low.read(target) if target.id in op.writes else None
    low.scatter(before, reads, low.write(target), max((t.elements for t in inputs), default=1))


_BY_KIND: dict[str, Rule] = {"pointwise": _pointwise, "reduction": _reduction, "scatter": _scatter}


# ---- norms


def _rows_norm(low: Lowering, op: Op) -> None:
    """Layer and RMS norm: statistics of each row, the rows made even by them, then scale and shift."""
    x, (y, *small) = low.graph.inputs_of(op)[0], low.graph.outputs_of(op)
    rows = max((t.elements for t in small), default=max(1, x.elements // max(1, x.shape[-1])))
    (source, *scales), even = low.reads(op), low.hidden(x.elements)
    statistics = [low.write(t) for t in small] or [low.hidden(rows)]
    low.reduction([source], statistics, rows, -(-x.elements // max(1, rows)), False)
    low.pointwise([source, *statistics], [even], x.elements)
    low.pointwise([even, *scales], [low.write(y)], x.elements)
    low.normed[statistics[-1]] = even


def _rows_norm_backward(low: Lowering, op: Op) -> None:
    """Sums along each row give the gradient of the input; sums down the columns those of scale and shift."""
    tensors, outputs = low.graph.inputs_of(op), low.graph.outputs_of(op)
    gradient, x, *rest = low.reads(op)
    small = [t for t in tensors[2:] if t.elements < tensors[0].elements]
    rows = max((t.elements for t in small), default=1)
    columns = -(-tensors[0].elements // max(1, rows))
    even = next((low.normed[v] for v in rest if v in low.normed), x)
    given = [t for t in outputs if t.elements == tensors[0].elements]
    if given:
        sums, reads = low.hidden(2 * rows), [gradient, even, *rest]
        low.reduction(reads, [sums], rows, columns, False)
        low.pointwise([*reads, sums], [low.write(t) for t in given], tensors[0].elements)
    for place, t in enumerate(t for t in outputs if t not in given):
        low.reduction([gradient] if place else [gradient, even], [low.write(t)], columns, rows, True)


def _channel_norm(low: Lowering, op: Op) -> None:
    """Batch and group norm: statistics of each channel or group, a scale and a shift of each channel, each element."""
    x, reads = low.graph.inputs_of(op)[0], low.reads(op)
    y, *small = low.graph.outputs_of(op)
    small = [t for t in small if t.elements and t.dtype != "uint8"]
    rows = max((t.elements for t in small), default=max(1, x.shape[1] if len(x.shape) > 1 else 1))
    statistics = [low.write(t) for t in small] or [low.hidden(2 * rows)]
    low.reduction(reads[:1], statistics, rows, -(-x.elements // max(1, rows)), _by_channel(x) and "batch" in op.name)
    channels = rows if "batch" in op.name else x.shape[0] * x.shape[1]
    scale = low.hidden(2 * channels)
    low.pointwise([*reads[1:], *statistics], [scale], channels)
    low.flow.stored.add(scale)
    low.pointwise([reads[0], scale], [low.write(y)], x.elements)


def _by_channel(x: Tensor) -> bool:
    return len(x.strides) > 2 and x.strides[1] == 1 and x.shape[1] > 1


def _channel_norm_backward(low: Lowering, op: Op) -> None:
    tensors, reads = low.graph.inputs_of(op), low.reads(op)
    x, outputs = tensors[0], low.graph.outputs_of(op)
    given = [t for t in outputs if t.elements == x.elements]
    small = [t for t in outputs if t.elements != x.elements]
    group = "group" in op.name
    rows = x.shape[0] * x.shape[1] if group else max(1, x.shape[1] if len(x.shape) > 1 else 1)
    sums = low.hidden(2 * rows)
    low.reduction(reads, [sums], rows, -(-x.elements // max(1, rows)), _by_channel(x))
    if group:
        batch = max(1, x.shape[0])
        factors = low.hidden(2 * max((t.elements for t in tensors[2:4]), default=1))
        low.reduction([sums, *reads[2:]], [factors], max(1, rows // 8), 8, False)
        for t in small:
            low.reduction([sums, *reads[2:4]], [low.write(t)], rows // batch, batch, True)
        sums = factors
    elif small:
        low.pointwise([sums, *reads[2:]], [low.write(t) for t in small], rows)
    low.pointwise([*reads, sums], [low.write(t) for t in given], x.elements)


# ---- softmax and losses


def _softmax(low: Lowering, op: Op) -> None:
    x, y = low.graph.inputs_of(op)[0], low.graph.outputs_of(op)[0]
    dim = op.inputs[1] if len(op.inputs) > 1 and isinstance(op.inputs[1], int) else -1
    rows, columns, down = _along(x, dim)
    (source, *_), statistics = low.reads(op), low.hidden(2 * rows)
    low.reduction([source], [statistics], rows, columns, down, function="exp")
    low.pointwise([source, statistics], [low.write(y)], x.elements)


def _softmax_backward(low: Lowering, op: Op) -> None:
    x, y = low.graph.inputs_of(op)[0], low.graph.outputs_of(op)[0]
    dim = op.inputs[2] if len(op.inputs) > 2 and isinstance(op.inputs[2], int) else -1
    rows, columns, down = _along(x, dim)
    reads, sums = low.reads(op), low.hidden(rows)
    low.reduction(reads, [sums], rows, columns, down, function="exp")
    low.pointwise([*reads, sums], [low.write(y)], x.elements)


def _along(x: Tensor, dim: int) -> tuple[int, int, bool]:
    """Rows and columns of a reduction of one dimension, and whether memory runs along another."""
    if not x.shape:
        return 1, 1, False
    columns = max(1, x.shape[dim])
    widest = min((s for s, n in zip(x.strides, x.shape, strict=True) if n > 1), default=1)
    return max(1, x.elements // columns), columns, x.strides[dim] != widest and columns > 1


def _loss(low: Lowering, op: Op) -> None:
    """All elements (of a likelihood: one of each row) into one number, or each by itself."""
    outputs, reads = low.written(op), low.reads(op)
    looked = [t.elements for t in low.inputs(op)]
    elements = min(looked[:2], default=1) if "nll" in op.name else max(looked, default=1)
    writes = [low.write(t) for t in outputs]
    if max(t.elements for t in outputs) < elements:
        low.reduction(reads, writes, 1, elements, False)
    else:
        low.pointwise(reads, writes, elements)


def _likelihood_backward(low: Lowering, op: Op) -> None:
    """One element of each row has a gradient; the scores are looked at for their shape only."""
    reads = low.reads(op)
    y = low.graph.outputs_of(op)[0]
    low.pointwise([reads[0], *reads[2:]], [low.write(y)], y.elements)


# ---- others


def _dropout(low: Lowering, op: Op) -> None:
    y, *mask = low.graph.outputs_of(op)
    reads = low.reads(op)
    kept = [low.write(t) for t in mask] or [low.hidden(y.elements)]
    low.pointwise([], kept, y.elements, function="random")
    low.pointwise([*reads, *kept], [low.write(y)], y.elements)


def _table_backward(low: Lowering, op: Op) -> None:
    """A table of zeros, and rows added to it."""
    reads, table = low.reads(op), low.graph.outputs_of(op)[0]
    gradient = low.graph.inputs_of(op)[0]
    zeros = low.flow.value(table.elements, table.itemsize)
    low.pointwise([], [zeros], table.elements)
    low.scatter(zeros, reads, low.write(table), gradient.elements)


def _joined(low: Lowering, op: Op) -> None:
    """Tensors side by side: in one kernel where they are few and simple, else each copied to its place."""
    inputs, result = low.inputs(op), low.written(op)[0]
    reads = [low.read(t) for t in inputs]
    if len(inputs) <= JOINED and not any(_looked_up(low, v) for v in reads):
        return _pointwise(low, op)
    before: int | None = None
    for t, v in zip(inputs[:-1], reads, strict=False):
        part = low.flow.value(result.elements, result.itemsize)
        low.scatter(before, [v], part, t.elements, stored=False)
        before = part
    low.scatter(before, reads[-1:], low.write(result), inputs[-1].elements, stored=False)
    return None


def _looked_up(low: Lowering, v: int) -> bool:
    """Whether a value is made by a lookup."""
    op = low.graph.ops[low.producers[v]] if v in low.producers else None
    return op is not None and family(op.name) in ("index", "embedding") and sort_of(op) == "pointwise"


def _masked_backward(low: Lowering, op: Op) -> None:
    """Which gradients pass is one byte an element, known when the forward pass ends."""
    (gradient, result, *_), y = low.reads(op), low.graph.outputs_of(op)[0]
    mask = low.flow.value(y.elements, 1)
    low.pointwise([result], [mask], y.elements, region=low.made.get(result))
    low.pointwise([gradient, mask], [low.write(y)], y.elements)


def _activations_only(low: Lowering, op: Op) -> None:
    """Elementwise on the results; the activations are read for their shape only."""
    reads = low.reads(op)
    y = low.graph.outputs_of(op)[0]
    low.pointwise(reads[:1] if len(reads) < 3 else [reads[0], reads[-1]], [low.write(y)], y.elements)


RULES: dict[str, Rule] = {
    **dict.fromkeys(aten("native_layer_norm _fused_rms_norm"), _rows_norm),
    **dict.fromkeys(aten("native_layer_norm_backward _fused_rms_norm_backward"), _rows_norm_backward),
    **dict.fromkeys(aten("native_batch_norm cudnn_batch_norm native_group_norm"), _channel_norm),
    **dict.fromkeys(
        aten("native_batch_norm_backward cudnn_batch_norm_backward native_group_norm_backward"), _channel_norm_backward
    ),
    **dict.fromkeys(aten("_softmax _log_softmax"), _softmax),
    **dict.fromkeys(aten("_softmax_backward_data _log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(
        aten(
            "mse_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss_forward nll_loss2d_forward l1_loss "
            "soft_margin_loss multi_margin_loss"
        ),
        _loss,
    ),
    **dict.fromkeys(aten("nll_loss_backward nll_loss2d_backward"), _likelihood_backward),
    **dict.fromkeys(aten("threshold_backward hardtanh_backward leaky_relu_backward"), _masked_backward),
    "aten::native_dropout": _dropout,
    "aten::embedding_dense_backward": _table_backward,
    **dict.fromkeys(aten("cat stack"), _joined),
    **dict.fromkeys(
        aten(
            "upsample_nearest2d_backward upsample_bilinear2d_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"
        ),
        _activations_only,
    ),
}
