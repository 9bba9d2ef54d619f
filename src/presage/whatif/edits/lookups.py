"""Lookups: where a step reads rows of an embedding table, and where it writes the table's gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from presage.graph.graph import Graph, Op, Ref, argument, aten, references

BAG, EMBEDDING, SPARSE = "aten::_embedding_bag", "aten::embedding", "aten::_embedding_bag_sparse_backward"
SPARSE_ROWS = "aten::_sparse_coo_tensor_with_dims_and_tensors"
BAG_BACKWARD, ROW_BACKWARD = "aten::_embedding_bag_dense_backward", "aten::embedding_dense_backward"


@dataclass(frozen=True, slots=True)
class TableLookup:
    """One lookup of one table. A bag sums or averages the rows of each sample; without bags all rows are given."""

    place: int  # the op that reads the table
    others: tuple[int, ...]  # ops that are part of it: views of the index, offsets made
    weight: int  # the table
    index: int  # as the user gave it
    offsets: int | None  # of a bag; None: there are no bags
    made: bool  # offsets are made in the lookup: the index has a row for each bag
    results: tuple[int, ...]  # what the op makes, the rows first

    @property
    def places(self) -> tuple[int, ...]:
        return *self.others, self.place


@dataclass(frozen=True, slots=True)
class TableGradient:
    """The gradient of one lookup's table."""

    place: int  # its first op
    others: tuple[int, ...]  # the other ops of it, and what autograd does with the gradient on the host
    unit: tuple[int, ...]  # of these, those that make the gradient
    name: str  # '' where it is of a kind that cannot be joined
    incoming: int  # the gradient of the rows
    gradient: int  # the gradient of the table

    @property
    def then(self) -> int:
        """Its second op, if it has one."""
        return self.unit[min(1, len(self.unit) - 1)]


def lookups(graph: Graph) -> Iterator[TableLookup]:
    """Those that stand alone: plain sums or rows, without weights, padding or scaling."""
    for i, op in enumerate(graph.ops):
        if op.name == BAG and _plain_bag(op):
            yield _bag(graph, i, op)
        elif op.name == "aten::gather" and EMBEDDING in op.within and op.within[-1] == "aten::index_select":
            yield from _rows(graph, i, op)


def _plain_bag(op: Op) -> bool:
    asked = (argument(op, n, p) for n, p in (("scale_grad_by_freq", 3), ("include_last_offset", 7)))
    padding = argument(op, "padding_idx", 8)
    weights = argument(op, "per_sample_weights", 6)
    return not any(asked) and weights is None and padding in (-1, None) and isinstance(op.inputs[2], Ref)


def _bag(graph: Graph, place: int, op: Op) -> TableLookup:
    weight, index, offsets = (a.id for a in op.inputs[:3] if isinstance(a, Ref))
    before = list(_before(graph, place, index, offsets))
    made = any(graph.ops[i].name == "aten::arange" for i in before)
    source = index
    for i in before:
        one = graph.ops[i]
        if made and one.outputs == (index,) and "aten::reshape" in one.within:
            source = next(references(one.inputs), index)
    return TableLookup(place, tuple(sorted(before)), weight, source, offsets, made, op.outputs)


def _before(graph: Graph, place: int, index: int, offsets: int | None) -> Iterator[int]:
    """Ops just before a lookup that make nothing but views of its index, and its offsets."""
    looked = graph.tensors[index].storage
    counted = graph.tensors[offsets].storage if offsets is not None else -1
    for i in range(place - 1, -1, -1):
        op = graph.ops[i]
        made = {graph.tensors[o].storage for o in op.outputs}
        views = made == {looked} and not op.kernels and bool(op.inputs)
        counts = op.within[-1:] == ("aten::arange",) and (made == {counted} or not made)
        if op.thread != graph.ops[place].thread or not (views or counts):
            return
        yield i


def _rows(graph: Graph, place: int, op: Op) -> Iterator[TableLookup]:
    unit = _around(graph, place, op.within.index(EMBEDDING))
    ints = [r for i in unit for r in references(graph.ops[i].inputs) if "int" in graph.tensors[r].dtype]
    weight = next(references(op.inputs))
    if ints:
        before = _before(graph, unit[0], ints[0], None)
        others = sorted({*before, *unit} - {place})
        yield TableLookup(place, tuple(others), weight, ints[0], None, False, op.outputs)


def _around(graph: Graph, place: int, depth: int) -> list[int]:
    """The ops of one `aten::embedding`."""
    op = graph.ops[place]

    def same(i: int) -> bool:
        one = graph.ops[i]
        return one.within[: depth + 1] == op.within[: depth + 1] and (one.module, one.line) == (op.module, op.line)

    first = place
    while first > 0 and same(first - 1) and not _ends(graph, first - 1, depth):
        first -= 1
    after = [place + 1] if place + 1 < len(graph.ops) and same(place + 1) and _ends(graph, place + 1, depth) else []
    return [*range(first, place + 1), *after]


def _ends(graph: Graph, place: int, depth: int) -> bool:
    """Whether an embedding ends with this op: the gather, or a view of its rows where the index has many dimensions."""
    op = graph.ops[place]
    looks = [graph.tensors[r] for r in references(op.inputs)]
    views = op.name == "aten::view" and len(op.within) == depth + 1 and all("int" not in t.dtype for t in looks)
    return views or op.name == "aten::gather"


