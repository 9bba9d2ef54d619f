"""Embedding tables joined: lookups of many tables become one lookup of one table that holds all their rows.

What is joined is alike: rows of one length and dtype, read in one way, updated by one optimizer. One of the tables (the
one whose gradient is made last) grows to hold all rows, with its gradient and its optimizer's state; the others go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from msgspec.structs import replace

from presage.capture.variants import NotApplicable
from presage.graph.builder import map_tensors
from presage.graph.graph import Event, Graph, Op, Ref, Tensor, argument, references
from presage.whatif.edits.edit import plain
from presage.whatif.edits.joined_lookup import JoinedLookup, write_backward, write_forward
from presage.whatif.edits.lookups import (
    TableGradient,
    TableLookup,
    backwards,
    chains,
    host_ops,
    lane_count,
    lookups,
    split_lanes,
)
from presage.whatif.edits.op_writer import OpWriter


@dataclass(frozen=True)
class JoinableTable:
    """A table with all that is its own."""

    weight: Tensor
    memory: frozenset[int]  # storages: the table, its gradient, its state, what its update makes on the way
    lookups: tuple[TableLookup, ...]  # more than one where a step has several forward passes
    backwards: tuple[TableGradient, ...]
    before: int | None  # the gradient that the step before left

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


def table_batched(graph: Graph) -> Graph:
    """One lookup for all tables that are alike, forward, backward and in the optimizer."""
    before = graph
    while group := next((g for g in _groups(graph) if len(g) > 1), None):
        graph = _joined(graph, group)
    if graph is before:
        raise NotApplicable("no two embedding tables with rows of one length that are looked up in one way")
    return graph


# ---- which tables


def _groups(graph: Graph) -> list[list[JoinableTable]]:
    """Tables that are alike, in the order of their lookups."""
    found: dict[tuple[object, ...], list[JoinableTable]] = defaultdict(list)
    for table in _tables(graph):
        found[_kind(graph, table)].append(table)
    return [_in_time(graph, group) for group in found.values()]


def _tables(graph: Graph) -> Iterator[JoinableTable]:
    """Tables with all of their own, that nothing but lookups and updates works on."""
    read: dict[int, list[TableLookup]] = defaultdict(list)
    for one in lookups(graph):
        read[graph.tensors[one.weight].storage].append(one)
    written = dict(backwards(graph))
    memory = _memory(graph)
    for storage, found in read.items():
        weight = graph.tensors[found[0].weight]
        own = memory.get(storage, frozenset({storage}))
        numbers = [graph.ops[x.place].sequence for x in found]
        backs = tuple(written[n] for n in numbers if n in written)
        table = JoinableTable(weight, own, tuple(found), backs, _left_before(graph, storage, own))
        whole = weight.is_contiguous and weight.nbytes == graph.storages[storage].nbytes and len(weight.shape) == 2
        if whole and len({x.weight for x in found}) == 1 and _complete(graph, table) and _alone(graph, table):
            yield table


def _complete(graph: Graph, table: JoinableTable) -> bool:
    """Whether each lookup has its gradient, or none has, and no index is taken for memory of the table's own."""
    looked = {graph.tensors[i].storage for x in table.lookups for i in (x.index, x.offsets) if i is not None}
    if looked & table.memory or not all(b.name for b in table.backwards):
        return False
    made = {graph.tensors[b.gradient].storage for b in table.backwards}
    forward = [x for x in table.lookups if graph.ops[x.place].thread == "main"]
    updated = len(table.memory) > 1
    return len(table.backwards) == len(forward) and made <= table.memory if table.backwards else not updated


def _memory(graph: Graph) -> dict[int, frozenset[int]]:
    """By parameter, the storages that belong to it: those that its update works on."""
    found = [p for op in graph.ops if _updates(op) for p in split_lanes(graph, op)]
    out: dict[int, frozenset[int]] = {}
    shared: set[int] = set()
    seen: set[int] = set()
    for chain in chains(graph, found):
        storages = frozenset(graph.tensors[i].storage for p in chain for i in p.tensors)
        owners = [s for s in storages if graph.storages[s].role == "parameter"]
        shared |= storages & seen
        seen |= storages
        if len(owners) == 1:
            out[owners[0]] = storages
    return {owner: storages for owner, storages in out.items() if not storages & shared}


