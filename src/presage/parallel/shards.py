"""Parts of parameters: what a rank keeps and updates of what all of them train."""

from __future__ import annotations

from math import ceil, prod

from presage.graph.builder import GraphBuilder, retarget
from presage.graph.check import uses
from presage.graph.graph import DTYPE_BYTES, Tensor
from presage.parallel.gradients import whole_tensors

__all__ = ["shard_elements", "shard_update"]

TRAINED = ("parameter", "gradient", "optimizer")


def shard_elements(tensor: Tensor, ranks: int) -> int:
    """Elements of the largest part of a tensor that is cut along its first dimension."""
    if not tensor.shape:
        return 1
    return ceil(tensor.shape[0] / ranks) * prod(tensor.shape[1:])


def shard_update(builder: GraphBuilder, ranks: int, end: int, held: dict[int, int], dtype: str = "") -> None:
    """After the backward pass (which ends at op `end`) all work on parameters, gradients and the optimizer's state is
    on the rank's own part of them.

    `held` are the parts of parameters and gradients, as tensors, by the storage of the whole. State of the optimizer,
    and what is computed from all these, shrinks as they do; `dtype` is what the state is kept in, if another.
    """
    graph = builder.source
    tensors = whole_tensors(graph)
    touched = {s.id for s in graph.storages if s.role in TRAINED}
    parts = dict(held)
    for i in range(end + 1, len(graph.ops)):
        mine = uses(graph, graph.ops[i])
        if not mine & touched:
            continue
        touched |= mine
        for s in mine - parts.keys():
            parts[s] = _part(builder, tensors[s], ranks, dtype)
        named = (*graph.inputs_of(graph.ops[i]), *graph.outputs_of(graph.ops[i]))
        builder.ops[i] = retarget(builder.ops[i], {t.id: parts[t.storage] for t in named})


def _part(builder: GraphBuilder, whole: Tensor, ranks: int, dtype: str) -> int:
    """The rank's part in the same memory, which shrinks to it."""
    if whole.elements <= 1:
        return whole.id
    dtype = dtype if dtype and whole.dtype.startswith(("float", "bfloat")) else whole.dtype
    elements = shard_elements(whole, ranks)
    builder.resize(whole.storage, elements * DTYPE_BYTES[dtype])
    return builder.add_tensor(whole.storage, (elements,), dtype)
