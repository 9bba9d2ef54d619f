"""Changes of a graph. Each gives a new graph that is valid if the old one was; none changes the old one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.arguments import references
from presage.graph.check import uses
from presage.graph.graph import Event, Graph, Op, Ref, Storage, Tensor

__all__ = ["replace_ops", "select", "spans", "stretched", "without"]


def select(graph: Graph, predicate: Callable[[Op], bool]) -> Graph:
    """The ops for which `predicate` holds, in their order, with the tensors they touch.

    Memory that only other ops used is gone; what was there before the step stays, used or not.
    """
    return replace_ops(graph, {i: [] for i, op in enumerate(graph.ops) if not predicate(op)})


def without(graph: Graph, predicate: Callable[[Op], bool]) -> Graph:
    """All but the ops for which `predicate` holds."""
    return select(graph, lambda op: not predicate(op))


def replace_ops(
    graph: Graph,
    changes: Mapping[int, Sequence[Op]],
    tensors: Sequence[Tensor] = (),
    storages: Sequence[Storage] = (),
    dropped: Collection[int] = (),
) -> Graph:
    """Other ops in place of those at these numbers: none, one or many.

    `tensors` and `storages` are new ones that the new ops need; their ids go on where the graph's end. A new storage
    lives from its first use to its last. Lifetimes of the old ones follow: a storage is allocated earlier or freed
    later where a new op needs it, and goes if no op does. What was there before the step stays, unless it is `dropped`.
    """
    outside = [i for i in changes if not 0 <= i < len(graph.ops)]
    if outside:
        raise PresageError(f"op {outside[0]} cannot be replaced: the graph has {len(graph.ops)}")
    runs = [list(changes.get(i, (op,))) for i, op in enumerate(graph.ops)]
    starts = list(accumulate(map(len, runs), initial=0))
    changed = replace(
        graph,
        ops=tuple(op for run in runs for op in run),
        tensors=(*graph.tensors, *tensors),
        storages=(*graph.storages, *storages),
        events=tuple(replace(e, op=starts[e.op]) for e in graph.events),
    )
    kept = _still_needed(graph, changed, changes) - set(dropped)
    return _compact(replace(changed, events=_fitted(changed, kept, {s.id for s in storages})), kept)


def _still_needed(old: Graph, new: Graph, changes: Mapping[int, Sequence[Op]]) -> set[int]:
    """Storages that stay: those an op uses, those from before the step, and workspaces of ops that stayed.

    A workspace is a storage no op names; it belongs to the op before which it is allocated.
    """
    used = {s for op in new.ops for s in uses(new, op)}
    was_used = {s for op in old.ops for s in uses(old, op)}
    allocated = {e.storage: e.op for e in old.events if e.allocates}
    before = {s.id for s in old.storages if s.id not in allocated}
    unnamed = allocated.keys() - was_used
    return used | before | {s for s in unnamed if allocated[s] not in changes or changes[allocated[s]]}


def _fitted(graph: Graph, kept: set[int], new: set[int]) -> tuple[Event, ...]:
    """The events of the storages kept, moved as far as their use asks, and those of the new ones."""
    first, last = spans(graph)
    events = [stretched(e, first, last) for e in graph.events if e.storage in kept]
    for s in sorted(new & kept):
        events += [Event(first[s], s, True), Event(last[s] + 1, s, False)]
    return tuple(sorted(events, key=lambda e: e.op))  # a stable sort: events at one place keep their order


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
    made = {e.storage for e in graph.events if e.allocates}
    named = {i for op in graph.ops for i in (*references(op.inputs), *op.outputs)}
    tensors = [t for t in graph.tensors if t.storage in kept and (t.id in named or t.storage not in made)]
    if len(tensors) == len(graph.tensors) and len(kept) == len(graph.storages):
        return graph
    place = {s: i for i, s in enumerate(sorted(kept))}
    new = {t.id: i for i, t in enumerate(tensors)}
    return replace(
        graph,
        ops=tuple(_renumbered(op, new) for op in graph.ops),
        tensors=tuple(replace(t, id=i, storage=place[t.storage]) for i, t in enumerate(tensors)),
        storages=tuple(replace(graph.storages[s], id=i) for s, i in place.items()),
        events=tuple(replace(e, storage=place[e.storage]) for e in graph.events),
        facts={new[i]: known for i, known in graph.facts.items() if i in new},
    )


def _renumbered(op: Op, new: Mapping[int, int]) -> Op:
    def mapped(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new[value.id])
        return [mapped(v) for v in value] if isinstance(value, list) else value

    return replace(
        op,
        inputs=tuple(mapped(v) for v in op.inputs),
        outputs=tuple(new[i] for i in op.outputs),
        writes=tuple(new[i] for i in op.writes),
    )
