"""The graph of fused kernels: stretches of ops become kernels and the ops that run as they are, in an order that keeps
what waits for what; memory is there from a value's kernel to its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from presage.graph.builder import replace_ops, spans
from presage.graph.graph import Event, Graph, Op, Ref, Storage, Tensor, uses
from presage.whatif.edits.fusing.dataflow import Flow, Piece
from presage.whatif.edits.fusing.grouping import KernelGroup
from presage.whatif.edits.fusing.lower import OUTSIDE

FUNCTIONS = ("random", "erf", "exp")
NAMES = ("inputs", "read_bytes", "written_bytes", "rows", "columns", "down", *FUNCTIONS, "turned")
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}


@dataclass
class ValuePlaces:
    """Where values are: in the storages they had, or in new ones where those are taken by a later value."""

    graph: Graph
    flow: Flow
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    own: dict[int, int] = field(default_factory=dict)  # by value the new storage
    views: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors, self.storages = list(self.graph.tensors), list(self.graph.storages)
        self.stays = _stays(self.flow)

    def storage(self, v: int) -> int:
        while v in self.flow.into:
            v = self.flow.into[v]
        value = self.flow.values[v]
        if value.storage >= 0 and v in self.stays:
            return value.storage
        if v not in self.own:
            self.own[v] = len(self.storages)
            self.storages.append(Storage(self.own[v], value.nbytes, "activation"))
        return self.own[v]

    def whole(self, v: int) -> int:
        """The tensor that is all of a value."""
        value, home = self.flow.values[v], self.storage(v)
        if value.tensor >= 0:
            t = self.graph.tensors[value.tensor]
            return t.id if t.storage == home else self._view(t, home)
        flat = Tensor(-1, home, (value.elements,), (1,), DTYPES[value.width])
        return self._view(flat, home)

    def shaped(self, v: int, shape: tuple[int, int]) -> int:
        """All of a value, as rows."""
        value = self.flow.values[v]
        return self._view(Tensor(-1, -1, shape, (shape[1], 1), DTYPES[value.width]), self.storage(v))

    def view(self, t: Tensor, v: int | None) -> int:
        """A tensor as a view of the storage where its value is; of a copy made for it, the whole."""
        if v is not None and self.flow.values[v].tensor < 0 and self.flow.values[v].elements == t.elements:
            return self._view(replace(t, strides=dense_strides(t), offset=0), self.storage(v))
        home = t.storage if v is None else self.storage(v)
        return t.id if t.storage == home else self._view(t, home)

    def _view(self, t: Tensor, home: int) -> int:
        key = (home, t.shape, t.strides, t.dtype, t.offset)
        if key not in self.views:
            self.views[key] = len(self.tensors)
            self.tensors.append(replace(t, id=self.views[key], storage=home))
        return self.views[key]


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """Strides in the tensor's own order, without holes."""
    out, step = [0] * len(t.shape), 1
    for d in sorted(range(len(t.shape)), key=lambda d: (t.strides[d], -d)):
        out[d] = step
        step *= max(1, t.shape[d])
    return tuple(out)


def _stays(flow: Flow) -> set[int]:
    """Values that stay in their storages: the last of each, those from before, and those that ops outside read."""
    last: dict[int, int] = {}
    made = flow.makers()
    for v, value in enumerate(flow.values):
        if value.storage >= 0:
            last[value.storage] = v
    outside = {v for n in flow.nodes if n.kind == "outside" for v in (*n.reads, *n.writes)}
    return {*last.values(), *outside, *(v for v in range(len(flow.values)) if v not in made)}


def fused_op(
    places: ValuePlaces, group: KernelGroup, found: Sequence[Piece], values_to_write: set[int], like: Op, name: str
) -> Op:
    """The op of one kernel: what it reads from memory, and what it writes because something outside needs it."""
    values = places.flow.values
    reads = {v: 0 for m in group.members for v in found[m].reads if v not in group.writes}
    for m in group.members:
        for v in found[m].reads:
            if v in reads and places.flow.into.get(v) not in group.writes:
                reads[v] = max(reads[v], min(values[v].nbytes, found[m].node.elements * values[v].width))
    writes = [v for m in group.members for v in found[m].writes if v in values_to_write]
    loops = group.loops or group.nodes[0]
    moved = sum(min(values[v].nbytes, _written(group, v) * values[v].width) for v in writes)
    computed = [places.flow.nodes[n] for n in {n for m in group.members for n in found[m].inside}]
    functions = [sum(n.elements for n in computed if n.function == f) for f in FUNCTIONS]
    numbers = (
        sum(reads.values()),
        moved,
        loops.rows,
        loops.columns,
        loops.down,
        *functions,
        any(n.turned for n in computed),
    )
    refs: list[Any] = [Ref(places.whole(v)) for v in reads]
    return replace(
        like, name=name, overload="", inputs=(refs, *numbers), names=NAMES, writes=(), kernels=True, sync=False,
        outputs=tuple(dict.fromkeys(places.whole(v) for v in writes)),
    )  # fmt: skip