def backwards(graph: Graph) -> Iterator[tuple[int, TableGradient]]:
    """Gradients of tables, each with autograd's number of its lookup."""
    for i, op in enumerate(graph.ops):
        if op.name in (BAG_BACKWARD, ROW_BACKWARD) and op.outputs:
            unit = [i, *_run(graph, i + 1, partial(_inside, op.name))]
            yield op.sequence, _backward(graph, unit, op, op.name if _unscaled(op) else "")
        elif op.name == SPARSE_ROWS and op.outputs:
            yield op.sequence, _backward(graph, [i], op, "")
        elif op.name == "aten::gather" and SPARSE in op.within and op.outputs:
            first = i
            while first > 0 and SPARSE in graph.ops[first - 1].within and graph.ops[first - 1].sequence == op.sequence:
                first -= 1
            yield op.sequence, _backward(graph, list(range(first, i + 1)), op, SPARSE)


def _inside(name: str, op: Op) -> bool:
    return name in op.within


def _unscaled(op: Op) -> bool:
    return not argument(op, "scale_grad_by_freq") and argument(op, "padding_idx") in (-1, None)


def _backward(graph: Graph, unit: list[int], op: Op, name: str) -> TableGradient:
    gradient = op.outputs[0]
    kept = graph.tensors[gradient].storage
    node = op.within[0] if op.within else ""

    def belongs(o: Op) -> bool:
        there = bool(o.within) and (o.within[0] == node or o.within[0].endswith("AccumulateGrad"))
        touched = {graph.tensors[r].storage for r in references(o.inputs)}
        return there and not o.kernels and touched <= {kept} and not (o.within[0] == node and touched)

    tail = _run(graph, unit[-1] + 1, belongs)
    return TableGradient(unit[0], (*unit[1:], *tail), tuple(unit), name, next(references(op.inputs)), gradient)


def _run(graph: Graph, start: int, belongs: Callable[[Op], bool]) -> list[int]:
    """Places from here on, as long as ops belong."""
    out = []
    for i in range(start, len(graph.ops)):
        if not belongs(graph.ops[i]):
            break
        out.append(i)
    return out


# ---- Lanes: ops over lists of tensors taken apart, and the chains of ops that work on the same memory.

FOREACH, FUSED = "aten::_foreach_", "aten::_fused_"
# What an optimizer's step does on the host alone: count its steps, and read the count.
HOST = set(aten("add_ empty_strided copy_ _local_scalar_dense empty to lift_fresh _foreach_add_"))
LISTED = (FOREACH, FUSED, "aten::_amp_foreach_")
Key: TypeAlias = tuple[int, int]  # a tensor's storage and where in it: flat memory holds many


@dataclass(frozen=True, slots=True)
class OpPart:
    """One tensor's share of an op."""

    operands: tuple[int, ...]
    output: int | None  # where it is new

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.operands if self.output is None else (*self.operands, self.output)


def key(graph: Graph, tensor: int) -> Key:
    t = graph.tensors[tensor]
    return t.storage, t.offset


def lane_count(op: Op) -> int:
    """The number of tensors in the lists of an op that works on lists; 0 for any other."""
    if not op.name.startswith(LISTED):
        return 0
    lists = [a for a in op.inputs if isinstance(a, list)]
    return max((len(a) for a in lists if any(isinstance(x, Ref) for x in a)), default=0)


def split_lanes(graph: Graph, op: Op) -> Iterator[OpPart]:
    """An op, a list's taken apart. A tensor that an op over lists has for all of them is no lane's."""
    count = lane_count(op)
    if not count:
        refs = tuple(references(op.inputs))
        old = {key(graph, r) for r in refs}
        new = [o for o in op.outputs if key(graph, o) not in old]
        yield OpPart(refs, new[0] if new else None)
    for lane in range(count):
        own = [a[lane] if lane < len(a) else a for a in op.inputs if isinstance(a, list)]
        yield OpPart(tuple(references(own)), op.outputs[lane] if lane < len(op.outputs) else None)


def chains(graph: Graph, found: Sequence[OpPart]) -> list[list[OpPart]]:
    """Parts that share memory, each set in order."""
    root: dict[Key, Key] = {}

    def find(one: Key) -> Key:
        while root.setdefault(one, one) != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    for p in found:
        keys = [key(graph, t) for t in p.tensors]
        for other in keys[1:]:
            root[find(other)] = find(keys[0])
    out: dict[Key, list[OpPart]] = defaultdict(list)
    for p in found:
        if p.operands:
            out[find(key(graph, p.operands[0]))].append(p)
    return list(out.values())


def host_ops(graph: Graph) -> dict[int, list[int]]:
    """Ops of the host's alone that an optimizer runs before each op of the GPU's."""
    out: dict[int, list[int]] = {}
    before: list[int] = []
    for i, op in enumerate(graph.ops):
        if op.phase != "optimizer":
            before = []
        elif op.kernels:
            out[i], before = before, []
        elif op.name in HOST and not op.inputs and not op.sync:
            before.append(i)
    return out
