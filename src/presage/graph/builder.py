"""GraphBuilder: the only writer of Graphs. It starts empty or from a Graph; memory lifetimes follow from use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.graph import (
    DTYPE_BYTES,
    Event,
    Graph,
    Op,
    Phase,
    Ref,
    Role,
    Storage,
    Tensor,
    Thread,
    references,
    uses,
)

# How long memory lives: from first to last use in the step, from first use on, before, during and after the step, or
# from before the step until its first op.
Lifetime: TypeAlias = Literal["while used", "kept", "always", "dropped"]


class GraphBuilder:
    """A graph under construction.

    Positions of ops (`before`, `after`, `replace`, `free_after`) index `ops`: the source's ops, then appended ones.
    They hold until `build`, which puts the insertions in place, moves allocations and frees as far as use requires,
    and gives storages added here their lifetimes. Tensors and storages are numbered on from the source's. The lists
    (`ops`, `tensors`, `storages`, `events`, `notes`) may be edited in place.
    """

    def __init__(self, source: Graph | None = None, **fields: Any) -> None:
        """Starts from a graph, or empty with these fields of Graph (source, flags, ...)."""
        self.source = source or Graph((), (), (), (), **fields)
        self.ops = list(self.source.ops)
        self.tensors = list(self.source.tensors)
        self.storages = list(self.source.storages)
        self.events = list(self.source.events)
        self.notes = list(self.source.notes)
        self.facts = dict(self.source.facts)
        self.lifetimes: dict[int, Lifetime] = {}  # by storage; replaces the events it had
        self._before: dict[int, list[Op]] = {}
        self._after: dict[int, list[Op]] = {}
        self._instead: dict[int, tuple[Op, ...]] = {}
        self._freed_after: dict[int, int] = {}  # position by storage
        self._moved: dict[int, tuple[int, int]] = {}  # by old position

    # ---- memory and tensors

    def add_storage(
        self, nbytes: int, role: Role, name: str = "", module: str = "", lifetime: Lifetime = "while used"
    ) -> int:
        """New memory; returns its id."""
        number = len(self.storages)
        self.storages.append(Storage(number, nbytes, role, name, module))
        self.lifetimes[number] = lifetime
        return number

    def add_tensor(
        self, storage: int, shape: Sequence[int], dtype: str, offset: int = 0, strides: Sequence[int] | None = None
    ) -> int:
        """A new tensor over a storage, contiguous unless strides are given; returns its id."""
        number = len(self.tensors)
        steps = row_major_strides(shape) if strides is None else strides
        self.tensors.append(Tensor(number, storage, tuple(shape), tuple(steps), dtype, offset))
        return number

    def add_buffer(
        self, elements: int, dtype: str, role: Role, name: str = "", lifetime: Lifetime = "while used"
    ) -> int:
        """A new flat tensor in a storage of its own."""
        storage = self.add_storage(elements * DTYPE_BYTES[dtype], role, name, lifetime=lifetime)
        return self.add_tensor(storage, (elements,), dtype)

    def copy_tensor(self, tensor: int, storage: int) -> int:
        """A tensor of the same shape, strides and facts in another storage."""
        number = len(self.tensors)
        self.tensors.append(replace(self.tensors[tensor], id=number, storage=storage))
        self.copy_facts(tensor, number)
        return number

    def copy_facts(self, source: int, target: int) -> None:
        """Note that one tensor holds the values of another."""
        if (known := self.facts.get(source)) is not None:
            self.facts[target] = known

    def resize(self, storage: int, nbytes: int) -> None:
        self.storages[storage] = replace(self.storages[storage], nbytes=nbytes)

    def free_after(self, storage: int, position: int) -> None:
        """Hold memory added here until after the op at this position and what is inserted there."""
        self._freed_after[storage] = position

    # ---- ops

    def append(self, *ops: Op) -> None:
        self.ops.extend(ops)

    def before(self, position: int, *ops: Op) -> None:
        """Insert ops before the one at a position, after those inserted there earlier."""
        self._before.setdefault(position, []).extend(ops)

    def after(self, position: int, *ops: Op) -> None:
        """Insert ops after the one at a position and those inserted there earlier."""
        self._after.setdefault(position, []).extend(ops)

    def replace(self, position: int, *ops: Op) -> None:
        """Put these ops in place of the one at a position; none removes it."""
        if not 0 <= position < len(self.ops):
            raise PresageError(f"op {position} cannot be replaced: the graph has {len(self.ops)}")
        self._instead[position] = ops

    def move(self, old: int, position: int, number: int) -> None:
        """Note that an op is now one of those in place of the op at `position`: its workspaces follow it there."""
        self._moved[old] = position, number

    def redirect_reads(self, tensors: Mapping[int, int], after: int) -> None:
        """Let ops after a position use these tensors (by storage) in place of those in the storages."""
        for i in range(after + 1, len(self.source.ops)):
            ids = {t.id: tensors[t.storage] for t in self.source.inputs_of(self.source.ops[i]) if t.storage in tensors}
            self.ops[i] = retarget(self.ops[i], ids)

    # ---- result

    def build(
        self,
        *,
        prune: bool = False,
        dropped: Collection[int] = (),
        frees_first: bool = False,
        prompt: bool = False,
        **fields: Any,
    ) -> Graph:
        """The graph. `fields` are other fields of Graph (source, flags, ...).

        `prune` removes storages that no op uses, unless they were there before the step, and those `dropped`.
        `frees_first` orders frees before allocations where both come before the same op. With `prompt`, memory that
        was allocated right before its first use, or freed right after its last, is so again.
        """
        ops, starts = self._arranged()
        graph = replace(
            self.source,
            ops=ops,
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            notes=tuple(self.notes),
            facts=self.facts,
            events=(),
            **fields,
        )
        kept = self._needed(graph) - set(dropped) if prune else set(range(len(self.storages)))
        events = [e for e in self._events(graph, starts, prompt) if e.storage in kept]
        # a stable sort: other events at one place keep their order
        events.sort(key=lambda e: (e.op, e.allocates) if frees_first else e.op)
        graph = replace(graph, events=tuple(events))
        return _compact(graph, kept) if prune else graph

    def _arranged(self) -> tuple[tuple[Op, ...], Sequence[int]]:
        """The ops with insertions and replacements in place, and by position where what stands there begins."""
        if not (self._before or self._instead or self._after):
            return tuple(self.ops), range(len(self.ops) + 1)
        runs = [
            [*self._before.get(i, ()), *self._instead.get(i, (op,)), *self._after.get(i, ())]
            for i, op in enumerate(self.ops)
        ]
        return tuple(op for run in runs for op in run), list(accumulate(map(len, runs), initial=0))

    def _events(self, graph: Graph, starts: Sequence[int], prompt: bool) -> list[Event]:
        """Events of the source, stretched to what uses their storages, and those of storages with a lifetime set."""
        if not self.events and all(lifetime == "always" for lifetime in self.lifetimes.values()):
            return []
        first, last = spans(graph)
        first_before, last_before = spans(self.source) if prompt else ({}, {})
        moved = self._moved_workspaces(starts) if self._moved else {}
        events = []
        for e in self.events:
            s = e.storage
            place = moved[s] + (not e.allocates) if s in moved else starts[e.op]
            if s in first and e.op == (first_before.get(s) if e.allocates else last_before.get(s, -2) + 1):
                place = first[s] if e.allocates else last[s] + 1
            if s not in self.lifetimes:
                events.append(stretched(replace(e, op=place), first, last))
        events += [Event(0, s, False) for s, lifetime in self.lifetimes.items() if lifetime == "dropped"]
        for s, lifetime in self.lifetimes.items():
            if s in first and lifetime in ("while used", "kept"):
                events.append(Event(first[s], s, True))
                if lifetime == "while used":
                    held = starts[self._freed_after[s] + 1] if s in self._freed_after else 0
                    events.append(Event(max(last[s] + 1, held), s, False))
        return events

    def _moved_workspaces(self, starts: Sequence[int]) -> dict[int, int]:
        """By workspace the new place of its op, for ops that moved."""
        used = {s for op in self.source.ops for s in uses(self.source, op)}
        out = {}
        for e in self.events:
            if e.allocates and e.op in self._moved and e.storage not in used:
                position, number = self._moved[e.op]
                out[e.storage] = starts[position] + len(self._before.get(position, ())) + number
        return out

    def _needed(self, graph: Graph) -> set[int]:
        """Storages that an op uses, those there before the step, and workspaces of ops that stayed.

        A workspace is a storage that no op names; it belongs to the op before which it is allocated.
        """
        used = {s for op in graph.ops for s in uses(graph, op)}
        was_used = {s for op in self.source.ops for s in uses(self.source, op)}
        allocated = {e.storage: e.op for e in self.events if e.allocates}
        before = {s.id for s in self.source.storages if s.id not in allocated}
        always = {s for s, lifetime in self.lifetimes.items() if lifetime == "always"}
        removed = {i for i, ops in self._instead.items() if not ops}
        workspaces = {s for s, op in allocated.items() if s not in was_used and op not in removed - self._moved.keys()}
        return used | before | always | workspaces


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(strides[::-1])


def new_op(
    name: str,
    inputs: Sequence[Any],  # as Op.inputs
    *,
    writes: Iterable[int] = (),
    outputs: Iterable[int] = (),
    like: Op | None = None,
    phase: Phase = "other",
    thread: Thread = "main",
    within: str | Iterable[str] = (),
    **fields: Any,
) -> Op:
    """An op; `like` is one whose phase, thread and module it shares, `fields` are other fields of Op."""
    if like is not None:
        phase, thread = like.phase, like.thread
        fields.setdefault("module", like.module)
    return Op(
        name=name,
        overload=fields.pop("overload", ""),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        phase=phase,
        thread=thread,
        writes=tuple(writes),
        within=(within,) if isinstance(within, str) else tuple(within),
        **fields,
    )


def host_op(name: str, tensors: Iterable[int], like: Op) -> Op:
    """Host work of a framework (a hook) on these tensors; it launches no kernel."""
    return new_op(name, [[Ref(t) for t in tensors]], like=like, kernels=False)


def retarget(op: Op, new: Mapping[int, int]) -> Op:
    """The op on other tensors: `new` by old id; ids that are not in it stay."""
    if not any(i in new for i in (*references(op.inputs), *op.outputs)):
        return op
    return map_tensors(op, lambda i: new.get(i, i))


def map_tensors(op: Op, new: Callable[[int], int]) -> Op:
    """The op with every tensor id replaced by `new(id)`."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new(value.id))
        return [mapped(v) for v in value] if isinstance(value, list) else value

    return replace(
        op,
        inputs=tuple(mapped(v) for v in op.inputs),
        outputs=tuple(new(i) for i in op.outputs),
        writes=tuple(new(i) for i in op.writes),
    )