def _updates(op: Op) -> bool:
    accumulates = bool(op.within) and op.within[0].endswith("AccumulateGrad")
    return op.kernels and (op.phase == "optimizer" or accumulates or lane_count(op) > 0)


def _left_before(graph: Graph, storage: int, own: frozenset[int]) -> int | None:
    """The gradient that the step before left and this one frees: of the table's name and its gradient's size."""
    made = {e.storage for e in graph.events if e.allocates}
    s = graph.storages[storage]
    sizes = {graph.storages[g].nbytes for g in own if graph.storages[g].role == "gradient"}
    found = [g for g in graph.storages if g.role == "gradient" and g.id not in made and g.id not in own]
    return next((g.id for g in found if g.nbytes in sizes and (g.name, g.module) == (s.name, s.module)), None)


def _alone(graph: Graph, table: JoinableTable) -> bool:
    """Whether all other ops that touch the table's memory touch nothing else, or lists."""
    own = {p for x in table.lookups for p in x.places} | {p for b in table.backwards for p in (b.place, *b.others)}
    for i, op in enumerate(graph.ops):
        touched = {graph.tensors[r].storage for r in references(op.inputs)}
        if i in own or not touched & table.memory or lane_count(op):
            continue
        listed = {graph.tensors[r].storage for a in op.inputs if isinstance(a, list) for r in references(a)}
        single = {graph.tensors[r].storage for a in op.inputs if isinstance(a, Ref) for r in references([a])}
        if single & table.memory and not single <= table.memory:
            return False
        if any(graph.storages[s].role == "parameter" for s in listed & table.memory) or op.phase == "forward":
            return False
    return True


def _kind(graph: Graph, table: JoinableTable) -> tuple[object, ...]:
    """The same for tables that can be one."""
    one = table.lookups[0]
    op, index = graph.ops[one.place], graph.tensors[one.index]
    mode = (op.name, argument(op, "mode", 4), argument(op, "sparse", 5)) if one.offsets is not None else (op.name,)
    state = sorted(graph.storages[s].name for s in table.memory if graph.storages[s].role == "optimizer")
    places = tuple((graph.ops[x.place].phase, graph.ops[x.place].thread) for x in table.lookups)
    names = tuple(b.name for b in table.backwards)
    bags = (one.made, index.shape[1:], index.dtype, tuple(graph.tensors[x.results[0]].shape for x in table.lookups))
    return (mode, table.weight.shape[1], table.weight.dtype, bags, tuple(state), places, names, table.before is None)


def _in_time(graph: Graph, group: Sequence[JoinableTable]) -> list[JoinableTable]:
    """Those of a group whose indices are there when all are looked up, in all passes."""
    kept = list(group)
    for k in range(len(group[0].lookups)):
        if len(kept) > 1 and _place(graph, [t.lookups[k] for t in kept]) is None:
            first = min(t.lookups[k].place for t in kept)
            kept = [t for t in kept if _ready(graph, t.lookups[k]) < first]
    return kept


def _place(graph: Graph, found: Sequence[TableLookup]) -> int | None:
    """Where all can be looked up: with the first, where indices are there by then, or else with the last."""
    first, last = min(x.place for x in found), max(x.place for x in found)
    if all(_ready(graph, x) < first for x in found):
        return first
    outs = {graph.tensors[x.results[0]].storage for x in found}
    own = {p for x in found for p in x.places}
    used = (i for i in range(first, last) if i not in own)
    early = any(outs & {graph.tensors[r].storage for r in references(graph.ops[i].inputs)} for i in used)
    return None if early else last


def _ready(graph: Graph, one: TableLookup) -> int:
    """The last op before a lookup that works on what it looks up."""
    wanted = {graph.tensors[one.index].storage}
    if one.offsets is not None and not one.made:
        wanted.add(graph.tensors[one.offsets].storage)
    for i in range(one.place - 1, -1, -1):
        op = graph.ops[i]
        made = {graph.tensors[o].storage for o in (*op.outputs, *op.writes)}
        if op.kernels and i not in one.others and made & wanted:
            return i
    return -1


# ---- the join


@dataclass
class _Join:
    """A join under way."""

    graph: Graph
    group: Sequence[JoinableTable]
    kept: JoinableTable
    removed: set[int] = field(default_factory=set)
    gone: frozenset[int] = frozenset()
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # storages of rows: where they are now


