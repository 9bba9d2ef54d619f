"""The ops of one lookup over joined tables, forward and backward, as PyTorch runs them.

Rows of a table are found at the rows of all tables before it: each index has a number added. Indices that lie in one
tensor take one addition; separate ones take one each and are then put together, and so do offsets of bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from msgspec.structs import replace

from presage.graph.graph import Arg, Graph, Op, Ref, Tensor
from presage.graph.lists import is_dense
from presage.whatif.edits.lookups import BAG_BACKWARD, ROW_BACKWARD, TableGradient, TableLookup
from presage.whatif.edits.op_writer import OpWriter

SMALL_LOOKUP = 3072  # up to so many rows an embedding's gradient needs no sort
ENGINE = "autograd::engine::evaluate_function: "
_ADD, _VIEW, _CAT = ("self", "other", "alpha"), ("self", "size"), ("tensors", "dim")


@dataclass(frozen=True)
class JoinedLookup:
    """Lookups that become one."""

    graph: Graph  # before
    lookups: tuple[TableLookup, ...]  # in the order of their rows
    kept: TableLookup  # the one whose table grows
    rows: int  # of all tables

    @property
    def first(self) -> Op:
        return self.graph.ops[self.lookups[0].place]

    @property
    def sequences(self) -> tuple[int, int, int]:
        """Autograd's numbers of the lookup, of the view of its rows, and of what takes them apart."""
        found = sorted(self.graph.ops[x.place].sequence for x in self.lookups)
        return found[0], found[1], found[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows that each lookup gives, the same for all."""
        width = self.graph.tensors[self.kept.weight].shape[1]
        if self.kept.offsets is not None:
            return self.graph.tensors[self.kept.results[0]].shape
        return (*self.graph.tensors[self.kept.index].shape, width)


# ---- forward


def write_forward(writer: OpWriter, one: JoinedLookup, place: int, module: str) -> tuple[Ref, Ref | None]:
    """The joined lookup; returns its index and offsets."""
    bag = one.kept.offsets is not None
    name = "aten::embedding_bag" if bag else "aten::embedding"
    outside = one.first.within[: one.first.within.index(name)] if name in one.first.within else ()
    outer = replace(one.first, module=module, within=outside)
    writer.at(place, outer)
    index = _index(writer, one, outside)
    offsets = _offsets(writer, one, outside) if bag and not one.kept.made else None
    writer.at(place, one.first)
    if bag:
        index, offsets = _bag(writer, one, index, offsets, outside)
    else:
        _rows(writer, one, index)
    _taken_apart(writer, one, place, outer)
    return index, offsets


def _index(writer: OpWriter, one: JoinedLookup, within: Sequence[str]) -> Ref:
    found = [one.graph.tensors[x.index] for x in one.lookups]
    step = _step(found)
    if step:
        return _added_at_once(writer, one, found[0], step, within)
    return _added(writer, [Ref(x.index) for x in one.lookups], "first", within)


def _step(tensors: Sequence[Tensor]) -> int:
    """Elements between tensors that are slices of one, in order; 0 if they are not."""
    first = tensors[0]
    alike = {(t.storage, t.dtype, t.shape, t.strides) for t in tensors}
    steps = {b.offset - a.offset for a, b in pairwise(tensors)}
    return steps.pop() if len(alike) == 1 and len(steps) == 1 and min(steps) > 0 and first.elements else 0


def _added_at_once(writer: OpWriter, one: JoinedLookup, first: Tensor, step: int, within: Sequence[str]) -> Ref:
    count = len(one.lookups)
    shape, strides = (count, *first.shape), (step, *first.strides)
    whole = writer.view(first.id, shape, strides, first.offset)
    if step < max(first.strides, default=0):
        writer.op("as_strided", [Ref(first.id)], [whole], within=[*within, "aten::t", "aten::transpose"], kernels=False)
    starts = writer.buffer(count, first.dtype, "first")
    for dims in range(len(first.shape)):
        flat = starts
        starts = writer.view(flat, (count, *(1,) * (dims + 1)))
        writer.op("as_strided", [flat], [starts], within=[*within, "aten::unsqueeze"], kernels=False)
    added = writer.new(shape, first.dtype, strides if is_dense(writer.get(whole)) else None, kept=True)
    writer.op("add", [whole, starts, 1], [added], overload="Tensor", names=_ADD, within=within)
    return _flattened(writer, added, (count * first.shape[0], *first.shape[1:]), within)


def _flattened(writer: OpWriter, tensor: Ref, shape: tuple[int, ...], within: Sequence[str]) -> Ref:
    t = writer.get(tensor)
    if t.is_contiguous:
        flat = writer.view(tensor, shape)
        writer.op("view", [tensor, list(shape)], [flat], names=_VIEW, within=within, kernels=False)
        return flat
    inside = [*within, "aten::reshape", "aten::clone"]
    writer.op("empty_like", [tensor], within=inside, kernels=False)
    copied = writer.new(t.shape, t.dtype, kept=True)
    names = ("self", "src", "non_blocking")
    writer.op("copy_", [copied, tensor, False], [copied], names=names, writes=[copied], within=inside)
    flat = writer.view(copied, shape)
    writer.op("_unsafe_view", [copied, list(shape)], [flat], names=_VIEW, within=inside[:-1], kernels=False)
    return flat


def _added(writer: OpWriter, tensors: Sequence[Ref], name: str, within: Sequence[str]) -> Ref:
    """Each with its number added, then put together."""
    like = writer.get(tensors[0])
    starts = writer.buffer(len(tensors), like.dtype, name)
    numbers = [writer.view(starts, (), offset=i) for i in range(len(tensors))]
    for number in numbers:
        writer.op("as_strided", [starts], [number], within=[*within, "aten::unbind", "aten::select"], kernels=False)
    sums = []
    for t, number in zip(tensors, numbers, strict=True):
        sums.append(writer.new(writer.get(t).shape, like.dtype, kept=True))
        writer.op("add", [t, number, 1], [sums[-1]], overload="Tensor", names=_ADD, within=within)
    out = writer.new((sum(writer.get(t).shape[0] for t in tensors), *like.shape[1:]), like.dtype, kept=True)
    writer.op("cat", [list(sums), 0], [out], names=_CAT, within=within)
    return out


def _offsets(writer: OpWriter, one: JoinedLookup, within: Sequence[str]) -> Ref:
    return _added(writer, [Ref(x.offsets) for x in one.lookups if x.offsets is not None], "ends", within)


def _bag(
    writer: OpWriter, one: JoinedLookup, index: Ref, offsets: Ref | None, outside: Sequence[str]
) -> tuple[Ref, Ref]:
    if offsets is None:
        kind = writer.get(one.kept.offsets or 0)
        offsets = writer.new((writer.get(one.kept.results[0]).shape[0],), kind.dtype, kept=True)
        inside = [*outside, "aten::arange"]
        writer.host("empty", inside)
        names = ("start", "end", "step", "out")
        writer.op(
            "arange", [0, 0, 1, writer.view(offsets, (0,))], [offsets], overload="start_out", names=names, within=inside
        )
        flat = writer.view(index, (writer.get(index).elements,))
        writer.op("view", [index, [-1]], [flat], names=_VIEW, within=[*outside, "aten::reshape"], kernels=False)
        index = flat
    op = one.graph.ops[one.kept.place]
    inputs = [op.inputs[0], index, offsets, *op.inputs[3:]]
    _with_facts(writer, one, index)
    writer.op(op.name, inputs, [Ref(r) for r in one.kept.results], names=op.names, within=one.first.within)
    return index, offsets


def _with_facts(writer: OpWriter, one: JoinedLookup, index: Ref) -> None:
    """Distinct rows add up; the most frequent one is as frequent as it was."""
    looked = [_known(one.graph, x) for x in one.lookups]
    known = [k for k in looked if k is not None]
    if len(known) == len(looked):
        writer.facts[index.id] = sum(k[0] for k in known), max(k[1] for k in known)


def _known(graph: Graph, one: TableLookup) -> tuple[int, int] | None:
    """What is known of a lookup's index, under whichever view of it."""
    t = graph.tensors[one.index]
    same = [i for i in graph.facts if (graph.tensors[i].storage, graph.tensors[i].offset) == (t.storage, t.offset)]
    nearest = min(same, key=lambda i: (graph.tensors[i].elements != t.elements, i), default=None)
    return graph.facts[nearest] if nearest is not None else None


def _rows(writer: OpWriter, one: JoinedLookup, index: Ref) -> None:
    op = one.graph.ops[one.kept.place]
    inside = one.first.within
    many = len(writer.get(index).shape) > 1
    _with_facts(writer, one, index)
    if many:
        writer.op("view", [index], within=[*inside[:-1], "aten::reshape"], kernels=False)
    _gathered(writer, op.inputs[0], index, Ref(one.kept.results[0]), inside)
    if many:
        writer.op("view", [Ref(one.kept.results[0])], within=inside[:-1], kernels=False)


def _gathered(writer: OpWriter, table: Arg, index: Ref, out: Ref, inside: Sequence[str]) -> None:
    for name in ("empty", "resize_", "view"):
        writer.host(name, inside)
    writer.op("as_strided", [index], within=[*inside, "aten::expand"], kernels=False)
    shape = writer.get(out).shape
    wide = writer.view(index, shape, (1, 0))
    writer.copy_facts(index.id, wide.id)
    names = ("self", "dim", "index", "sparse_grad", "out")
    inputs: list[Arg] = [table, 0, wide, False, out]
    writer.op("gather", inputs, [out], overload="out", names=names, writes=[out], within=inside)


def _taken_apart(writer: OpWriter, one: JoinedLookup, place: int, outer: Op) -> None:
    """The rows of each table again, as views."""
    _, seen, apart = one.sequences
    out, shape, count = Ref(one.kept.results[0]), one.shape, len(one.lookups)
    whole = writer.view(out, (count, *shape))
    writer.at(place, replace(outer, sequence=seen))
    size = [count, *shape[:-1], -1]
    writer.op("view", [out, list(size)], [whole], names=_VIEW, within=outer.within, kernels=False)
    writer.at(place, replace(outer, sequence=apart))
    for k in range(count):
        part = writer.view(out, shape, offset=k * prod(shape))
        inside = [*outer.within, "aten::unbind", "aten::select"]
        writer.op("as_strided", [whole], [part], within=inside, kernels=False)


# ---- backward


def write_backward(
    writer: OpWriter, one: JoinedLookup, backs: Sequence[TableGradient], kept: TableGradient, index: Ref, module: str
) -> None:
    """The gradient of the joined table, in place of that of the table that grows."""
    op = one.graph.ops[kept.unit[-1] if kept.name.endswith("sparse_backward") else kept.place]
    node = next((i for i, name in enumerate(op.within) if "Embedding" in name), 0)
    grad = _put_together(writer, one, backs, kept.place, op, op.within[:node], module)
    lookup, _, _ = one.sequences
    writer.at(kept.then, replace(op, module=one.first.module, sequence=lookup))
    writer.free_after(writer.get(grad).storage, kept.then)
    if kept.name == BAG_BACKWARD:
        writer.op(
            op.name,
            [grad, index, *op.inputs[2:5], one.rows, *op.inputs[6:]],
            [Ref(kept.gradient)],
            names=op.names,
            within=op.within,
        )
    elif kept.name == ROW_BACKWARD:
        writer.op(
            op.name, [grad, index, one.rows, *op.inputs[3:]], [Ref(kept.gradient)], names=op.names, within=op.within
        )
        writer.op("view", [grad], within=[*op.within, op.name], kernels=False)
    else:
        bags = Ref(one.kept.results[1])
        _gathered(writer, grad, bags, Ref(kept.gradient), op.within)
        return
    plain = kept.name == ROW_BACKWARD and writer.get(index).elements <= SMALL_LOOKUP
    most = kept.name == BAG_BACKWARD and op.inputs[7] == 2
    _summed(writer, index, Ref(kept.gradient), [*op.within, op.name], sort=not (plain or most))


def _put_together(
    writer: OpWriter,
    one: JoinedLookup,
    backs: Sequence[TableGradient],
    place: int,
    op: Op,
    outside: Sequence[str],
    module: str,
) -> Ref:
    """Gradients of all tables' rows in one tensor."""
    _, seen, apart = one.sequences
    inside = [*outside, f"{ENGINE}UnbindBackward0", "UnbindBackward0", "aten::stack"]
    grads = [Ref(b.incoming) for b in backs]
    first = writer.get(grads[0])
    writer.at(place, replace(op, module=module, sequence=apart))
    stacked = writer.new((len(grads), *first.shape), first.dtype)
    writer.op("cat", [list(grads), 0], [stacked], names=_CAT, within=inside)
    writer.op("view", [stacked], [stacked], within=inside, kernels=False)
    writer.at(place, replace(op, module=module, sequence=seen))
    inside = [*outside, f"{ENGINE}ViewBackward0", "ViewBackward0", "aten::reshape"]
    shape = (len(grads) * prod(first.shape[:-1]), first.shape[-1])
    flat = writer.view(stacked, shape)
    writer.op("view", [stacked, list(shape)], [flat], names=_VIEW, within=inside, kernels=False)
    return flat


def _summed(writer: OpWriter, index: Ref, out: Ref, inside: Sequence[str], sort: bool) -> None:
    """What a table's gradient takes: memory for a sort and its segments, and the gradient cleared."""
    t, count = writer.get(out), writer.get(index).elements
    kind = writer.get(index).dtype
    if sort:
        for _ in range(2):
            _scratch(writer, count, kind, [*inside, "aten::empty_like"])
        writer.host("empty", [*inside, "aten::arange"])
        numbers = writer.new((count,), kind)
        names = ("start", "end", "step", "out")
        inputs: list[Arg] = [0, count, 1, writer.view(numbers, (0,))]
        writer.op("arange", inputs, [numbers], overload="start_out", names=names, within=[*inside, "aten::arange"])
    writer.host("empty", [*inside, "aten::zeros"])
    zeroed = [*inside, "aten::zeros", "aten::zero_"]
    writer.op("fill_", [out, 0], [out], overload="Scalar", names=("self", "value"), writes=[out], within=zeroed)
    if sort:
        segments = min(count, t.shape[0])
        parts = segments + count // 10  # a segment of more than 10 rows is summed in parts
        for size in (count, 1, segments, segments, 1, parts):
            _scratch(writer, size, kind, inside)
        _scratch(writer, parts * (-(-t.shape[-1] // 32) * 32), "float32", inside)


def _scratch(writer: OpWriter, size: int, dtype: str, within: Sequence[str]) -> None:
    writer.op("empty", [[size]], [writer.new((size,), dtype)], within=within, kernels=False)