def values_to_write(
    together: Sequence[KernelGroup], mine: Sequence[Piece], others: Sequence[Piece], lasting: set[int]
) -> list[set[int]]:
    """By group the values it has to write: others read them, or they outlast the step."""
    readers: dict[int, set[int]] = {}
    for g, group in enumerate(together):
        for m in group.members:
            for v in mine[m].reads:
                readers.setdefault(v, set()).add(g)
    beyond = lasting.union(v for p in others for v in p.reads)
    return [{v for v in group.writes if v in beyond or readers.get(v, set()) - {g}} for g, group in enumerate(together)]


def _written(group: KernelGroup, v: int) -> int:
    """Elements of a value that a kernel writes."""
    return next((n.elements for n in group.nodes if v in n.writes and n.kind == "scatter"), 1 << 62)


def topological_order(found: Sequence[KernelGroup], makers: Mapping[int, int]) -> list[int]:
    """Groups by their first piece, each after those that it waits for."""
    out: list[int] = []
    state = [0] * len(found)
    for start in sorted(range(len(found)), key=lambda g: found[g].members[0]):
        stack = [start]
        while stack:
            g = stack[-1]
            waits = [makers[v] for v in found[g].reads if v in makers and makers[v] != g] if not state[g] else []
            state[g] = max(state[g], 1)
            open_ = [w for w in sorted(set(waits), reverse=True) if not state[w]]
            if open_:
                stack += open_
                continue
            stack.pop()
            if state[g] == 1:
                state[g] = 2
                out.append(g)
    return out


@dataclass
class _Made:
    """New ops, each with the place of the op it was, and where old places are now."""

    ops: list[Op] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)  # by old place the new one, of ops that are still there
    at: list[int] = field(default_factory=list)  # by old place the new place that comes next


def rebuild_graph(
    graph: Graph, places: ValuePlaces, stretch: Sequence[int], made: Mapping[int, list[tuple[Op, int]]]
) -> Graph:
    """The graph with the ops of each stretch (`made`: with the places they were at, -1 for none) in place of its own.

    Ops outside that stand in the midst of a stretch come after it.
    """
    new = _Made()
    waiting: list[int] = []
    begun, ends = OUTSIDE, {k: i for i, k in enumerate(stretch)}
    for i in range(len(graph.ops) + 1):
        here = stretch[i] if i < len(graph.ops) else OUTSIDE
        new.at.append(len(new.ops))
        if here != OUTSIDE and here != begun:
            _flush(new, graph, waiting)
            begun = here
            for op, old in made[here]:
                new.kept[old] = len(new.ops)
                new.ops.append(op)
        if here == OUTSIDE and i < len(graph.ops):
            waiting.append(i)
            if begun == OUTSIDE or i > ends[begun]:
                _flush(new, graph, waiting)
    _flush(new, graph, waiting)
    ops = tuple(new.ops)
    changed = replace(graph, ops=ops, tensors=tuple(places.tensors), storages=tuple(places.storages), events=())
    events = _events(graph, changed, new, stretch)
    lives = {e.storage for e in events if e.allocates}
    gone = {e.storage for e in graph.events if e.allocates and e.storage not in lives}
    return replace_ops(replace(changed, events=events), {}, dropped=gone)


def _flush(new: _Made, graph: Graph, waiting: list[int]) -> None:
    for i in waiting:
        new.kept[i] = len(new.ops)
        new.ops.append(graph.ops[i])
    waiting.clear()


def _events(old: Graph, new: Graph, made: _Made, stretch: Sequence[int]) -> tuple[Event, ...]:
    first, last = spans(new)
    named, beyond = set[int](), set[int]()
    for i, op in enumerate(old.ops):
        named |= uses(old, op)
        if stretch[i] == OUTSIDE:
            beyond |= uses(old, op)
    begins = {e.storage: e.op for e in old.events if e.allocates}
    ends = {e.storage: e.op for e in old.events if not e.allocates}
    out: list[Event] = []
    begin: int | None
    end: int | None
    for s in new.storages:
        if s.id >= len(old.storages):
            begin, end = first.get(s.id), last.get(s.id, -1) + 1
        elif s.id not in named:
            begin, end = _scratch(made, begins.get(s.id), ends.get(s.id))
        else:
            begin = first.get(s.id) if s.id in begins else None
            end = _end(made, ends.get(s.id), last.get(s.id, -1), s.id in beyond or s.id not in begins)
        lives = s.id in first or s.id not in begins or s.id not in named
        if begin is not None and lives:
            out.append(Event(begin, s.id, True))
        if end is not None and lives and (begin is not None or s.id not in begins):
            out.append(Event(end, s.id, False))
    return tuple(sorted(out, key=lambda e: (e.op, e.allocates)))


def _scratch(made: _Made, begin: int | None, end: int | None) -> tuple[int | None, int | None]:
    """Memory that an op takes for itself goes where the op goes."""
    if begin is None:
        return None, made.at[end] if end is not None else None
    place = made.kept.get(begin)
    return (None, None) if place is None else (place, place + 1 if end is not None else None)


def _end(made: _Made, end: int | None, last: int, beyond: bool) -> int | None:
    if end is None:
        return None
    return max(last + 1, made.at[end]) if beyond else last + 1
