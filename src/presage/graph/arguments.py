"""An op's arguments, by name where the op has names, else by place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from presage.errors import PresageError
from presage.graph.graph import Arg, Graph, Op, Ref, Tensor

__all__ = ["argument", "aten", "flag", "optional_tensor", "references", "tensor", "tensors"]


def aten(names: str) -> list[str]:
    """Full names of torch's own ops, from a line of short ones."""
    return [f"aten::{n}" for n in names.split()]


def argument(op: Op, name: str, place: int | None = None) -> Arg:
    """The argument called `name`, or the one at `place` where the op has no names; None where it is left out."""
    if op.names:
        place = op.names.index(name) if name in op.names else None
    return op.inputs[place] if place is not None and place < len(op.inputs) else None


def flag(op: Op, name: str, place: int | None = None) -> bool:
    return bool(argument(op, name, place))


def optional_tensor(graph: Graph, op: Op, place: int) -> Tensor | None:
    value = op.inputs[place] if place < len(op.inputs) else None
    return graph.tensors[value.id] if isinstance(value, Ref) else None


def references(values: Iterable[Any]) -> Iterator[int]:
    """Ids of the tensors among arguments, lists flattened, in order."""
    for value in values:
        if isinstance(value, Ref):
            yield value.id
        elif isinstance(value, list):
            yield from references(value)


def tensor(graph: Graph, op: Op, place: int) -> Tensor:
    """The tensor that has to be at this place of the op's inputs."""
    found = optional_tensor(graph, op, place)
    if found is None:
        raise PresageError(f"{op.name}: input {place} should be a tensor")
    return found


def tensors(graph: Graph, value: Arg) -> list[Tensor]:
    """The tensors in one argument: none, itself, or those of the list."""
    items = value if isinstance(value, list) else [value]
    return [graph.tensors[i.id] for i in items if isinstance(i, Ref)]