def _joined(graph: Graph, group: Sequence[JoinableTable]) -> Graph:
    kept = max(group, key=lambda t: (t.backwards or t.lookups)[-1].place)
    join = _Join(graph, group, kept)
    others = [t for t in group if t is not kept]
    join.gone = frozenset(s for t in others for s in t.memory)
    writer = OpWriter(graph)
    _grow(writer, group, kept)
    _write(writer, join)
    _rest(writer, join)
    standing = {s.id for s in graph.storages} - {e.storage for e in graph.events if e.allocates}
    before = {t.before for t in others if t.before is not None}
    return writer.done(join.removed, (join.gone & standing) | before)


def _write(writer: OpWriter, join: _Join) -> None:
    """All passes of the joined lookup."""
    graph, kept = join.graph, join.kept
    rows = sum(t.rows for t in join.group)
    module = _around(graph, kept.lookups[0])
    for k, own in enumerate(kept.lookups):
        found = tuple(t.lookups[k] for t in join.group)
        one = JoinedLookup(graph, found, own, rows)
        place = _place(graph, found)
        assert place is not None
        index, offsets = write_forward(writer, one, place, module)
        for i, x in enumerate(found):
            whole = graph.tensors[own.results[0]].storage
            join.parts[graph.tensors[x.results[0]].storage] = whole, i * prod(one.shape)
        join.removed |= {p for x in found for p in x.places}
        if k < len(kept.backwards):
            backs = [t.backwards[k] for t in join.group]
            last = kept.backwards[k]
            write_backward(writer, one, backs, last, index, module)
            for ref in (index, offsets) if offsets is not None else (index,):
                writer.free_after(writer.get(ref).storage, last.then)
            join.removed |= {p for b in backs for p in (b.place, *(b.others if b is not last else b.unit))}


def _around(graph: Graph, one: TableLookup) -> str:
    """The module that calls the tables: the nearest one above that runs ops of its own."""
    modules = {op.module for op in graph.ops if op.phase == "forward"}
    name = graph.ops[one.place].module
    while name and ((name := name.rpartition(".")[0]) not in modules):
        pass
    return name


def _grow(writer: OpWriter, group: Sequence[JoinableTable], kept: JoinableTable) -> None:
    """One table gets the rows of all; its gradient, state and results grow with it."""
    rows = sum(t.rows for t in group)
    graph, tensors, sizes = writer.source, writer.tensors, dict[int, int]()
    counted: dict[int, int] = {}
    for k, own in enumerate(kept.lookups):
        found = [t.lookups[k] for t in group]
        counts = [graph.tensors[x.index].elements for x in found]
        for place, tensor in enumerate(own.results):
            t = graph.tensors[tensor]
            total = sum(graph.tensors[x.results[place]].shape[0] for x in found) if t.shape[0] else 0
            tensors[tensor] = replace(t, shape=(total, *t.shape[1:]))
            sizes[t.storage] = tensors[tensor].nbytes
        counted[graph.tensors[own.index].elements] = sum(counts)
    sparse = {t.storage for t in graph.tensors if t.storage in kept.memory and len(t.strides) < len(t.shape)}
    for t in graph.tensors:
        strided = len(t.strides) == len(t.shape)
        first = counted if strided and t.storage in sparse else {kept.rows: rows}
        if t.storage in kept.memory and t.shape and t.shape[0] in first:
            tensors[t.id] = replace(t, shape=(first[t.shape[0]], *t.shape[1:]))
            if strided and t.nbytes == graph.storages[t.storage].nbytes:
                sizes[t.storage] = tensors[t.id].nbytes
    if kept.before is not None:
        gradient = next(s for s in kept.memory if graph.storages[s].role == "gradient")
        sizes[kept.before] = sizes.get(gradient, graph.storages[gradient].nbytes)
    for storage, nbytes in sizes.items():
        writer.resize(storage, nbytes)
    writer.events = _held(graph, group, kept)


