"""Ops that run once more, on memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from presage.graph.check import uses
from presage.graph.edit import spans, stretched
from presage.graph.graph import Event, Graph, Op, Ref

__all__ = ["Copies", "in_order", "users"]


class Copies:
    """The tensors and storages of a graph and of copies of its ops; new numbers go on where the graph's end."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.tensors = list(graph.tensors)
        self.storages = list(graph.storages)
        self.facts = dict(graph.facts)
        self._moved: dict[tuple[int, int], int] = {}  # a tensor in another storage

    def storage(self, old: int, **changes: Any) -> int:
        """Memory like that of a storage."""
        number = len(self.storages)
        self.storages.append(replace(self.storages[old], id=number, **changes))
        return number

    def tensor(self, old: int, where: Mapping[int, int]) -> int:
        """The tensor in the storage that stands for its own, if one does."""
        storage = self.tensors[old].storage
        if storage not in where or where[storage] == storage:
            return old
        key = old, where[storage]
        if key not in self._moved:
            number = self._moved[key] = len(self.tensors)
            self.tensors.append(replace(self.tensors[old], id=number, storage=where[storage]))
            if old in self.facts:
                self.facts[number] = self.facts[old]
        return self._moved[key]

    def op(self, op: Op, where: Mapping[int, int], **changes: Any) -> Op:
        """The op on other memory: `where` by storage."""

        def moved(value: Any) -> Any:
            if isinstance(value, Ref):
                return Ref(self.tensor(value.id, where))
            return [moved(v) for v in value] if isinstance(value, list) else value

        return replace(
            op,
            inputs=tuple(moved(v) for v in op.inputs),
            outputs=tuple(self.tensor(i, where) for i in op.outputs),
            writes=tuple(self.tensor(i, where) for i in op.writes),
            **changes,
        )

    def graph(self, ops: Sequence[Op], events: Iterable[Event]) -> Graph:
        """The graph with these ops; a storage lives as the events say, or longer where an op needs it."""
        made = replace(
            self.source,
            ops=tuple(ops),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            events=(),
            facts=self.facts,
        )
        first, last = spans(made)
        return replace(made, events=in_order(stretched(e, first, last) for e in events))


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events by the op they come before; those of one op keep their order."""
    return tuple(sorted(events, key=lambda e: e.op))


def users(graph: Graph) -> dict[int, list[int]]:
    """The places of the ops that touch each storage, in order."""
    found: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for s in uses(graph, op):
            found.setdefault(s, []).append(i)
    return found
