"""The graph of fused kernels: regions of ops become kernels and the ops that run as they are, in an order that keeps
what waits for what; memory is there from a value's kernel to its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from presage.fusing.dataflow import Flow, Piece
from presage.fusing.grouping import KernelGroup
from presage.fusing.lower import OUTSIDE
from presage.graph.builder import GraphBuilder
from presage.graph.graph import Graph, Op, Ref, Tensor, uses

FUNCTIONS = ("random", "erf", "exp")
NAMES = ("inputs", "read_bytes", "written_bytes", "rows", "columns", "down", *FUNCTIONS, "turned")
Shape: TypeAlias = tuple[int, ...]
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}


@dataclass
class ValuePlaces:
    """Where values are: in the storages they had, or in new ones where those are taken by a later value."""

    graph: Graph
    flow: Flow
    own: dict[int, int] = field(default_factory=dict)  # by value the new storage
    views: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.graph)
        self.stays = _stays(self.flow)

    def storage(self, v: int) -> int:
        while v in self.flow.into:
            v = self.flow.into[v]
        value = self.flow.values[v]
        if value.storage >= 0 and v in self.stays:
            return value.storage
        if v not in self.own:
            self.own[v] = self.builder.add_storage(value.nbytes, "activation")
        return self.own[v]

    def whole(self, v: int) -> int:
        """The tensor that is all of a value."""
        value, home = self.flow.values[v], self.storage(v)
        if value.tensor >= 0:
            t = self.graph.tensors[value.tensor]
            return t.id if t.storage == home else self._view(home, t.shape, t.strides, t.dtype, t.offset)
        return self._view(home, (value.elements,), (1,), DTYPES[value.width])

    def shaped(self, v: int, shape: tuple[int, int]) -> int:
        """All of a value, as rows."""
        return self._view(self.storage(v), shape, (shape[1], 1), DTYPES[self.flow.values[v].width])

    def view(self, t: Tensor, v: int | None) -> int:
        """A tensor as a view of the storage where its value is; of a copy made for it, the whole."""
        if v is not None and self.flow.values[v].tensor < 0 and self.flow.values[v].elements == t.elements:
            return self._view(self.storage(v), t.shape, dense_strides(t), t.dtype)
        home = t.storage if v is None else self.storage(v)
        return t.id if t.storage == home else self._view(home, t.shape, t.strides, t.dtype, t.offset)

    def _view(self, storage: int, shape: Shape, strides: Shape, dtype: str, offset: int = 0) -> int:
        key = storage, shape, strides, dtype, offset
        if key not in self.views:
            self.views[key] = self.builder.add_tensor(storage, shape, dtype, offset, strides)
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
    made = flow.producers()
    for v, value in enumerate(flow.values):
        if value.storage >= 0:
            last[value.storage] = v
    outside = {v for n in flow.nodes if n.kind == "outside" for v in (*n.reads, *n.writes)}
    return {*last.values(), *outside, *(v for v in range(len(flow.values)) if v not in made)}


def fused_op(
    places: ValuePlaces, group: KernelGroup, found: Sequence[Piece], values_to_write: set[int], like: Op, library: str
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
    kind = "pointwise" if group.loops is None else "reduction"
    return replace(
        like, name=f"{library}::{kind}", overload="", inputs=(refs, *numbers), names=NAMES, writes=(), kernels=True,
        sync=False,
        outputs=tuple(dict.fromkeys(places.whole(v) for v in writes)),
    )  # fmt: skip


def values_to_write(
    together: Sequence[KernelGroup], mine: Sequence[Piece], others: Sequence[Piece], live_out: set[int]
) -> list[set[int]]:
    """By group the values it has to write: others read them, or they outlast the step."""
    readers: dict[int, set[int]] = {}
    for g, group in enumerate(together):
        for m in group.members:
            for v in mine[m].reads:
                readers.setdefault(v, set()).add(g)
    beyond = live_out.union(v for p in others for v in p.reads)
    return [{v for v in group.writes if v in beyond or readers.get(v, set()) - {g}} for g, group in enumerate(together)]


def _written(group: KernelGroup, v: int) -> int:
    """Elements of a value that a kernel writes."""
    return next((n.elements for n in group.nodes if v in n.writes and n.kind == "scatter"), 1 << 62)


def topological_order(found: Sequence[KernelGroup], producers: Mapping[int, int]) -> list[int]:
    """Groups by their first piece, each after those that it waits for."""
    out: list[int] = []
    state = [0] * len(found)
    for start in sorted(range(len(found)), key=lambda g: found[g].members[0]):
        stack = [start]
        while stack:
            g = stack[-1]
            waits = (
                [producers[v] for v in found[g].reads if v in producers and producers[v] != g] if not state[g] else []
            )
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


def rebuild_graph(
    graph: Graph, places: ValuePlaces, region: Sequence[int], compiled: Mapping[int, list[tuple[Op, int]]]
) -> Graph:
    """The graph with each region's compiled ops (with the positions they had, -1 for fused ones) in place of its own.

    Ops outside that stand in the midst of a region come after it.
    """
    builder, kept = places.builder, set[int]()
    first = {k: i for i, k in reversed([*enumerate(region)])}
    last = {k: i for i, k in enumerate(region)}
    running = OUTSIDE
    for i, k in enumerate(region):
        if k != OUTSIDE:
            running = k
            builder.replace(i, *(op for op, _ in compiled[k] if i == first[k]))
        elif running != OUTSIDE and i < last[running]:
            builder.replace(i)
            end = last[running] + 1
            (builder.before if end < len(graph.ops) else builder.after)(min(end, len(graph.ops) - 1), graph.ops[i])
    for k, ops in compiled.items():
        for number, (_, old) in enumerate(ops):
            builder.move(old, first[k], number)
            kept.add(old)
    used = {s for op in graph.ops for s in uses(graph, op)}
    _shorten_lifetimes(builder, region, used)
    return builder.build(prune=True, frees_first=True, dropped=_workspaces(graph, region, used, kept))


def _shorten_lifetimes(builder: GraphBuilder, region: Sequence[int], used: set[int]) -> None:
    """Memory lives from its first use to its last; where ops outside the regions use it, as long as it did."""
    graph = builder.source
    outside = {s for op, k in zip(graph.ops, region, strict=True) if k == OUTSIDE for s in uses(graph, op)}
    freed = {e.storage: e.op for e in graph.events if not e.allocates}
    for s in {e.storage for e in graph.events if e.allocates} & used:
        builder.lifetimes[s] = "while used" if s in freed else "kept"
        if s in freed and s in outside:
            builder.free_after(s, freed[s] - 1)


def _workspaces(graph: Graph, region: Sequence[int], used: set[int], kept: set[int]) -> set[int]:
    """Workspaces of the ops that are fused: memory that no op names."""
    allocated = (e for e in graph.events if e.allocates and e.storage not in used)
    return {e.storage for e in allocated if region[e.op] != OUTSIDE and e.op not in kept}
