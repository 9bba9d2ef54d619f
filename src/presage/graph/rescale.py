"""A step with another batch, from its Graph alone: every dimension that is a multiple of the batch is scaled."""

from __future__ import annotations

from collections import Counter
from math import prod

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.graph import UNNAMED, Graph, Storage, Tensor

FIXED = frozenset({"parameter", "optimizer", "gradient", "buffer"})  # what no batch is in
LEAST = 16  # a smaller batch divides too many numbers by chance


def batch_of(graph: Graph) -> int:
    """The batch of a step: the largest number that the first dimensions of most of its inputs are multiples of."""
    given = {t.id for op in graph.ops for t in graph.inputs_of(op) if graph.storages[t.storage].role == "input"}
    sizes = Counter(
        graph.tensors[i].shape[0] for i in given if graph.tensors[i].shape and graph.tensors[i].shape[0] > 1
    )
    if not sizes:
        why = "no input has a batch dimension" if graph.memory_known else UNNAMED
        raise PresageError(f"{graph.source}: {why}")
    large = [n for n in sizes if n >= LEAST]
    return max(large or sizes, key=lambda n: (sum(count for m, count in sizes.items() if m % n == 0), n))


def with_batch(graph: Graph, batch: int) -> Graph:
    """The same step on another batch; an error where it cannot be told which dimensions are the batch's."""
    now = batch_of(graph)
    if batch == now:
        return graph
    if now < LEAST:
        raise PresageError(
            f"batch={batch}: the batch of {graph.source} is {now}, which too many dimensions are a multiple of: "
            "record a trace with that batch, or give the code"
        )
    for t in graph.tensors:
        clash = next((n for n in t.shape if n % now == 0 and n), None)
        if graph.storages[t.storage].role in FIXED and clash is not None:
            raise PresageError(
                f"batch={batch}: a parameter of {graph.source} has the dimension {clash}, a multiple of the batch "
                f"{now}: which dimensions are the batch's cannot be told"
            )
    if any(_odd(t, now, batch) for t in graph.tensors):
        raise PresageError(f"batch={batch}: sizes of {graph.source} would not be whole numbers")
    tensors = tuple(_tensor(graph, t, now, batch) for t in graph.tensors)
    note = f"batch {now} was made {batch}: dimensions that are multiples of {now} were scaled"
    return replace(graph, tensors=tensors, storages=_storages(graph, tensors), notes=(*graph.notes, note))


def _odd(t: Tensor, now: int, batch: int) -> bool:
    return any(n % now == 0 and n * batch % now for n in t.shape)


def _tensor(graph: Graph, t: Tensor, now: int, batch: int) -> Tensor:
    if graph.storages[t.storage].role in FIXED:
        return t
    shape = tuple(n * batch // now if n % now == 0 else n for n in t.shape)
    if shape == t.shape:
        return t
    grown = [new / old if old else 1.0 for new, old in zip(shape, t.shape, strict=True)]
    strides = tuple(
        round(s * prod(g for g, other in zip(grown, t.strides, strict=True) if 0 < other < s)) for s in t.strides
    )
    return replace(t, shape=shape, strides=strides, offset=t.offset * batch // now)


def _storages(graph: Graph, tensors: tuple[Tensor, ...]) -> tuple[Storage, ...]:
    """Memory grows as the largest tensor in it does."""
    largest: dict[int, tuple[int, int]] = {}
    for old, new in zip(graph.tensors, tensors, strict=True):
        largest[old.storage] = max(largest.get(old.storage, (0, 0)), (old.elements, new.elements))
    out = []
    for storage in graph.storages:
        before, after = largest.get(storage.id, (1, 1))
        grows = before and storage.role not in FIXED
        out.append(replace(storage, nbytes=storage.nbytes * after // before) if grows else storage)
    return tuple(out)
