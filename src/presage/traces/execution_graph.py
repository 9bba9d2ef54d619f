"""An execution graph as a file gives it: nodes, the tensors they read and wrote, and the order they ran in.

PyTorch execution traces (`et.py`) and Chakra graphs (`chakra.py`) both become an `ExecutionGraph`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from presage.errors import InputError
from presage.graph.dtypes import DTYPES

MOST_BYTES = 1 << 30  # of a file
MOST_NODES = 3_000_000  # a node takes half a kilobyte and more in memory


def check_count(path: str | Path, nodes: int) -> None:
    """That a graph is not too large to be held."""
    if nodes > MOST_NODES:
        raise InputError(path, f"has more than {MOST_NODES:,} nodes: record fewer steps", "nodes")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One mention of a tensor. Ids are reused after a tensor dies, so `id` alone names nothing: see `producers`."""

    id: int
    storage: int
    offset: int
    elements: int
    itemsize: int
    device: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None  # where the file has them


Argument: TypeAlias = TensorRef | int | float | bool | str | tuple["Argument", ...] | None

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExecutionNode:
    """One node. `kind` is process, thread, annotation or op on the host, kernel, memcpy or memset on the GPU;
    Chakra adds collective, send, recv, load, store, metadata, storage and other.

    `parent` is the node it was called from. A backward node has the `sequence` of the forward op it belongs to, and
    `fw_parent` is what was running on the forward thread meanwhile (not the forward op). `record` is an id that newer
    profilers also write beside their events. Times are None where the file has none.
    """

    id: int
    name: str
    kind: str = "op"
    on_gpu: bool = False
    parent: int | None = None
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    thread: int | None = None
    stream: int | None = None
    sequence: int | None = None
    fw_parent: int | None = None
    record: int | None = None
    inputs: tuple[Argument, ...] = ()
    outputs: tuple[Argument, ...] = ()
    op_schema: str = ""
    start_us: float | None = None
    duration_us: float | None = None
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS, hash=False)


@dataclass(frozen=True, slots=True)
class ExecutionGraph:
    """The nodes of one rank in the order they began, no node before one it depends on.

    `dropped_deps` counts control dependencies of the file that the nodes do not carry because they made no sense.
    """

    path: str
    schema: str
    nodes: tuple[ExecutionNode, ...]
    rank: int | None = None
    dropped_deps: int = 0
    # of a trace in which tensors are only likely to be the same: the storages known to be there before the step
    held: frozenset[int] | None = None


def ordered_graph(
    path: str, schema: str, nodes: Sequence[ExecutionNode], rank: int | None = None, dropped_deps: int = 0
) -> ExecutionGraph:
    """Check ids, dependencies and times, and put the nodes in the order they began."""
    if not nodes:
        raise InputError(path, "the file holds no node", "nodes")
    known: set[int] = set()
    for node in nodes:
        if node.id in known:
            raise InputError(path, "two nodes have this id; ids must be unique", f"node {node.id}: id")
        known.add(node.id)
    for node in nodes:
        _check(path, node, known)
    graph = ExecutionGraph(path, schema, tuple(sorted(nodes, key=_began(nodes))), rank, dropped_deps)
    by_id = {node.id: node for node in graph.nodes}
    return replace(graph, nodes=tuple(by_id[i] for i in topological_order(graph)))


def _began(nodes: Sequence[ExecutionNode]) -> Callable[[ExecutionNode], tuple[float, ...]]:
    # Ids count up as nodes begin, until a tool merges GPU events in and hands out new ids; such files have times.
    if all(node.start_us is not None for node in nodes):
        return lambda node: (node.start_us or 0.0, -(node.duration_us or 0.0), node.id)
    return lambda node: (node.id,)


def _check(path: str, node: ExecutionNode, known: set[int]) -> None:
    named = (("parent", _parents(node)), ("ctrl_deps", node.ctrl_deps), ("data_deps", node.data_deps))
    for field_name, ids in named:
        for i in ids:
            if i not in known:
                raise InputError(path, f"there is no node {i} in the file", f"node {node.id}: {field_name}")
    if not isfinite(node.start_us or 0.0):
        raise InputError(path, f"not a time ({node.start_us} us)", f"node {node.id}: start")
    if not (isfinite(node.duration_us or 0.0) and (node.duration_us or 0.0) >= 0.0):
        raise InputError(path, f"a duration must not be negative ({node.duration_us} us)", f"node {node.id}: duration")