def _held(graph: Graph, group: Sequence[JoinableTable], kept: JoinableTable) -> list[Event]:
    """Rows live until the last of the tables' rows would have gone; their gradients until they are put together."""
    last = {e.storage: e.op for e in graph.events if not e.allocates}
    until: dict[int, int] = {}
    for k, own in enumerate(kept.lookups):
        outs = [graph.tensors[t.lookups[k].results[0]].storage for t in group]
        until[graph.tensors[own.results[0]].storage] = max(last.get(s, len(graph.ops)) for s in outs)
    for k, back in enumerate(kept.backwards):
        for s in {graph.tensors[t.backwards[k].incoming].storage for t in group}:
            if back.place < last.get(s, -1) <= back.unit[-1] + 1:
                until[s] = back.then
    moved = [e if e.allocates else replace(e, op=until.get(e.storage, e.op)) for e in graph.events]
    return sorted(moved, key=lambda e: (e.op, e.allocates))


# ---- all other ops


def _rest(writer: OpWriter, join: _Join) -> None:
    """Ops on what was joined: those of tables that are gone go, lists get shorter, rows are where they are now."""
    graph = join.graph
    before = host_ops(graph)
    touched, known = join.gone | set(join.parts), dict[int, int]()
    for i, op in enumerate(graph.ops):
        used = {graph.tensors[r].storage for r in (*references(op.inputs), *op.outputs)}
        if i in join.removed or not used & touched:
            continue
        lanes = lane_count(op)
        short = _shorter(graph, op, join.gone)
        singles = {graph.tensors[r].storage for a in short.inputs if isinstance(a, Ref) for r in (a.id,)}
        if singles & join.gone or (lanes and not lane_count(short)):
            join.removed |= {i, *before.get(i, ())}
            continue
        if lanes:
            join.removed |= set(_fewer(graph, before.get(i, ()), lanes, lane_count(short)))
        writer.written[i] = [_moved(writer, short, join.parts, known)]


def _shorter(graph: Graph, op: Op, gone: Collection[int]) -> Op:
    """The op without the lanes of tables that are gone."""
    lanes = lane_count(op)
    lists = [a for a in op.inputs if isinstance(a, list)]
    out = {
        j for a in lists for j, x in enumerate(a) if isinstance(x, Ref) and graph.tensors[x.id].storage in gone
    }  # fmt: skip
    if not out:
        return op
    if not lanes:  # a list of some other op: what is gone in it goes
        inputs = tuple([x for x in a if not _is_gone(graph, x, gone)] if isinstance(a, list) else a for a in op.inputs)
        return replace(op, inputs=inputs)
    inputs = tuple(
        [x for j, x in enumerate(a) if j not in out] if isinstance(a, list) and len(a) == lanes else a
        for a in op.inputs
    )
    outputs = tuple(o for j, o in enumerate(op.outputs) if j not in out) if len(op.outputs) == lanes else op.outputs
    writes = tuple(w for w in op.writes if graph.tensors[w].storage not in gone)
    return replace(op, inputs=inputs, outputs=outputs, writes=writes)


def _is_gone(graph: Graph, value: object, gone: Collection[int]) -> bool:
    return isinstance(value, Ref) and graph.tensors[value.id].storage in gone


def _fewer(graph: Graph, hosts: Sequence[int], lanes: int, left: int) -> Iterator[int]:
    """Host ops that go with the lanes of a list: of each kind that comes as often as there are lanes, or a multiple."""
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in hosts:
        op = graph.ops[i]
        kinds[op.name, op.within].append(i)
    for places in kinds.values():
        if len(places) % lanes == 0:
            yield from places[len(places) // lanes * left :]


def _moved(writer: OpWriter, op: Op, parts: Mapping[int, tuple[int, int]], known: dict[int, int]) -> Op:
    """The op with rows of a table as a part of all rows."""

    def new(tensor: int) -> int:
        t = writer.source.tensors[tensor]
        if t.storage not in parts:
            return tensor
        storage, offset = parts[t.storage]
        if tensor not in known:
            known[tensor] = writer.add_tensor(storage, t.shape, t.dtype, t.offset + offset, t.strides)
        return known[tensor]

    return map_tensors(op, new)


EDITS = (
    plain(
        "table_batched",
        "Embedding tables with rows of one length, looked up alike, become one table: one lookup, one gradient and "
        "one parameter for the optimizer instead of many. Indices get the rows of the tables before theirs added, in "
        "one addition where they lie in one tensor, else one each; as a plain joined embedding of PyTorch's runs.",
        table_batched,
        caution="the tables become one parameter: checkpoints and what is set table by table change",
    ),
)
