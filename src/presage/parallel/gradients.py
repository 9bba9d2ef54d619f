"""Parameters and their gradients in a captured step: which belong together, and when a gradient is ready."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.arguments import references
from presage.graph.check import uses
from presage.graph.graph import Graph, Op, Storage, Tensor

__all__ = [
    "Gradient", "backward_passes", "earlier_gradients", "fresh_gradients", "gradients", "parameters", "whole_tensors",
]  # fmt: skip


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, and after which op it is ready."""

    parameter: str
    storage: int
    tensor: Tensor
    ready: int


def parameters(graph: Graph) -> list[Storage]:
    """The parameters' memory, in the model's order."""
    return [s for s in graph.storages if s.role == "parameter"]


def whole_tensors(graph: Graph) -> dict[int, Tensor]:
    """The largest tensor in each memory: the parameter or gradient itself, not a piece of it."""
    largest: dict[int, Tensor] = {}
    for t in graph.tensors:
        if t.storage not in largest or t.elements > largest[t.storage].elements:
            largest[t.storage] = t
    return largest


def backward_passes(graph: Graph) -> list[range]:
    """The places of each backward pass: from its first op to its last, with none of a forward pass between."""
    out: list[range] = []
    forward = True
    for i, op in enumerate(graph.ops):
        if op.phase == "backward":
            out = [*out, range(i, i + 1)] if forward else [*out[:-1], range(out[-1].start, i + 1)]
        forward = op.phase == "forward" or (forward and op.phase != "backward")
    if not out:
        raise PresageError("the step has no backward pass: there is nothing to train on several ranks")
    return out


def gradients(graph: Graph, backward: range) -> list[Gradient]:
    """The gradients that a backward pass makes or adds to, in the order they are ready."""
    last: dict[int, int] = {}
    for i in backward:
        last |= dict.fromkeys(uses(graph, graph.ops[i]), i)
    tensors = whole_tensors(graph)
    shapes = {p.name: tensors[p.id].shape for p in parameters(graph) if p.id in tensors}
    found = [
        Gradient(s.name, s.id, _shaped(graph, tensors[s.id], shapes.get(s.name)), last[s.id])
        for s in graph.storages
        if s.role == "gradient" and s.id in last
    ]
    if not found:
        raise PresageError("the step makes no gradients of parameters: there is nothing for the ranks to share")
    return sorted(found, key=lambda g: (g.ready, g.storage))


def _shaped(graph: Graph, whole: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """The tensor of a gradient's memory that has its parameter's shape, if there is one: a sum may have kept a 1."""
    if shape is None or whole.shape == shape:
        return whole
    alike = (t for t in graph.tensors[whole.id :] if t.storage == whole.storage and t.shape == shape)
    return next(alike, whole)


def earlier_gradients(graph: Graph) -> list[Storage]:
    """Gradients of the step before, which this one finds and frees."""
    made = {e.storage for e in graph.events if e.allocates}
    used = {s for op in graph.ops if op.phase == "backward" for s in uses(graph, op)}
    return [s for s in graph.storages if s.role == "gradient" and s.id not in made | used]


def fresh_gradients(graph: Graph) -> Graph:
    """The step where every backward pass makes gradients of its own, for what came before is sent and freed by then.

    On one GPU each microbatch's gradients are added to those there; here what would be added is the gradient.
    """
    ops, storages = list(graph.ops), list(graph.storages)
    for i in (i for backward in backward_passes(graph)[1:] for i in backward):
        found = _added(graph, ops[i])
        if found is not None:
            total, new = found
            storages[new] = replace(storages[new], role="gradient", name=total.name, module=total.module)
            ops[i] = replace(ops[i], inputs=(), names=(), outputs=(), writes=(), kernels=False)
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def _added(graph: Graph, op: Op) -> tuple[Storage, int] | None:
    """The gradient that an op adds to, and the memory of what it adds; None if it is no such op."""
    if op.name != "aten::add_" or not op.kernels or len(op.writes) != 1:
        return None
    total = graph.storages[graph.tensors[op.writes[0]].storage]
    others = [s for i in references(op.inputs) if (s := graph.tensors[i].storage) != total.id]
    return (total, others[0]) if total.role == "gradient" and len(others) == 1 else None
