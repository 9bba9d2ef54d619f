"""What becomes of an op when a dimension of one of its tensors is cut: which dimensions of its others are cut with it.

A SplitRule joins the dimensions of an op's tensors that mean the same. Most ops work along them element by element; a
GEMM sums over one of its three, so that its output is then a rank's partial sum; a softmax needs one whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from presage.graph.graph import Graph, Op, Ref, Tensor, argument, aten, references, tensor, tensors

Place: TypeAlias = tuple[int, int]  # a tensor's id and one of its dimensions


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Dimensions of an op's tensors that are cut together or not at all."""

    places: tuple[Place, ...]
    sums: tuple[int, ...] = ()  # outputs that are then a share of a sum over the ranks
    whole: bool = False  # the op needs these dimensions whole
    scaled: bool = False  # sizes may differ: all are cut alike, as heads of queries and of keys are
    norms: bool = False  # the sums are of squares, under a root: those of a gradient's norm
    softmax: bool = False  # the op needs sums along it, one a row: a softmax whose classes are shared out


Rule: TypeAlias = Callable[[Graph, Op], Iterable[SplitRule]]


def split_rules(graph: Graph, op: Op, vocabulary: bool = False) -> Mapping[Place, SplitRule] | None:
    """The links of an op by tensor and dimension; None if there is no rule for it."""
    rule = _rule(op.name, vocabulary)
    if rule is None:
        return None
    return {place: link for link in rule(graph, op) for place in link.places}


def matrices(graph: Graph, op: Op) -> tuple[Tensor, Tensor, Tensor] | None:
    """The factors and the product of a matrix multiplication; None for another op."""
    first = _PRODUCTS.get(op.name)
    if first is None or not op.kernels or not op.outputs:
        return None
    return tensor(graph, op, first), tensor(graph, op, first + 1), graph.tensors[op.outputs[0]]


def _rule(name: str, vocabulary: bool) -> Rule | None:
    if vocabulary and name in _CLASSES:
        return _CLASSES[name]
    if name in _RULES:
        return _RULES[name]
    return (
        _lists
        if name.startswith(("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd", "aten::_amp_foreach"))
        else None
    )


# ---- element by element


def _all(graph: Graph, op: Op) -> list[Tensor]:
    ids = dict.fromkeys([*references(op.inputs), *op.outputs])
    return [graph.tensors[i] for i in ids]


def _aligned(group: Iterable[Tensor]) -> Iterator[list[Place]]:
    """Dimensions counted from the last, as broadcasting does; none where sizes do not fit."""
    group = [t for t in group if t.elements]
    for back in range(1, max((len(t.shape) for t in group), default=0) + 1):
        there = [t for t in group if len(t.shape) >= back and t.shape[-back] > 1]
        if len({t.shape[-back] for t in there}) == 1:
            yield [(t.id, len(t.shape) - back) for t in there]


def _pointwise(graph: Graph, op: Op) -> Iterator[SplitRule]:
    return (SplitRule(tuple(places)) for places in _aligned(_all(graph, op)))


def _except(*dims: int | str) -> Rule:
    """Element by element, but for dimensions that must be whole: given, or named by an argument."""

    def rule(graph: Graph, op: Op) -> Iterator[SplitRule]:
        size = len(graph.outputs_of(op)[0].shape)
        barred = {d % size for name in dims for d in ([name] if isinstance(name, int) else _ints(argument(op, name)))}
        for places in _aligned(_all(graph, op)):
            back = len(graph.tensors[places[0][0]].shape) - places[0][1]
            yield SplitRule(tuple(places), whole=size - back in barred)

    return rule


def _ints(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int)]