def _parents(node: ExecutionNode) -> tuple[int, ...]:
    return () if node.parent is None else (node.parent,)


def topological_order(graph: ExecutionGraph) -> tuple[int, ...]:
    """Node ids, each after its parent and its dependencies; among the free ones the earliest in `graph.nodes` first."""
    position = {node.id: i for i, node in enumerate(graph.nodes)}
    needs = [{position[d] for d in (*_parents(n), *n.ctrl_deps, *n.data_deps)} for n in graph.nodes]
    if all(max(before, default=-1) < i for i, before in enumerate(needs)):
        return tuple(position)
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError as e:
        first, *others = e.args[1]
        problem = f"depends on itself in a circle of {len(others)}; write the file anew"
        raise InputError(graph.path, problem, f"node {graph.nodes[first].id}") from None
    free, order = list(sorter.get_ready()), list[int]()
    heapq.heapify(free)
    while free:
        i = heapq.heappop(free)
        order.append(graph.nodes[i].id)
        sorter.done(i)
        for j in sorter.get_ready():
            heapq.heappush(free, j)
    return tuple(order)


def tensors(arguments: Iterable[Argument]) -> Iterator[TensorRef]:
    """The tensors among the arguments, those inside lists too."""
    for argument in arguments:
        if isinstance(argument, TensorRef):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors(argument)


def producers(graph: ExecutionGraph, identity: Literal["tensor", "storage"] = "tensor") -> dict[int, tuple[int, ...]]:
    """For each host node the nodes that last wrote what it reads.

    A node reads when it begins and writes when it ends, after all it called; that keeps a caller from being its own
    callee's producer. The same `storage` also ties together views of one buffer, needed for writes in place.
    """
    ends = node_ends(graph)
    writer: dict[Hashable, int] = {}
    result: dict[int, tuple[int, ...]] = {}
    for i, node in enumerate(graph.nodes):
        if node.on_gpu:  # carries a copy of the arguments of the op that launched it
            continue
        reads = (writer.get(_key(t, identity)) for t in tensors(node.inputs))
        result[node.id] = tuple(dict.fromkeys(w for w in reads if w is not None))
        for j in ends[i]:
            done = graph.nodes[j]
            writer.update((_key(t, identity), done.id) for t in tensors(done.outputs))
    return result


def _key(tensor: TensorRef, identity: str) -> Hashable:
    return tensor.storage if identity == "storage" else (tensor.id, tensor.storage)


def node_ends(graph: ExecutionGraph) -> list[list[int]]:
    """For each position the nodes that end there, callees first. A node ends with the last host node under it."""
    position = {node.id: i for i, node in enumerate(graph.nodes)}
    last = list(range(len(graph.nodes)))
    ends: list[list[int]] = [[] for _ in last]
    for i in reversed(last.copy()):
        node = graph.nodes[i]
        if node.on_gpu:
            continue
        ends[last[i]].append(i)
        if node.parent is not None:
            p = position[node.parent]
            last[p] = max(last[p], last[i])
    return ends


DEEPEST = 16