def spans(graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last op that touches each storage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        for s in uses(graph, op):
            first.setdefault(s, i)
            last[s] = i
    return first, last


def stretched(event: Event, first: Mapping[int, int], last: Mapping[int, int]) -> Event:
    """The event, earlier or later where an op needs the storage."""
    if event.storage not in first:
        return event
    op = min(event.op, first[event.storage]) if event.allocates else max(event.op, last[event.storage] + 1)
    return replace(event, op=op)


def _compact(graph: Graph, kept: set[int]) -> Graph:
    """Only these storages, with the tensors an op names or that were there before the step; ids are places again."""
    allocated = {e.storage for e in graph.events if e.allocates}
    named = {i for op in graph.ops for i in (*references(op.inputs), *op.outputs)}
    tensors = [t for t in graph.tensors if t.storage in kept and (t.id in named or t.storage not in allocated)]
    if len(tensors) == len(graph.tensors) and len(kept) == len(graph.storages):
        return graph
    place = {s: i for i, s in enumerate(sorted(kept))}
    new = {t.id: i for i, t in enumerate(tensors)}
    return replace(
        graph,
        ops=tuple(map_tensors(op, new.__getitem__) for op in graph.ops),
        tensors=tuple(replace(t, id=i, storage=place[t.storage]) for i, t in enumerate(tensors)),
        storages=tuple(replace(graph.storages[s], id=i) for s, i in place.items()),
        events=tuple(replace(e, storage=place[e.storage]) for e in graph.events),
        facts={new[i]: known for i, known in graph.facts.items() if i in new},
    )


# ---- edits: each gives a new, valid graph and leaves the old one as it is


def select(graph: Graph, predicate: Callable[[Op], bool]) -> Graph:
    """The ops for which `predicate` holds, in their order, with the tensors they touch.

    Memory that only other ops used is gone; what was there before the step stays, used or not.
    """
    return replace_ops(graph, {i: [] for i, op in enumerate(graph.ops) if not predicate(op)})


def without(graph: Graph, predicate: Callable[[Op], bool]) -> Graph:
    """All but the ops for which `predicate` holds."""
    return select(graph, lambda op: not predicate(op))


def replace_ops(graph: Graph, changes: Mapping[int, Sequence[Op]]) -> Graph:
    """Other ops in place of those at these positions: none, one or many.

    Memory is allocated earlier or freed later where a new op needs it, and goes if no op does; what was there before
    the step stays.
    """
    builder = GraphBuilder(graph)
    for position, ops in changes.items():
        builder.replace(position, *ops)
    return builder.build(prune=True)


def map_ops(graph: Graph, positions: Iterable[int], change: Callable[[int, Op], Op]) -> Graph:
    """The ops at these positions changed, on the tensors they have."""
    ops = list(graph.ops)
    for i in positions:
        ops[i] = change(i, ops[i])
    return replace(graph, ops=tuple(ops))


def reorder(graph: Graph, order: Sequence[int]) -> Graph:
    """The ops in another order: memory is freed after all that came before its end, and sooner allocated if need be."""
    place = {old: new for new, old in enumerate(order)}
    behind = [0, *accumulate((place[i] + 1 for i in range(len(order))), max)]
    builder = GraphBuilder(graph)
    builder.ops = [graph.ops[i] for i in order]
    builder.events = [
        replace(e, op=place.get(e.op, len(order)) if e.allocates else behind[e.op]) for e in graph.events
    ]  # fmt: skip
    return builder.build()
