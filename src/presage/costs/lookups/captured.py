"""Lookups of captured code: their seconds by the embedding model, and the tables that `presage shard` places.

A table-batched lookup (FBGEMM's, as TorchRec calls it) is one op with the rows and columns of its tables; PyTorch's own
EmbeddingBag is one op a table. How rows repeat is not in code: indices are taken to be drawn evenly.
"""

from __future__ import annotations

from collections.abc import Iterator

from presage.costs.lookups import Reuse, Table, embedding_model
from presage.errors import PresageError
from presage.graph.graph import Graph, Op, Ref, Tensor
from presage.hardware import Gpu

LOOKUP = "fbgemm::split_embedding_codegen_lookup_function"
BAG = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
EVEN = Reuse(alpha=0.0)


def lookup_seconds(graph: Graph, gpu: Gpu) -> dict[int, float]:
    """Seconds of the table-batched lookups of a step, by their places among its ops."""
    found = {i: op for i, op in enumerate(graph.ops) if op.name.startswith(LOOKUP) and len(_sizes(op)) == 2}
    if not found:
        return {}
    model, out = embedding_model(gpu), {}
    for i, op in found.items():
        tables, samples = _group(graph, op)
        back = op.name.endswith("Backward")
        out[i] = (model.backward if back else model.forward)(tables, samples)
    return out


def captured_tables(graph: Graph) -> tuple[tuple[Table, ...], int]:
    """The tables that a step looks rows up in, each once, and the samples of a step."""
    tables: list[Table] = []
    batch = 0
    for op in graph.ops:
        if op.name == LOOKUP and len(_sizes(op)) == 2:
            group, samples = _group(graph, op, len(tables))
            tables += group
        elif op.name in BAG and op.phase == "forward":
            one, samples = _bag(graph, op, len(tables))
            tables.append(one)
        else:
            continue
        batch = max(batch, samples)
    if not tables:
        raise PresageError("the step looks up no embedding tables: EmbeddingBag and TorchRec's collections are read")
    return tuple(tables), batch


def _sizes(op: Op) -> list[list[int]]:
    """Rows and columns of a group's tables."""
    lists = [x for x in op.inputs if isinstance(x, list) and x and all(type(n) is int for n in x)]
    return lists[-2:]  # type: ignore[return-value]


def _tensors(graph: Graph, op: Op) -> Iterator[Tensor]:
    return (graph.tensors[x.id] for x in op.inputs if isinstance(x, Ref))


def _group(graph: Graph, op: Op, first: int = 0) -> tuple[list[Table], int]:
    rows, dims = _sizes(op)
    indices, offsets = list(_tensors(graph, op))[-2:]
    samples = max(1, (offsets.elements - 1) // len(rows))
    pooling = indices.elements / len(rows) / samples
    sizes = enumerate(zip(rows, dims, strict=True))
    return [Table(f"table_{first + k}", max(1, n), d, pooling, EVEN) for k, (n, d) in sizes], samples


def _bag(graph: Graph, op: Op, place: int) -> tuple[Table, int]:
    weight, indices, offsets = list(_tensors(graph, op))[:3]
    samples = max(1, offsets.elements)
    dtype = weight.dtype if weight.dtype in ("float16", "bfloat16") else "float32"
    return Table(f"table_{place}", weight.shape[0], weight.shape[1], indices.elements / samples, EVEN, dtype), samples
