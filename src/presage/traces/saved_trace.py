"""Graphs written as execution traces: PyTorch's JSON, or Chakra's protobuf for network simulators.

What these formats have no place for stands in attributes of nodes, which other readers skip: whether an op launches
kernels, its stream, its module. Times are predicted: a compute node has the duration of its kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from presage.errors import PresageError
from presage.files import write_whole
from presage.graph.dtypes import DTYPES
from presage.graph.graph import ON_HOST, Graph, Op, Ref, references
from presage.graph.work import WAIT, bytes_moved, collective, collective_bytes, flops
from presage.traces.execution_graph import ROOTS
from presage.traces.traced_groups import COMMS, KINDS
from presage.traces.traced_ops import UNNAMED

SCHEMA = "1.1.1-chakra.0.0.4"
CPP = {dtype: name for name, dtype in reversed(DTYPES.items())}
NAMES = {op: name for name, op in reversed(KINDS.items())}  # what PyTorch calls a collective, by its op in a Graph
OPTIMIZER = "Optimizer.step#step"
# Chakra's numbers of node types and of kinds of collectives
METADATA, COMPUTE, SEND, RECEIVE, COLLECTIVE = 1, 4, 5, 6, 7
COMM_TYPES = {"allreduce": 0, "reduce": 1, "allgather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}


def save_traces(graphs: Sequence[Graph], path: str | Path, seconds: Sequence[Sequence[float]]) -> list[Path]:
    """Write a trace for each rank: FILE.json or FILE.et for one, FILE.0.json, FILE.1.json, ... for several.

    `seconds`: of each graph, how long the kernels of its ops take.
    """
    place = Path(path)
    stem, suffix = next(((place.name.removesuffix(s), s) for s in WRITERS if place.name.endswith(s)), ("", ""))
    if not suffix:
        raise PresageError(f"{path}: a trace is saved as {', '.join(WRITERS)}")
    out = []
    for graph, times in zip(graphs, seconds, strict=True):
        for rank in graph.ranks or (0,):
            several = sum(len(g.ranks) or 1 for g in graphs) > 1
            out.append(place.with_name(f"{stem}.{rank}{suffix}" if several else place.name))
            write_whole(out[-1], WRITERS[suffix](_Writer(graph, times, rank)))
    return out


class _Writer:
    """The nodes of one rank, in PyTorch's JSON form."""

    def __init__(self, graph: Graph, seconds: Sequence[float], rank: int) -> None:
        self.graph, self.seconds, self.rank = graph, seconds, rank
        self.number = 1
        self.open: dict[str, list[tuple[str, int]]] = {}  # by thread, the frames around its last op
        self.wrote: dict[int, int] = {}  # by storage, the node that wrote it last
        self.last: dict[str, int] = {}  # by stream, its last node
        self.called: list[tuple[str, frozenset[int], int]] = []  # collectives: group, tensors, number
        self.news: dict[int, list[int]] = {}  # by op, the storages allocated before it
        for event in graph.events:
            if event.allocates:
                self.news.setdefault(event.op, []).append(event.storage)

    def nodes(self) -> Iterator[dict[str, Any]]:
        yield self._node(ROOTS[0], 1)
        threads = {}
        for k, thread in enumerate(dict.fromkeys(op.thread for op in self.graph.ops)):
            threads[thread] = self._next()
            yield self._node(ROOTS[1], 1, number=threads[thread], tid=k + 1)
        tid = {thread: k + 1 for k, thread in enumerate(threads)}
        for i, op in enumerate(self.graph.ops):
            frames = ((OPTIMIZER, *op.within) if op.phase == "optimizer" else op.within) or ()
            opened = self.open.setdefault(op.thread, [])
            same = next((k for k, (a, b) in enumerate(zip(opened, frames, strict=False)) if a[0] != b), None)
            del opened[min(len(opened), len(frames)) if same is None else same :]
            for name in frames[len(opened) :]:
                parent = opened[-1][1] if opened else threads[op.thread]
                opened.append((name, self._next()))
                scope = 7 if name == OPTIMIZER else 0
                yield self._node(name, parent, number=opened[-1][1], tid=tid[op.thread], scope=scope)
            parent = opened[-1][1] if opened else threads[op.thread]
            yield from self._op(i, op, parent, tid[op.thread])

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _op(self, i: int, op: Op, parent: int, tid: int) -> Iterator[dict[str, Any]]:
        made = {self.graph.tensors[t].storage for t in op.outputs}
        for storage in self.news.get(i, ()):
            if storage not in made:  # as the allocator's call that the op does not show
                shape = [[self.graph.storages[storage].nbytes]]
                value = [[10**7 + storage, storage + 1, 0, shape[0][0], 1, "cuda:0"]]
                outputs = {"values": value, "shapes": shape, "types": ["Tensor(unsigned char)"], "strides": [[1]]}
                yield self._node("aten::empty", parent, number=self._next(), tid=tid, outputs=outputs, hidden=1)
        number = self._next()
        extra = {"kernels": int(op.kernels), "sync": int(op.sync), "stream": op.stream, "module": op.module}
        more = (
            self._message(op, number) if collective(op) else self._wait(op) if op.name == WAIT else self._arguments(op)
        )
        name, size = more.pop("name", op.name), (flops(self.graph, op), bytes_moved(self.graph, op).total)
        more |= {"seq_id": op.sequence, "dur": self.seconds[i] * 1e6, "deps": self._deps(op, number), "work": size}
        yield self._node(name, parent, number=number, tid=tid, **more, **extra)

    def _deps(self, op: Op, number: int) -> list[int]:
        """The nodes that wrote what an op reads, and the one before it on its stream."""
        used = {self.graph.tensors[t.id].storage for t in self.graph.inputs_of(op)}
        found = {self.wrote[s] for s in used if s in self.wrote}
        if op.kernels:
            found |= {self.last[op.stream]} if op.stream in self.last else set()
            self.last[op.stream] = number
            for t in (*op.outputs, *op.writes):
                self.wrote[self.graph.tensors[t].storage] = number
        return sorted(found)

    def _arguments(self, op: Op) -> dict[str, Any]:
        names = op.names or tuple(f"{UNNAMED}{k}" for k in range(len(op.inputs)))
        written = set(op.writes)
        kinds = ["Tensor(a!)" if written & {*references([v])} else "Tensor" for v in op.inputs]
        listed = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
        schema = f"{op.name}{'.' * bool(op.overload)}{op.overload}({listed}) -> Tensor"
        return {"inputs": self._io(op.inputs), "outputs": self._io([Ref(t) for t in op.outputs]), "op_schema": schema}

    def _wait(self, op: Op) -> dict[str, Any]:
        """A wait names the collective before it on its tensors."""
        used = frozenset(references(op.inputs))
        before = next((n for group, tensors, n in reversed(self.called) if group == op.group and tensors & used), 0)
        return {"name": COMMS, "inputs": self._io([before, ["", ""], self.rank, "wait", [], [], -1, -1, 1])}

    def _message(self, op: Op, number: int) -> dict[str, Any]:
        """A collective's arguments, as PyTorch records them."""
        self.called.append((op.group, frozenset(references(op.inputs)), number))
        name, ranks = NAMES.get(op.name, "allreduce"), self.graph.groups.get(op.group, ())
        pair = op.group.rpartition(" to ")
        there = next((r for r in ranks if r != self.rank), self.rank) if pair[1] else self.rank
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        into = [Ref(t) for t in op.writes]
        sent = [Ref(t) for t in references(op.inputs) if t not in op.writes]
        rest = [
            number,
            [op.group, "undefined"],
            there,
            name,
            [],
            [],
            ranks[0] if ranks else -1,
            stride,
            max(len(ranks), 1),
        ]
        inputs = self._io([sent or into, *rest])
        extra = {"ranks": " ".join(map(str, ranks)), "group": op.group, "comm_size": collective_bytes(self.graph, op)}
        return {"name": COMMS, "inputs": inputs, "outputs": self._io(into), "comm": name, **extra}

    def _io(self, values: Sequence[Any]) -> dict[str, Any]:
        parts = [self._value(v) for v in values]
        keys = ("values", "shapes", "types", "strides")
        return {key: [part[k] for part in parts] for k, key in enumerate(keys)}

    def _value(self, value: Any) -> tuple[Any, Any, str, Any]:
        if isinstance(value, Ref):
            t = self.graph.tensors[value.id]
            place = "cpu" if self.graph.storages[t.storage].name in ON_HOST else "cuda:0"
            kind = f"Tensor({CPP.get(t.dtype, t.dtype)})"
            count = t.elements if len(t.strides) == len(t.shape) else 0  # a sparse tensor's are those of its values
            return [t.id + 1, t.storage + 1, t.offset, count, t.itemsize, place], [*t.shape], kind, [*t.strides]
        if isinstance(value, list):
            parts = [self._value(v) for v in value]
            kinds = ",".join(p[2] for p in parts)
            return [p[0] for p in parts], [p[1] for p in parts], f"GenericList[{kinds}]", [p[3] for p in parts]
        kind = "None" if value is None else {bool: "Bool", int: "Int", float: "Double"}.get(type(value), "String")
        return "<None>" if value is None else value, [], kind, []

    def _node(self, name: str, parent: int, number: int = 1, **known: Any) -> dict[str, Any]:
        empty: dict[str, list[Any]] = {"values": [], "shapes": [], "types": [], "strides": []}
        fields = {
            "rf_id": 0,
            "fw_parent": 0,
            "seq_id": -1,
            "scope": 7 if name in ROOTS else 0,
            "tid": 1,
            "op_schema": "",
        }
        attrs = fields | {
            k: v for k, v in known.items() if k not in ("inputs", "outputs", "deps", "dur", "work", "comm")
        }
        return {
            "id": number, "name": name, "ctrl_deps": parent, "inputs": known.get("inputs", empty),
            "outputs": known.get("outputs", empty), "attrs": attrs, "dur": known.get("dur", 0.0),
            "deps": known.get("deps", []), "work": known.get("work", (0, 0)), "comm": known.get("comm", ""),
        }  # fmt: skip


