"""What a valid graph is. Whoever makes or changes one may ask; whoever reads one from a file does."""

from __future__ import annotations

from collections.abc import Iterator

from presage.errors import PresageError
from presage.graph.arguments import references
from presage.graph.graph import DTYPE_BYTES, Graph, Op, Tensor

__all__ = ["check", "faults", "uses"]


def check(graph: Graph) -> Graph:
    """The graph itself if it is valid, else an error that names the first field that is not."""
    for field, problem in faults(graph):
        raise PresageError(f"graph {graph.source or '(no source)'}: {field}: {problem}")
    return graph


def faults(graph: Graph) -> Iterator[tuple[str, str]]:
    """What is wrong, as (field, problem). None of it: the graph is valid, which means

    - tensors and storages stand at the place their id says, and everything an op or tensor refers to is there;
    - sizes are not negative, a tensor has a stride per dimension (or none if it is sparse) and a dtype of known size;
    - what an op writes in place is among its inputs;
    - facts are about tensors that are there, of whose values at least one is distinct and comes at least once;
    - events are in program order; a storage is allocated at most once, freed at most once, and not before that;
    - no op uses a storage before it is allocated, or after it is freed.

    Lifetimes are looked at only where all references hold.
    """
    broken = False
    for fault in (*_places(graph), *_references(graph), *_event_references(graph), *_facts(graph)):
        broken = True
        yield fault
    if not broken:
        yield from _lifetimes(graph)


def _places(graph: Graph) -> Iterator[tuple[str, str]]:
    for i, t in enumerate(graph.tensors):
        problem = _tensor_fault(graph, i, t)
        if problem:
            yield f"tensors[{i}]", problem
    for i, s in enumerate(graph.storages):
        if s.id != i:
            yield f"storages[{i}].id", f"is {s.id}, and should be its place"
        if s.nbytes < 0:
            yield f"storages[{i}].nbytes", "is negative"


def _tensor_fault(graph: Graph, place: int, t: Tensor) -> str:
    if t.id != place:
        return f"has id {t.id}, which should be its place"
    if not 0 <= t.storage < len(graph.storages):
        return f"names storage {t.storage} of {len(graph.storages)}"
    if t.dtype not in DTYPE_BYTES:
        return f"has the unknown dtype {t.dtype!r}"
    if len(t.shape) != len(t.strides) and t.strides:
        return f"has {len(t.shape)} dimensions and {len(t.strides)} strides"
    return "has a negative size, stride or offset" if min((*t.shape, *t.strides, t.offset)) < 0 else ""


def _references(graph: Graph) -> Iterator[tuple[str, str]]:
    known = len(graph.tensors)
    for i, op in enumerate(graph.ops):
        inputs = set(references(op.inputs))
        for field, ids in (("inputs", inputs), ("outputs", op.outputs), ("writes", op.writes)):
            if any(not 0 <= n < known for n in ids):
                yield f"ops[{i}].{field}", f"names a tensor that is not there ({op.name}; there are {known})"
        if not inputs.issuperset(op.writes):
            yield f"ops[{i}].writes", f"names a tensor that is not among the inputs of {op.name}"
        if op.names and len(op.names) != len(op.inputs):
            yield f"ops[{i}].names", f"has {len(op.names)} names for the {len(op.inputs)} inputs of {op.name}"


def _event_references(graph: Graph) -> Iterator[tuple[str, str]]:
    before = 0
    for i, e in enumerate(graph.events):
        if not 0 <= e.storage < len(graph.storages):
            yield f"events[{i}].storage", f"names storage {e.storage} of {len(graph.storages)}"
        if not 0 <= e.op <= len(graph.ops):
            yield f"events[{i}].op", f"names op {e.op} of {len(graph.ops)}"
        elif e.op < before:
            yield f"events[{i}].op", f"is {e.op}, before the event ahead of it ({before})"
        before = max(before, e.op)


def _facts(graph: Graph) -> Iterator[tuple[str, str]]:
    for i, (distinct, most) in graph.facts.items():
        if not 0 <= i < len(graph.tensors):
            yield f"facts[{i}]", f"names a tensor that is not there (there are {len(graph.tensors)})"
        elif distinct < 1 or most < 1:
            yield f"facts[{i}]", f"says that {distinct} values are distinct and one comes {most} times"


def uses(graph: Graph, op: Op) -> set[int]:
    """The storages an op touches."""
    ids = [*references(op.inputs), *op.outputs]
    return {graph.tensors[i].storage for i in ids}


def _lifetimes(graph: Graph) -> Iterator[tuple[str, str]]:
    allocated: dict[int, int] = {}
    freed: dict[int, int] = {}
    for i, e in enumerate(graph.events):
        if e.storage in freed:
            yield f"events[{i}]", f"storage {e.storage} was freed before"
        elif e.allocates and e.storage in allocated:
            yield f"events[{i}]", f"storage {e.storage} was allocated before"
        (allocated if e.allocates else freed).setdefault(e.storage, e.op)
    for i, op in enumerate(graph.ops):
        for storage in sorted(uses(graph, op)):
            if i < allocated.get(storage, 0):
                yield f"ops[{i}]", f"{op.name} uses storage {storage} before it is allocated (op {allocated[storage]})"
            if i >= freed.get(storage, len(graph.ops)):
                yield f"ops[{i}]", f"{op.name} uses storage {storage} after it is freed (op {freed[storage]})"