class Arguments:
    """Turns values, shapes and types as a file lists them into arguments. Equal tensors become one object.

    What does not fit raises ValueError; the reader knows the file and the node to name.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, TensorRef] = {}

    def read(self, values: Any, shapes: Any, types: Any, strides: Any = None) -> tuple[Argument, ...]:
        if not (isinstance(values, list) and isinstance(shapes, list) and isinstance(types, list)):
            raise ValueError("values, shapes and types must be lists")
        if not len(values) == len(shapes) == len(types):
            raise ValueError(f"{len(values)} values, {len(shapes)} shapes and {len(types)} types must be as many")
        if not (isinstance(strides, list) and len(strides) == len(values)):
            strides = [None] * len(values)
        return tuple(map(self._argument, values, shapes, types, strides))

    def _argument(self, value: Any, shape: Any, kind: Any, strides: Any, depth: int = 0) -> Argument:
        if not isinstance(kind, str):
            raise ValueError(f"a type must be a text, not {kind!r:.40}")
        if kind.startswith("Tensor("):
            return self._tensor(value, shape, kind[len("Tensor(") : -1], strides)
        if not (isinstance(value, list) and "Tensor(" in kind):
            return None if kind == "None" else _plain(value)
        inner = _element_types(kind)
        if depth > DEEPEST or not isinstance(shape, list) or not len(value) == len(shape) == len(inner):
            raise ValueError(f"a list of {len(value)} does not fit its shapes or its type {kind:.40}")
        steps = strides if isinstance(strides, list) and len(strides) == len(value) else [None] * len(value)
        each = zip(value, shape, inner, steps, strict=True)
        return tuple(self._argument(v, s, k, n, depth + 1) for v, s, k, n in each)

    def _tensor(self, value: Any, shape: Any, dtype: str, strides: Any) -> TensorRef | None:
        try:
            steps = tuple(strides) if isinstance(strides, list) and len(strides) == len(shape) else None
            key = (*value, dtype, *shape, steps)
            return self._seen[key]
        except KeyError:
            pass
        except TypeError:
            raise ValueError(f"{value!r:.60} of shape {shape!r:.40} is not a tensor") from None
        if "nullptr" in dtype:  # an optional tensor that was not given
            return None
        numbers = (*value[:5], *shape, *(steps or ()))
        if len(value) != 6 or not all(type(x) is int for x in numbers) or not isinstance(value[5], str):
            raise ValueError(f"{value!r:.60} of shape {shape!r:.40} is not a tensor")
        id_, storage, offset, elements, itemsize, device = value
        name = DTYPES.get(dtype, dtype)
        tensor = TensorRef(id_, storage, offset, elements, itemsize, device, tuple(shape), name, steps)
        return self._seen.setdefault(key, tensor)


def _plain(value: Any, depth: int = 0) -> Argument:
    if isinstance(value, list):
        if depth > DEEPEST:
            raise ValueError(f"lists inside lists, more than {DEEPEST} deep")
        return tuple(_plain(v, depth + 1) for v in value)
    if value is None or isinstance(value, int | float | str):
        return value
    raise ValueError(f"{value!r:.60} is not an argument")


@lru_cache(maxsize=1 << 14)
def _element_types(kind: str) -> tuple[str, ...]:
    """The types inside `GenericList[Tensor(float),Int]`; commas inside brackets do not count."""
    inside = kind[kind.find("[") + 1 : -1]
    if "[" not in inside and "<" not in inside:
        return tuple(inside.split(",")) if inside else ()
    parts, depth, begin = [], 0, 0
    for m in re.finditer(r"[\[(<]|[\])>]|,", inside):
        depth += 1 if m[0] in "[(<" else -1 if m[0] in "])>" else 0
        if m[0] == "," and depth == 0:
            parts.append(inside[begin : m.start()])
            begin = m.end()
    return (*parts, inside[begin:])


ROOTS = tuple(f"[pytorch|profiler|execution_trace|{name}]" for name in ("process", "thread"))
ROOT = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|(process|thread)\]")
USER_SCOPE = 7
PLACELESS = re.compile(r"_?(?:all|reduce_scatter)")


def host_kind(name: str, scope: int | None) -> str:
    if root := ROOT.fullmatch(name):
        return root[1]
    return "annotation" if scope == USER_SCOPE else "op"


def global_rank(nodes: Iterable[ExecutionNode]) -> int | None:
    """The rank that wrote the trace, if its collectives say so: only traces since schema 1.0.2 do.

    A collective's arguments end with (..., rank in group, name, splits in, splits out, first rank of the group,
    stride, group size). Where a root exists, the root stands in the rank's place, so those collectives do not count.
    """
    said = {
        first + rank * stride
        for node in nodes
        if node.name == "record_param_comms" and len(node.inputs) >= 7
        for rank, name, _, _, first, stride, _ in [node.inputs[-7:]]
        if isinstance(name, str) and PLACELESS.match(name)
        if type(rank) is int and type(first) is int and type(stride) is int and first >= 0
    }
    return said.pop() if len(said) == 1 else None
