"""Lookups of captured code: their seconds by the embedding model, and the tables that `presage shard` places.

A table-batched lookup (FBGEMM's, as TorchRec calls it) is one op with the rows and columns of its tables; PyTorch's own
EmbeddingBag is one op a table. Lookups repeat rows as their op says, by a skew for each table; where it does not, they
are taken to be even. A trace has all weights of a group in one tensor: its tables are taken to be of one size, and its
backward is an autograd node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from presage.costs.lookups import Reuse, Table, embedding_model
from presage.costs.lookups.lookup_model import OPTIMIZERS
from presage.errors import PresageError
from presage.graph.graph import Graph, Op, Ref, Tensor
from presage.hardware import Gpu

LOOKUP = "fbgemm::split_embedding_codegen_lookup_function"
BAG = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
TRACED = re.compile(r"fbgemm::(split|dense)_embedding_codegen_lookup(_\w+)?_function")
TRACED_BACKWARD = re.compile(r"(kernel::)?torch::autograd::CppNode<SplitLookupFunction_\w+>")
SORT_AND_UPDATE = 8  # kernels of a backward
EVEN = Reuse(alpha=0.0)


def lookup_seconds(graph: Graph, gpu: Gpu) -> dict[int, float]:
    """Seconds of the table-batched lookups of a step, by their places among its ops."""
    found = {i: op for i, op in enumerate(graph.ops) if op.name.startswith(LOOKUP) and len(_sizes(op)) == 2}
    groups = {i: (*_group(graph, op), op.name.endswith("Backward")) for i, op in found.items()} | _traced(graph)
    if not groups:
        return {}
    model = embedding_model(gpu)
    return {
        i: (model.backward if back else model.forward)(tables, samples, optimizer=_optimizer(graph.ops[i]))
        for i, (tables, samples, back) in groups.items()
    }


def _optimizer(op: Op) -> str:
    """What updates the rows; row-wise Adagrad, TorchRec's usual one, where the op does not say."""
    return next((x for x in op.inputs if isinstance(x, str) and x in OPTIMIZERS), OPTIMIZERS[0])


def _traced(graph: Graph) -> dict[int, tuple[list[Table], int, bool]]:
    """Tables, samples and direction of a trace's lookups; a backward is of the forward whose result is as large."""
    forward: dict[int, tuple[list[Table], int]] = {}  # by numbers in the result
    out: dict[int, tuple[list[Table], int, bool]] = {}
    for i, op in enumerate(graph.ops):
        if TRACED.fullmatch(op.name) and (group := _traced_group(graph, op)) is not None:
            out[i] = (*group, False)
            forward[group[1] * sum(t.dim for t in group[0])] = group
        elif TRACED_BACKWARD.fullmatch(op.name):
            size = max((t.elements for t in _tensors(graph, op)), default=0)
            if size in forward:
                out[i] = (*forward[size], True)
    return out


def _traced_group(graph: Graph, op: Op) -> tuple[list[Table], int] | None:
    """Tables of one size that hold the weights of a traced lookup; None where its inputs are not told."""
    at = next((k for k, x in enumerate(op.inputs) if type(x) is int), 0)  # all columns; those of the widest table next
    wide, given = op.inputs[at] if at else None, (op.inputs[at - 1], *op.inputs[at + 4 : at + 6])
    if type(wide) is not int or wide < 1 or not all(isinstance(x, Ref) for x in given) or len(given) != 3:
        return None
    ends, indices, offsets = (graph.tensors[x.id] for x in given if isinstance(x, Ref))
    weights = max(t.elements for t in _tensors(graph, op))
    count = max(1, ends.elements - 1)
    samples = max(1, (offsets.elements - 1) // count)
    pooling = indices.elements / count / samples
    one = Table("table", max(1, weights // wide), max(1, wide // count), pooling, EVEN)
    return [one] * count, samples


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
    skews = next((x for x in op.inputs if isinstance(x, list) and x and all(type(n) is float for n in x)), [])
    reuse = [Reuse(alpha=a) for a in skews] if len(skews) == len(rows) else [EVEN] * len(rows)  # type: ignore[arg-type]
    sizes = enumerate(zip(rows, dims, reuse, strict=True))
    dtype = _weights(next(_tensors(graph, op)))
    return [Table(f"table_{first + k}", max(1, n), d, pooling, r, dtype) for k, (n, d, r) in sizes], samples


def _weights(t: Tensor) -> str:
    return t.dtype if t.dtype in ("float16", "bfloat16") else "float32"


def _bag(graph: Graph, op: Op, place: int) -> tuple[Table, int]:
    weight, indices, offsets = list(_tensors(graph, op))[:3]
    samples = max(1, offsets.elements)
    pooling = indices.elements / samples
    return Table(f"table_{place}", weight.shape[0], weight.shape[1], pooling, EVEN, _weights(weight)), samples
