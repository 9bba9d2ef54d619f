"""What autograd keeps of a forward pass for the backward pass, as a graph shows it: what backward nodes read."""

from __future__ import annotations

from collections.abc import Iterable

from presage.graph.check import uses
from presage.graph.graph import Graph, Op

__all__ = ["Saved"]

FLOATS = ("float", "bfloat", "complex")


class Saved:
    """The tensors that each backward node reads of what was there before it, by autograd's number of the node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[int, list[int]] = {}  # places of a node's ops, by its number
        self.tensors: dict[int, tuple[int, ...]] = {}
        self.again: set[str] = set()  # modules that run forward ops in the backward pass
        self.allocated = {e.storage: e.op for e in graph.events if e.allocates}
        self.differentiable = _differentiable(graph)  # storages
        self._forward = _from_forward(graph)
        self._beside = {i for op in graph.ops if op.thread == "main" for i in op.outputs[1:]}
        newest = -1
        for i, op in enumerate(graph.ops):
            if op.thread == "main":
                newest = max(newest, op.sequence)
            elif op.sequence > newest:
                self.again.add(op.module)
            elif op.sequence >= 0:
                self._note(i, op)

    def _note(self, place: int, op: Op) -> None:
        self.nodes.setdefault(op.sequence, []).append(place)
        views = {i for k in self.nodes[op.sequence][:-1] for i in self.graph.ops[k].outputs}  # the node's own
        kept = self.kept(op.sequence)
        read = [t.id for t in self.graph.inputs_of(op) if t.storage in self._forward and t.id not in views]
        self.tensors[op.sequence] = tuple(dict.fromkeys((*kept, *read)))

    def kept(self, number: int) -> tuple[int, ...]:
        """The tensors that a node keeps; none where it has no ops or reads gradients alone."""
        return self.tensors.get(number, ())

    def distinct(self, number: int) -> list[int]:
        """The same, of several views that begin at one place the first alone."""
        views = {(self.graph.tensors[t].storage, self.graph.tensors[t].offset): t for t in reversed(self.kept(number))}
        return list(reversed(views.values()))

    def needs_gradient(self, tensor: int) -> bool:
        """Whether a gradient may flow to it: not to what an op gives beside its result (a mean, a mask)."""
        return self.graph.tensors[tensor].storage in self.differentiable and tensor not in self._beside

    def results(self, number: int, places: Iterable[int]) -> set[int]:
        """Of the tensors that a node keeps, those that its own forward ops (among these) made or changed."""
        ops = [self.graph.ops[i] for i in places if self.graph.ops[i].sequence == number]
        given = {t.storage for op in ops for t in self.graph.inputs_of(op)}
        made = {t.storage for op in ops for t in self.graph.outputs_of(op)} - given
        made |= {self.graph.tensors[i].storage for op in ops for i in op.writes}
        return {t for t in self.kept(number) if self.graph.tensors[t].storage in made}


def _from_forward(graph: Graph) -> set[int]:
    """Storages that were there before the step or that the forward pass made."""
    late = {e.storage for e in graph.events if e.allocates and _on_autograd(graph, e.op)}
    return {s.id for s in graph.storages if s.id not in late and s.role != "gradient"}


def _on_autograd(graph: Graph, place: int) -> bool:
    return place < len(graph.ops) and graph.ops[place].thread == "autograd"


def _differentiable(graph: Graph) -> set[int]:
    """Storages that hold what a gradient may flow to: weights that get one, and all that is computed of them."""
    trained = {s.name for s in graph.storages if s.role == "gradient"}
    found = {s.id for s in graph.storages if s.role == "parameter" and s.name in trained}
    for op in graph.ops:
        if op.thread == "main" and op.sequence >= 0 and not found.isdisjoint(uses(graph, op)):
            found |= {t.storage for t in graph.outputs_of(op) if t.dtype.startswith(FLOATS)}
    return found
