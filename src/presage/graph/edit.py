"""Changes of a graph. Each gives a new graph that is valid if the old one was; none changes the old one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from presage.graph.builder import GraphBuilder, spans, stretched
from presage.graph.graph import Graph, Op, Storage, Tensor

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
    builder = GraphBuilder(graph)
    for position, ops in changes.items():
        builder.replace(position, *ops)
    builder.tensors += tensors
    builder.storages += storages
    builder.lifetimes |= {s.id: "while used" for s in storages}
    return builder.build(prune=True, dropped=dropped)