def _lists(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """Lists of tensors, the first of one with the first of the others: optimizers."""
    lists = [a for a in op.inputs if isinstance(a, list)]
    columns = [[i.id for i in a if isinstance(i, Ref)] for a in lists]
    columns = [c for c in columns if c]
    if op.outputs and columns and len(op.outputs) == len(columns[0]):
        columns.append(list(op.outputs))
    norm = op.name == "aten::_foreach_norm"
    for k in range(max(map(len, columns), default=0)):
        row = [graph.tensors[i] for i in dict.fromkeys(c[k] for c in columns if k < len(c))]
        shape = row[0].shape
        same = [t.id for t in row if t.shape == shape]
        sums = (op.outputs[k],) if norm else ()
        yield from (SplitRule(tuple((i, d) for i in same), sums, norms=norm) for d in range(len(shape)))


# ---- sums


def _product(first: int) -> Rule:
    """[..., m, k] x [..., k, n], with what is added to it before them."""

    def rule(graph: Graph, op: Op) -> Iterator[SplitRule]:
        a, b = tensor(graph, op, first), tensor(graph, op, first + 1)
        out = graph.tensors[op.outputs[0]]
        added = [tensor(graph, op, 0)] if first else []
        rows, columns = len(out.shape) - 2, len(out.shape) - 1
        yield SplitRule(((a.id, len(a.shape) - 1), (b.id, len(b.shape) - 2)), sums=(out.id,))
        yield SplitRule(((a.id, len(a.shape) - 2), *_along(added, out, rows), (out.id, rows)))
        yield SplitRule(((b.id, len(b.shape) - 1), *_along(added, out, columns), (out.id, columns)))
        if rows:
            yield SplitRule(((a.id, 0), (b.id, 0), *_along(added, out, 0), (out.id, 0)))

    return rule


def _along(group: Iterable[Tensor], out: Tensor, dim: int) -> list[Place]:
    """Where tensors that are broadcast to the output have this dimension of it."""
    places = [(t, len(t.shape) - len(out.shape) + dim) for t in group]
    return [(t.id, d) for t, d in places if d >= 0 and t.shape[d] > 1]


def _grouped_product(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """Rows in groups, each with its own matrix; or, for the gradient of those, a sum over each group's rows."""
    a, b = tensor(graph, op, 0), tensor(graph, op, 1)
    out = graph.tensors[op.outputs[0]]
    if len(a.shape) == 2 and len(b.shape) == 3:
        yield SplitRule(((a.id, 1), (b.id, 1)), sums=(out.id,))
        yield SplitRule(((b.id, 2), (out.id, 1)))
    elif len(a.shape) == 2 and len(b.shape) == 2:
        yield SplitRule(((a.id, 0), (out.id, 1)))
        yield SplitRule(((b.id, 1), (out.id, 2)))


def _reduction(linear: bool) -> Rule:
    """Some dimensions become one. Only a sum of parts is a part of the sum."""

    def rule(graph: Graph, op: Op) -> Iterator[SplitRule]:
        x, out = tensor(graph, op, 0), graph.tensors[op.outputs[0]]
        size = len(x.shape)
        given = op.inputs[1] if len(op.inputs) > 1 and not op.names else argument(op, "dim", 1)
        gone = {d % size for d in _ints(given)} if size else set()
        gone = gone or set(range(size))
        kept = len(out.shape) == size
        left = [d for d in range(size) if kept or d not in gone]
        for d in range(size):
            if d in gone:
                yield SplitRule(((x.id, d),), (out.id,) if linear else (), whole=not linear)
            elif x.shape[d] > 1:
                yield SplitRule(((x.id, d), (out.id, left.index(d))))

    return rule


def _vector_norm(graph: Graph, op: Op) -> Iterator[SplitRule]:
    x, out = tensor(graph, op, 0), op.outputs[0]
    return (SplitRule(((x.id, d),), (out,), norms=True) for d in range(len(x.shape)))


# ---- layers


def _norm(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """Along the last dimensions it needs them whole; the gradients of its weights sum over the others."""
    last = len(_ints(argument(op, "normalized_shape", 1)))
    backward = op.name.endswith("_backward")
    weights = op.outputs[1:] if backward else ()
    rows = [t for t in _all(graph, op) if len(t.shape) > last]
    for d in range(len(rows[0].shape) - last):
        yield SplitRule(tuple((t.id, d) for t in rows if t.shape[d] > 1), sums=tuple(weights))
    for t in _all(graph, op):
        yield SplitRule(tuple((t.id, len(t.shape) - 1 - d) for d in range(min(last, len(t.shape)))), whole=True)


def _attention(heads_at: int) -> Rule:
    """Each sequence and each head by itself; rows and depth whole. Outputs have their heads second in every kind."""

    def rule(graph: Graph, op: Op) -> Iterator[SplitRule]:
        given = [t for t in graph.inputs_of(op) if len(t.shape) > 2]
        bias = {t.id for n in ("attn_bias", "bias") for t in tensors(graph, argument(op, n))}
        swapped = [t for t in given if len(t.shape) == 4 and t.id not in bias]
        heads = [(t.id, heads_at if t in swapped else 1) for t in given]
        heads += [(t.id, 1) for t in graph.outputs_of(op) if len(t.shape) > 2]
        yield SplitRule(tuple((i, d) for i, d in heads if graph.tensors[i].shape[d] > 1), scaled=True)
        yield SplitRule(tuple((i, 0) for i, _ in heads if graph.tensors[i].shape[0] > 1))

    return rule


def _cat(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """Pieces side by side along a dimension, or, where the output has one more, along a new one."""
    out = graph.tensors[op.outputs[0]]
    pieces = [t for t in tensors(graph, op.inputs[0]) if t.elements]
    dims = _ints(argument(op, "dim", 1))
    dim = (dims[0] if dims else 0) % max(1, len(out.shape))
    new = bool(pieces) and len(out.shape) > len(pieces[0].shape)
    unique = list({t.id: t for t in pieces}.values())
    for d in range(len(out.shape)):
        if new and d == dim:
            yield SplitRule(((out.id, d),), whole=True)
        else:
            of_piece = d - 1 if new and d > dim else d
            yield SplitRule((*((t.id, of_piece) for t in unique), (out.id, d)))


# ---- rows found by number


def _gather(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """Rows of a table by their numbers: a rank that holds some of the rows finds a share of the sum."""
    table, index = tensor(graph, op, 0), tensor(graph, op, 2)
    out = graph.tensors[op.outputs[0]]
    dim = _ints(argument(op, "dim", 1))[0] % max(1, len(table.shape))
    for d in range(len(out.shape)):
        if d == dim:
            yield SplitRule(((table.id, d),), sums=(out.id,))
            yield SplitRule(((index.id, d), (out.id, d)))
        elif table.shape[d] == index.shape[d]:
            yield SplitRule(((table.id, d), (index.id, d), (out.id, d)))


def _embedding_backward(graph: Graph, op: Op) -> Iterator[SplitRule]:
    grad, out = tensor(graph, op, 0), graph.tensors[op.outputs[0]]
    yield SplitRule(((grad.id, len(grad.shape) - 1), (out.id, 1)))
    yield SplitRule(((out.id, 0),))


def _indexed(values_at: int | None) -> Rule:
    """x[:, i] and its like: the dimensions beside the one that is looked up in."""

    def rule(graph: Graph, op: Op) -> Iterator[SplitRule]:
        x, where = tensor(graph, op, 0), op.inputs[1]
        values = graph.tensors[op.outputs[0]] if values_at is None else tensor(graph, op, values_at)
        found = [k for k, i in enumerate(where) if isinstance(i, Ref)] if isinstance(where, list) else []
        if len(found) != 1:
            return
        at, extra = found[0], len(values.shape) - len(x.shape)
        others = [] if values_at is None else [t for t in graph.outputs_of(op) if t.id != x.id]
        for d in (d for d in range(len(x.shape)) if d != at):
            of_values = d if d < at else d + extra
            if 0 <= of_values < len(values.shape) and values.shape[of_values] == x.shape[d]:
                yield SplitRule(((x.id, d), *((t.id, d) for t in others), (values.id, of_values)))

    return rule


def _index_add(graph: Graph, op: Op) -> Iterator[SplitRule]:
    x, source = tensor(graph, op, 0), tensor(graph, op, 3)
    dim = _ints(argument(op, "dim", 1))[0] % len(x.shape)
    group = [x, source, *(t for t in graph.outputs_of(op) if t.id != x.id)]
    return (SplitRule(tuple((t.id, d) for t in group)) for d in range(len(x.shape)) if d != dim)


# ---- a vocabulary that is shared out: each rank has some of the classes


def _shared_softmax(graph: Graph, op: Op) -> Iterator[SplitRule]:
    size = len(graph.outputs_of(op)[0].shape)
    dim = _ints(argument(op, "dim", 2 if "backward" in op.name else 1))[0] % size
    forward = op.name == "aten::_log_softmax"
    for places in _aligned(_all(graph, op)):
        yield SplitRule(tuple(places), softmax=forward and places[0][1] == dim)


def _shared_loss(graph: Graph, op: Op) -> Iterator[SplitRule]:
    """The loss of the right class, which one rank has; its gradient is made where it is."""
    matrices = [t for t in _all(graph, op) if len(t.shape) == 2]
    yield SplitRule(tuple((t.id, 1) for t in matrices), softmax=op.name == "aten::nll_loss_forward")


_PRODUCTS = {
    **dict.fromkeys(aten("mm bmm _grouped_mm"), 0),
    **dict.fromkeys(aten("addmm addmm_ baddbmm baddbmm_ _addmm_activation"), 1),
}

_CLASSES: dict[str, Rule] = {
    **dict.fromkeys(aten("_log_softmax _log_softmax_backward_data"), _shared_softmax),
    **dict.fromkeys(aten("nll_loss_forward nll_loss_backward"), _shared_loss),
}

_POINTWISE = aten(
    "copy_ _to_copy clone contiguous fill_ zero_ zeros_like ones_like empty_like full_like detach add add_ sub "
    "sub_ rsub mul mul_ div div_ neg neg_ pow pow_ sqrt sqrt_ rsqrt rsqrt_ square exp exp_ expm1 log log_ log1p "
    "abs sign sgn reciprocal reciprocal_ sin cos tanh tanh_ tanh_backward sigmoid sigmoid_ sigmoid_backward erf "
    "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ minimum maximum relu relu_ threshold "
    "threshold_backward gelu gelu_ gelu_backward silu silu_ silu_backward mish mish_ mish_backward softplus "
    "softplus_backward elu elu_ elu_backward leaky_relu leaky_relu_ leaky_relu_backward hardtanh hardtanh_ "
    "hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid hardsigmoid_backward native_dropout "
    "native_dropout_backward bernoulli_ uniform_ normal_ masked_fill masked_fill_ where eq ne lt le gt ge "
    "logical_and logical_or logical_not logical_xor bitwise_not bitwise_and bitwise_or isneginf isinf isnan "
    "isfinite remainder fmod floor ceil round trunc floor_divide lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ "
    "polar view_as_real view_as_complex real imag conj _conj atan2"
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(aten("mm bmm"), _product(0)),
    **dict.fromkeys(aten("addmm addmm_ baddbmm baddbmm_ _addmm_activation"), _product(1)),
    "aten::_grouped_mm": _grouped_product,
    "aten::sum": _reduction(linear=True),
    **dict.fromkeys(aten("mean all any amax amin max min prod argmax var std logsumexp"), _reduction(linear=False)),
    "aten::linalg_vector_norm": _vector_norm,
    **dict.fromkeys(
        aten("_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data cumsum"), _except("dim")
    ),
    "aten::roll": _except("dims"),
    **dict.fromkeys(aten("tril tril_ triu triu_"), _except(-1, -2)),
    **dict.fromkeys(aten("native_layer_norm _fused_rms_norm"), _norm),
    **dict.fromkeys(aten("native_layer_norm_backward _fused_rms_norm_backward"), _norm),
    **{f"aten::_cudnn_attention_{way}": _attention(1) for way in ("forward", "backward")},
    **{
        f"aten::_{kind}_attention_{way}": _attention(2)
        for kind in ("efficient", "flash")
        for way in ("forward", "backward")
    },
    "aten::cat": _cat,
    "aten::gather": _gather,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::index": _indexed(None),
    "aten::_index_put_impl_": _indexed(2),
    **dict.fromkeys(aten("index_add index_add_"), _index_add),
}