def _type(value: Any) -> str:
    return {int: "int64", float: "double"}.get(type(value), "string")


def _json(writer: _Writer) -> bytes:
    nodes = []
    for node in writer.nodes():
        attrs = [
            {"name": k, "type": _type(v), "value": v} for k, v in node["attrs"].items() if v != "" or k == "op_schema"
        ]
        kept = {k: node[k] for k in ("id", "name", "ctrl_deps", "inputs", "outputs")}
        nodes.append(kept | {"attrs": attrs, **({"dur": node["dur"]} if node["dur"] else {})})
    head = {"schema": SCHEMA, "pid": 0, "time": "", "start_ts": 0, "nodes": nodes, "finish_ts": 0}
    return msgspec.json.encode(head)


def _chakra(writer: _Writer) -> bytes:
    """Messages after their lengths: the metadata, then the nodes; fields are numbered as in Chakra's schema."""
    out = [_field(1, "0.0.4") + _field(2, _attribute("schema", SCHEMA))]
    for node in writer.nodes():
        kind = {"": COMPUTE, "send": SEND, "recv": RECEIVE}.get(node["comm"], COLLECTIVE)
        attrs = {k: v for k, v in node["attrs"].items() if v != ""} | {"is_cpu_op": not node["attrs"].get("kernels")}
        attrs |= {"num_ops": int(node["work"][0]), "tensor_size": int(node["work"][1])} if kind == COMPUTE else {}
        if kind == COLLECTIVE:
            attrs |= {"comm_type": COMM_TYPES.get(node["comm"], 0), "pg_name": node["attrs"]["group"]}
        message = _field(1, node["id"]) + _field(2, node["name"]) + _field(3, kind if node["id"] > 1 else METADATA)
        message += _field(4, b"".join(map(_varint, [node["ctrl_deps"]]))) if node["id"] > 1 else b""
        message += _field(5, b"".join(map(_varint, node["deps"]))) if node["deps"] else b""
        message += (
            _field(7, round(node["dur"])) + _field(8, _listed(node["inputs"])) + _field(9, _listed(node["outputs"]))
        )
        out.append(message + b"".join(_field(10, _attribute(k, v)) for k, v in attrs.items()))
    return b"".join(_varint(len(message)) + message for message in out)


def _listed(io: dict[str, Any]) -> bytes:
    return b"".join(_field(k + 1, repr(io[key])) for k, key in enumerate(("values", "shapes", "types", "strides")))


def _attribute(name: str, value: Any) -> bytes:
    place = {bool: 27, str: 29, float: 3}.get(type(value), 9)
    return _field(1, name) + _field(place, value)


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(int(value) & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


WRITERS = {".json.gz": _json, ".json": _json, ".et.gz": _chakra, ".et": _chakra}
