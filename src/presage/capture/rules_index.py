"""Lookups, scatters and sorts."""

from __future__ import annotations

from typing import Any

from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule
from presage.capture.rules_memory import contiguous, copy, fill
from presage.graph.graph import Arg, Ref

SMALL_LOOKUP = 3072  # up to so many indices an embedding's gradient needs no sort


def _gathered(b: CallLowering, table: Arg, dim: int, index: Arg, out: Ref) -> None:
    """index_select: a gather with the index stretched over the other dimensions."""
    t, i, o = b.get(table), b.get(index), b.get(out)
    for name in ("aten::empty", "aten::resize_", "aten::view"):
        b.host(name)
    with b.inside("aten::expand"):
        b.host("aten::as_strided", index)
    place = dim % max(len(t.shape), 1)
    shape = tuple(i.elements if d == place else n for d, n in enumerate(t.shape))
    strides = tuple(1 if d == place else 0 for d in range(len(shape)))
    wide = b.reshaped(index, shape, strides)
    target = b.view(o.storage, shape, o.dtype, offset=o.offset)
    b.op("aten::gather", [table, dim, wide, False, target], [target], writes=[target], overload="out")


def _index_select(b: CallLowering, call: RecordedCall) -> None:
    table, dim, index = call.inputs[:3]
    assert isinstance(dim, int)
    with b.inside("aten::index_select"):
        _gathered(b, table, dim, index, b.out())


def _embedding(b: CallLowering, call: RecordedCall) -> None:
    table, index = call.inputs[:2]
    flat = len(b.get(index).shape) == 1
    with b.inside("aten::embedding"):
        if not flat:
            t = b.get(index)
            if not t.is_contiguous:
                with b.inside("aten::reshape", "aten::clone"):
                    whole = b.alike(b.new(t.shape, t.dtype), index)
                    b.host("aten::empty_like", index)
                    copy(b, whole, index)
                index = whole
            else:
                with b.inside("aten::reshape"):
                    b.host("aten::view", index)
        with b.inside("aten::index_select"):
            _gathered(b, table, 0, index, b.out())
        if not flat:
            b.host("aten::view", b.out())


def _counted(b: CallLowering, count: int, dtype: str) -> Ref:
    out = b.new((count,), dtype)
    with b.inside("aten::arange"):
        b.host("aten::empty")
        b.op("aten::arange", [0, count, 1, b.reshaped(out, (0,))], [out], overload="start_out")
    return out


def _cleared(b: CallLowering, out: Ref) -> None:
    with b.inside("aten::zeros"):
        b.host("aten::empty")
        fill(b, out)


