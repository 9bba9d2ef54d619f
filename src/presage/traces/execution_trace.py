"""PyTorch execution traces (ET): JSON, plain or gzip, in all the shapes that PyTorch has written.

Schema 1.0.1 has flat fields; since 1.0.2 a node has `attrs`, and `ctrl_deps` names its parent. Files with GPU kernels
merged in (`et_plus`) add times to every node and one node for each kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from sys import intern
from typing import Any, TypeVar

import msgspec

from presage.errors import InputError
from presage.files.decoding import convert_record
from presage.files.reading import read_bytes
from presage.traces.execution_graph import (
    MOST_BYTES,
    NO_ATTRS,
    Argument,
    Arguments,
    ExecutionGraph,
    ExecutionNode,
    check_count,
    global_rank,
    host_kind,
    ordered_graph,
)

T = TypeVar("T")

GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
NAMED_ATTRS = frozenset({"rf_id", "fw_parent", "seq_id", "scope", "tid", "op_schema"})


ABSENT = msgspec.Raw()
MOST_ORPHANS = 0.2  # of a file's nodes; with more without their parent it is damaged
BACKWARD = "autograd::engine::evaluate_function"


class _Attr(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Io(msgspec.Struct):
    values: list[Any]
    shapes: list[Any]
    types: list[Any]
    strides: list[Any] | None = None


class _Node(msgspec.Struct):
    id: int
    name: str
    inputs: _Io | list[Any]
    outputs: _Io | list[Any]
    parent: int | None = None
    ctrl_deps: int | list[int] | None = None
    attrs: list[_Attr] = []
    input_shapes: list[Any] = []
    input_types: list[Any] = []
    output_shapes: list[Any] = []
    output_types: list[Any] = []
    rf_id: int | None = None
    fw_parent: int | None = None
    seq_id: int | None = None
    scope: int | None = None
    tid: int | None = None
    fw_tid: int | None = None
    op_schema: str = ""
    ts: float | None = None
    dur: float | None = None
    inclusive_dur: float | None = None
    cat: str | None = None
    args: dict[str, Any] = {}


class _File(msgspec.Struct):
    schema: str = ""
    nodes: list[msgspec.Raw] | None = None  # decoded one by one: all at once would take several times the memory
    traceEvents: msgspec.Raw = ABSENT
    workload_graph: msgspec.Raw = ABSENT


class _Named(msgspec.Struct, gc=False):
    """The attributes that become fields of a node, checked."""

    rf_id: int | None = None
    fw_parent: int | None = None
    seq_id: int | None = None
    scope: int | None = None
    tid: int | None = None
    op_schema: str = ""


def read_et(path: str | Path) -> ExecutionGraph:
    """The execution graph in a PyTorch execution trace."""
    file = decode_json(path, read_bytes(path, MOST_BYTES), msgspec.json.Decoder(_File))
    if file.nodes is None:
        raise _another_kind(path, file)
    check_count(path, len(file.nodes))
    decoder, read = msgspec.json.Decoder(_Node), Arguments()
    nodes = [_node(str(path), decode_json(path, r, decoder, f"nodes[{i}]"), read) for i, r in enumerate(file.nodes)]
    kept, orphans = _adopted(nodes)
    return ordered_graph(str(path), file.schema, kept, global_rank(nodes), orphans)


def _adopted(nodes: list[ExecutionNode]) -> tuple[list[ExecutionNode], int]:
    """Nodes without their parent, moved to the frame of autograd around them; and how many.

    The observer writes a call when it returns, so that one ended by an exception is missing: checkpointing stops the
    recomputation of a block like that.
    """
    by_id = {node.id: node for node in nodes}
    orphans = [n for n in nodes if n.parent is not None and n.parent not in by_id]
    if not orphans or len(orphans) > MOST_ORPHANS * len(nodes):
        return nodes, 0
    new: dict[int, int | None] = {}
    frame: dict[int | None, int | None] = {}  # by thread, the last frame of autograd that began
    root: dict[int | None, int | None] = {n.thread: n.id for n in nodes if n.kind == "thread"}
    for node in sorted(nodes, key=lambda n: n.id):
        begins = node.name.startswith(BACKWARD)
        if node.parent is not None and node.parent not in by_id:
            new[node.id] = root.get(node.thread) if begins else frame.get(node.thread, root.get(node.thread))
        if begins:
            frame[node.thread] = node.id
    return [replace(n, parent=new[n.id]) if n.id in new else n for n in nodes], len(orphans)


def _another_kind(path: str | Path, file: _File) -> InputError:
    if file.traceEvents != ABSENT:
        return InputError(path, "this is a Kineto profiler trace, not an execution trace; open it as a Kineto trace")
    if file.workload_graph != ABSENT:
        return InputError(
            path, "this is a Chakra graph in JSON, not a PyTorch execution trace; open it as a Chakra graph"
        )
    return InputError(path, "no such list in the file: this is not a PyTorch execution trace", "nodes")


def decode_json(path: str | Path, text: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str = "") -> T:
    """Decode checked JSON, or say where in which file it is wrong. `field` is where the text stands in the file."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as e:
        problem, _, where = str(e).partition(" - at `$")
        if not where and not field and bytes(text).lstrip()[:1] != b"{":
            problem = "an execution graph is a JSON object, and this file holds something else (a list of events?)"
        raise InputError(path, problem, (field + where.rstrip("`")).strip(".") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InputError(path, _not_json(bytes(text), str(e)), field or None) from None
    except RecursionError:
        raise InputError(path, "the JSON is nested too deeply to be an execution graph", field or None) from None


def _not_json(text: bytes, error: str) -> str:
    if not text.strip():
        return "the file is empty"
    if "truncated" in error:
        return "the JSON ends in the middle: stop the observer before reading, or copy the file again"
    if text.lstrip()[:1] not in (b"{", b"["):
        return "not JSON; if it is a Chakra graph in protobuf, open it as a Chakra graph"
    return f"not JSON ({error})"


def _node(path: str, raw: _Node, read: Arguments) -> ExecutionNode:
    named, attrs = _attributes(path, raw)
    on_gpu = raw.cat is not None
    if raw.cat is not None and raw.cat not in GPU_KINDS:
        raise InputError(path, f"{raw.cat!r:.40} is none of {', '.join(GPU_KINDS)}", f"node {raw.id}: cat")
    return ExecutionNode(
        id=raw.id,
        name=intern(raw.name),
        kind=GPU_KINDS[raw.cat] if raw.cat is not None else host_kind(raw.name, named.scope),
        on_gpu=on_gpu,
        parent=_parent(path, raw),
        thread=None if on_gpu else named.tid,
        stream=named.tid if on_gpu else None,
        sequence=named.seq_id if named.seq_id is not None and named.seq_id >= 0 else None,
        fw_parent=named.fw_parent or None,
        record=named.rf_id or None,
        inputs=_arguments(path, raw, "inputs", raw.inputs, raw.input_shapes, raw.input_types, read),
        outputs=_arguments(path, raw, "outputs", raw.outputs, raw.output_shapes, raw.output_types, read),
        op_schema=intern(named.op_schema),
        start_us=raw.ts,
        duration_us=raw.dur if raw.dur is not None else raw.inclusive_dur,
        attrs=attrs,
    )


def _attributes(path: str, raw: _Node) -> tuple[_Node | _Named, Mapping[str, Any]]:
    """Where the node's named values stand, and the rest that says something."""
    if not raw.attrs:
        rest = {"fw_tid": raw.fw_tid} if raw.fw_tid else {}
        return raw, rest | raw.args if rest or raw.args else NO_ATTRS
    found = {a.name: a.value for a in raw.attrs}
    try:
        named = convert_record(found, _Named)
    except msgspec.ValidationError as e:
        raise InputError(path, str(e), f"node {raw.id}: attrs") from None
    rest = {k: v for k, v in found.items() if k not in NAMED_ATTRS and (v or k != "fw_tid") and v != ""}
    return named, rest | raw.args if rest or raw.args else NO_ATTRS


def _parent(path: str, raw: _Node) -> int | None:
    parent = raw.parent if raw.parent is not None else raw.ctrl_deps
    if isinstance(parent, list):
        if len(parent) > 1:
            raise InputError(path, "more than one parent", f"node {raw.id}: ctrl_deps")
        parent = parent[0] if parent else None
    return None if parent == raw.id else parent  # the root of all names itself


def _arguments(
    path: str, raw: _Node, field: str, io: _Io | list[Any], shapes: list[Any], types: list[Any], read: Arguments
) -> tuple[Argument, ...]:
    try:
        if isinstance(io, _Io):
            return read.read(io.values, io.shapes, io.types, io.strides)
        return read.read(io, shapes, types)
    except ValueError as e:
        raise InputError(path, str(e), f"node {raw.id}: {field}") from None