def _segments(b: CallLowering, count: int, dtype: str, out: Ref) -> None:
    """The sorted form of an embedding's gradient: sort, cut into segments, sum each."""
    for _ in range(2):
        with b.inside("aten::empty_like"):
            b.empty((count,), dtype)
    _counted(b, count, dtype)
    _cleared(b, out)
    table = b.get(out)
    width = -(-table.shape[-1] // 32) * 32
    segments = min(count, table.shape[0])
    parts = segments + count // 10  # a segment of more than 10 rows is summed in parts
    for size in (count, 1, segments, segments, 1, parts):
        b.empty((size,), dtype)
    b.empty((parts * width,), "float32")


def _embedding_backward(b: CallLowering, call: RecordedCall) -> None:
    grad, index = call.inputs[:2]
    count = b.get(index).elements
    b.same()
    with b.inside(call.name):
        contiguous(b, index)
        contiguous(b, grad)
        b.host("aten::view", grad)
        if count <= SMALL_LOOKUP and not call.inputs[4]:
            _cleared(b, b.out())
        else:
            _segments(b, count, b.get(index).dtype, b.out())


def _bag_backward(b: CallLowering, call: RecordedCall) -> None:
    grad, index, _, bag_of, sizes, largest = call.inputs[:6]
    rows, by_frequency, mode, sparse, weights, padding = call.inputs[6:12]
    g = b.get(grad)
    with b.inside(call.name):
        if sparse:
            with b.inside("aten::_embedding_bag_sparse_backward", "aten::index_select"):
                picked = b.out() if call.outputs else b.new((b.get(index).elements, g.shape[1]), g.dtype)
                _gathered(
                    b, grad, 0, bag_of, b.view(b.get(picked).storage, (b.get(index).elements, g.shape[1]), g.dtype)
                )
            return
        b.op(
            "aten::_embedding_bag_dense_backward",
            [grad, index, bag_of, sizes, largest, rows, by_frequency, mode, weights, padding],
            call.outputs,
        )
        with b.inside("aten::_embedding_bag_dense_backward"):
            contiguous(b, grad)
            if mode == 2:
                _cleared(b, b.out())
            else:
                _segments(b, b.get(index).elements, b.get(index).dtype, b.out())


def _index_put(b: CallLowering, call: RecordedCall) -> None:
    where = [] if call.name == "aten::_index_put_impl_" else [call.name]
    target, indices, values, accumulate = call.inputs[:4]
    assert isinstance(indices, list)
    given = [i for i in indices if isinstance(i, Ref)]
    if call.name == "aten::index_put":
        with b.inside(call.name, "aten::clone"):
            b.host("aten::empty_like", target)
            copy(b, b.out(), target)
        target = b.out()
    masks = [i for i in given if b.get(i).dtype in ("bool", "uint8")]
    single = not isinstance(values, Ref) or b.get(values).elements == 1
    with b.inside(*where):
        if masks and single and not accumulate and len(given) == 1:
            with b.inside("aten::_index_put_impl_"):
                b.op("aten::masked_fill_", [target, masks[0], values], call.outputs, writes=call.outputs)
            return
        b.op("aten::_index_put_impl_", [target, indices, values, accumulate, False], call.outputs, writes=call.outputs)
        if accumulate:
            with b.inside("aten::_index_put_impl_"):
                _sorted_put(b, given, values)


def _index(b: CallLowering, call: RecordedCall) -> None:
    """A mask is first turned into the places where it is set, whose number the host waits for."""
    target: Any = call.inputs[0]
    indices: Any = call.inputs[1]
    if not isinstance(indices, list) or not any(_is_mask(b, i) for i in indices):
        b.same()
        return
    places: list[Any] = []
    with b.inside("aten::index"):
        for i in indices:
            if not _is_mask(b, i):
                places.append(i)
                continue
            dims = len(b.get(i).shape)
            count = b.get(b.out()).shape[_first_mask(indices)] if b.get(b.out()).shape else 1
            found = b.new((count, dims), "int64", (1, max(count, 1)))
            b.op("aten::nonzero", [i], [found], sync=True)
            storage = b.get(found).storage
            places += [b.view(storage, (count,), "int64", offset=d * count) for d in range(dims)]
    b.op("aten::index", [target, places], call.outputs, overload="Tensor")


def _is_mask(b: CallLowering, index: Any) -> bool:
    return isinstance(index, Ref) and b.get(index).dtype in ("bool", "uint8")


def _first_mask(indices: list[Any]) -> int:
    """The dimension of the output that runs over the places of a mask: where its first index tensor stands."""
    return next(place for place, i in enumerate(indices) if isinstance(i, Ref))


def _masked_select(b: CallLowering, call: RecordedCall) -> None:
    """Expanded to one shape, then looked up by the mask's places."""
    x, mask = call.inputs[:2]
    count = b.get(b.out()).elements
    dims = len(b.get(mask).shape)
    with b.inside("aten::masked_select", "aten::index"):
        found = b.new((count, dims), "int64", (1, max(count, 1)))
        b.op("aten::nonzero", [mask], [found], sync=True)
        storage = b.get(found).storage
        places: list[Any] = [b.view(storage, (count,), "int64", offset=d * count) for d in range(dims)]
        b.op("aten::index", [x, places], call.outputs, overload="Tensor")


def _sorted_put(b: CallLowering, indices: list[Ref], values: Arg) -> None:
    """Adding at indices that may repeat: linear indices, sorted."""
    linear = None
    for i in indices:
        t = b.get(i)
        wrapped = b.new(t.shape, t.dtype)
        for name in ("aten::remainder", "aten::mul"):
            with b.inside(name):
                b.op(name, [i if name.endswith("r") else wrapped, 1], [wrapped], overload="Tensor")
        if linear is None:
            linear = wrapped
        else:
            b.op("aten::add_", [linear, wrapped, 1], [linear], writes=[linear], overload="Tensor")
    assert linear is not None
    contiguous(b, values)
    t = b.get(linear)
    flat = b.reshaped(linear, (t.elements,))
    with b.inside("aten::divide_", "aten::div_"):
        b.op("aten::div_", [flat, 1, "trunc"], [flat], writes=[flat], overload="Tensor_mode")
    _counted(b, t.elements, t.dtype)


def _copied_first(b: CallLowering, call: RecordedCall) -> None:
    """The form that leaves its input alone: a copy, changed in place."""
    b.same()
    with b.inside(call.name):
        copy(b, b.out(), call.inputs[0])


def _sort(b: CallLowering, call: RecordedCall) -> None:
    x = b.get(call.inputs[0])
    with b.inside(*(["aten::sort"] if call.overload != "stable" else [])):
        b.op("aten::sort", call.inputs, call.outputs, overload="stable")
        with b.inside("aten::sort"):
            copy(b, b.out(), call.inputs[0])
            dims = [a for a in call.inputs[1:] if isinstance(a, int) and not isinstance(a, bool)]
            count = x.shape[dims[0]] if dims and x.shape else 1
            if count <= 4096 and x.elements:
                _counted(b, count, "int64")
                copy(b, b.out(1), b.out(1))
                copy(b, b.out(), b.out())


RULES: dict[str, Rule] = {
    "aten::index_select": _index_select,
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::_index_put_impl_": _index_put,
    "aten::index_put_": _index_put,
    "aten::index_put": _index_put,
    "aten::index_add": _copied_first,
    "aten::index_copy": _copied_first,
    "aten::index_fill": _copied_first,
    "aten::scatter": _copied_first,
    "aten::scatter_add": _copied_first,
    "aten::scatter_reduce": _copied_first,
    "aten::masked_scatter": _copied_first,
    "aten::sort": _sort,
    "aten::index": _index,
    "aten::masked_select": _masked_select,
}
