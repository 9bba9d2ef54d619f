"""Chakra execution graphs: protobuf (.et) and the JSON that Chakra's feeder reads, plain or gzip.

A protobuf file is a row of messages, each after its length: one GlobalMetadata, then the nodes. The schema is small and
its field numbers have not changed since late 2023, so the wire format is decoded here. Files of the two schemas before
that use the same numbers for other things; they are recognised and refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

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
from presage.traces.execution_trace import ABSENT, decode_json

KINDS = ("other", "metadata", "load", "store", "op", "send", "recv", "collective", "storage")
COMPUTE = KINDS.index("op")
NAMED_ATTRS = frozenset({"rf_id", "fw_parent", "seq_id", "scope", "tid", "op_schema", "is_cpu_op", "stream"})


def read_chakra(path: str | Path) -> ExecutionGraph:
    """The execution graph in a Chakra file of either form."""
    data = read_bytes(path, MOST_BYTES)
    return _read_json(str(path), data) if _is_json(data) else _read_protobuf(str(path), data)


def _is_json(data: bytes) -> bool:
    # The first byte of a protobuf file is a length and may well be a brace, but small control bytes follow soon.
    head = data[:256].lstrip()
    return head[:1] in (b"{", b"[") and not any(byte < 32 and byte not in b"\t\n\r" for byte in head)


class _Graph(msgspec.Struct):
    workload_graph: list[msgspec.Raw] | None = None
    nodes: msgspec.Raw = ABSENT
    traceEvents: msgspec.Raw = ABSENT


class _JsonNode(msgspec.Struct):
    Id: int
    Name: str
    NodeType: int
    ctrlDeps: list[int] = []
    data_deps: list[int] = []
    runtime: float | None = None
    is_cpu_op: bool = True


def _read_json(path: str, data: bytes) -> ExecutionGraph:
    file = decode_json(path, data, msgspec.json.Decoder(_Graph))
    if file.workload_graph is None:
        if file.nodes != ABSENT:
            raise InputError(path, "this is a PyTorch execution trace, not a Chakra graph; open it as such")
        if file.traceEvents != ABSENT:
            raise InputError(path, "this is a Kineto profiler trace, not a Chakra graph; open it as a Kineto trace")
        raise InputError(path, "no such list in the file: this is not a Chakra graph", "workload_graph")
    check_count(path, len(file.workload_graph))
    decoder = msgspec.json.Decoder(dict[str, Any])
    found = (decode_json(path, r, decoder, f"workload_graph[{i}]") for i, r in enumerate(file.workload_graph))
    return _graph(path, "chakra-json", [_json_node(path, i, raw) for i, raw in enumerate(found)])


def _graph(path: str, schema: str, nodes: list[ExecutionNode]) -> ExecutionGraph:
    """The graph, less the control dependencies on nodes that were left out of the file."""
    known = {node.id for node in nodes}
    kept = [node if known.issuperset(node.ctrl_deps) else _within(node, known) for node in nodes]
    written, rank = sum(len(node.ctrl_deps) for node in nodes), global_rank(nodes)
    try:
        return ordered_graph(path, schema, kept, rank, written - sum(len(node.ctrl_deps) for node in kept))
    except InputError:
        # Early converters gave nodes new ids and left the old ones in the control dependencies, which then run in
        # circles. Chakra's own feeder goes by the data dependencies, and by themselves these may still be sound.
        bare = [replace(node, parent=None, ctrl_deps=()) for node in nodes]
        return ordered_graph(path, schema, bare, rank, written)


def _within(node: ExecutionNode, known: set[int]) -> ExecutionNode:
    ctrl_deps = tuple(dep for dep in node.ctrl_deps if dep in known)
    return replace(node, ctrl_deps=ctrl_deps, parent=node.parent if node.parent in known else None)


def _json_node(path: str, i: int, raw: dict[str, Any]) -> ExecutionNode:
    try:
        node = convert_record(raw, _JsonNode)
    except msgspec.ValidationError as e:
        problem, _, where = str(e).partition(" - at `$")
        raise InputError(path, problem, f"workload_graph[{i}]{where.rstrip('`')}") from None
    rest = {key: value for key, value in raw.items() if key not in _JsonNode.__struct_fields__}
    return ExecutionNode(
        id=node.Id,
        name=intern(node.Name),
        kind=_kind(node.NodeType, node.Name, node.is_cpu_op, None),
        on_gpu=not node.is_cpu_op,
        ctrl_deps=tuple(node.ctrlDeps),
        data_deps=tuple(node.data_deps),
        duration_us=node.runtime,
        attrs=rest or NO_ATTRS,
    )


def _kind(number: int, name: str, on_host: bool, scope: int | None) -> str:
    if number == COMPUTE:
        return host_kind(name, scope) if on_host else "kernel"
    return KINDS[number] if 0 <= number < len(KINDS) else "other"


# Protobuf. What does not fit raises ValueError; `_read_protobuf` adds the file and the message.

ANOTHER_SCHEMA = "is not of its type in Chakra's schema since late 2023; convert the trace again with a newer Chakra"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
TIMES = ("start_time_micros", "duration_micros")
NODE = ("", "id", "name", "type", "ctrl_deps", "data_deps", *TIMES, "inputs", "outputs", "attr")
TEXTS = frozenset({"name", "inputs", "outputs", "attr"})
LISTS = frozenset({"ctrl_deps", "data_deps"})


def _read_protobuf(path: str, data: bytes) -> ExecutionGraph:
    nodes: list[ExecutionNode] = []
    meta: dict[str, Any] = {}
    read = Arguments()
    at = 0
    try:
        while at < len(data):
            message, end = _sized(data, at)
            if at == 0:
                meta = _metadata(message)
            else:
                nodes.append(_node(message, read, "schema" in meta))
                check_count(path, len(nodes))
            at = end
    except ValueError as e:
        where = f"message {len(nodes) + (at > 0)} at byte {at}"
        raise InputError(path, f"not a readable Chakra graph: {e}", where) from None
    return _graph(path, str(meta.get("schema") or meta.get("version") or "chakra"), nodes)


def _metadata(message: bytes) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for number, wire, value in _fields(message):
        if wire != BYTES:
            raise ValueError(f"the first message is not global metadata: field {number} {ANOTHER_SCHEMA}")
        if number == 2 or (number == 1 and value[:1] == b"\n"):  # attributes were field 1 before there was a version
            name, attribute = _attribute(value)
            result[name] = attribute
        elif number == 1:
            result["version"] = _text(value)
    return result


def _node(message: bytes, read: Arguments, converted: bool) -> ExecutionNode:
    """One node. In a graph converted from PyTorch a node's one control dependency is the node it was called from."""
    values, attrs = _node_fields(message)
    on_host = bool(attrs.get("is_cpu_op", True)) or "kernels" in attrs  # presage writes an op and its kernels as one
    ctrl_deps = tuple(values["ctrl_deps"])
    tid, stream, scope, sequence = (_int(attrs, name) for name in ("tid", "stream", "scope", "seq_id"))
    rest = {k: v for k, v in attrs.items() if k not in NAMED_ATTRS and (v or k != "fw_tid") and v != ""}
    return ExecutionNode(
        id=values["id"],
        name=intern(values["name"]),
        kind=_kind(values["type"], values["name"], on_host, scope),
        on_gpu=not on_host,
        parent=ctrl_deps[0] if converted and len(ctrl_deps) == 1 else None,
        ctrl_deps=ctrl_deps,
        data_deps=tuple(values["data_deps"]),
        thread=tid if on_host else None,
        stream=None if on_host else tid if stream is None else stream,
        sequence=sequence if sequence is not None and sequence >= 0 else None,
        fw_parent=_int(attrs, "fw_parent") or None,
        record=_int(attrs, "rf_id") or None,
        inputs=_arguments(values["inputs"], read),
        outputs=_arguments(values["outputs"], read),
        op_schema=intern(str(attrs.get("op_schema", ""))),
        start_us=_time(values["start_time_micros"]),
        duration_us=_time(values["duration_micros"]),
        attrs=rest or NO_ATTRS,
    )


def _node_fields(message: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    values: dict[str, Any] = dict.fromkeys(TIMES)
    values |= {"id": 0, "type": 0, "name": "", "ctrl_deps": [], "data_deps": [], "inputs": b"", "outputs": b""}
    attrs: dict[str, Any] = {}
    for number, wire, value in _fields(message):
        if not 0 < number < len(NODE):
            continue
        name = NODE[number]
        if wire != (BYTES if name in TEXTS else VARINT) and not (name in LISTS and wire == BYTES):
            raise ValueError(f"the node's field {number} ({name}) {ANOTHER_SCHEMA}")
        if name == "attr":
            key, attribute = _attribute(value)
            attrs[key] = attribute
        elif name in LISTS:
            values[name] += _varints(value) if wire == BYTES else [value]
        else:
            values[name] = _text(value) if name == "name" else value
    return values, attrs


def _int(attrs: Mapping[str, Any], name: str) -> int | None:
    value = attrs.get(name)
    return value if isinstance(value, int) else None


def _time(micros: int | None) -> float | None:
    return None if micros is None else float(_signed(micros))


def _arguments(message: bytes, read: Arguments) -> tuple[Argument, ...]:
    texts = {number: value for number, wire, value in _fields(message) if wire == BYTES}
    if not any(texts.values()):
        return ()
    values, shapes, types, strides = (_literal(_text(texts.get(number, b"[]"))) for number in (1, 2, 3, 4))
    return read.read(values, shapes, types, strides)


QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|(True|False|None|-?inf|nan)", re.DOTALL)
ESCAPED = re.compile(r"\\(x..|.)|\"", re.DOTALL)
WORDS = {"True": "true", "False": "false", "None": "null", "inf": '"inf"', "-inf": '"-inf"', "nan": '"nan"'}


@lru_cache(maxsize=1 << 9)  # shapes and types repeat; no caller changes what it gets
def _literal(text: str) -> Any:
    """A list as Python prints it, without running anything: rewritten as JSON and decoded."""
    try:
        return msgspec.json.decode(QUOTED.sub(_as_json, text))
    except (msgspec.DecodeError, RecursionError) as e:
        raise ValueError(f"{text!r:.60} is not a list of arguments ({e})") from None


def _as_json(m: re.Match[str]) -> str:
    if m[3]:
        return WORDS[m[3]]
    inside = m[1] if m[1] is not None else m[2]
    return f'"{ESCAPED.sub(_escaped, inside)}"' if "\\" in inside or '"' in inside else f'"{inside}"'


def _escaped(m: re.Match[str]) -> str:
    if m[0] == '"':
        return '\\"'
    if m[1] == "'":
        return "'"
    return f"\\u00{m[1][1:]}" if m[1][0] == "x" else m[0]


@lru_cache(maxsize=1 << 12)  # most nodes say the same of themselves
def _attribute(message: bytes) -> tuple[str, Any]:
    name, found = "", None
    for number, wire, value in _fields(message):
        if number == 1 and wire == BYTES:
            name = _text(value)
        elif number == 2 and wire != BYTES:
            raise ValueError(f"an attribute's field 2 (doc_string) {ANOTHER_SCHEMA}")
        elif number in SCALARS:
            found = _scalar(number, wire, value)
        elif number - 1 in SCALARS:
            found = tuple(_elements(number - 1, value)) if wire == BYTES else None
    return intern(name), found


class _Scalar(NamedTuple):
    wire: int
    decode: Callable[[Any], Any]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _fixed(code: str) -> _Scalar:
    layout = struct.Struct("<" + code)
    return _Scalar(FIXED64 if layout.size == 8 else FIXED32, lambda value: layout.unpack(value)[0])


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{value[:40]!r} is not a text") from None


SCALARS = {  # an attribute's value by field number; the number above each is a list of the same
    3: _fixed("d"),
    5: _fixed("f"),
    7: _Scalar(VARINT, _signed),
    9: _Scalar(VARINT, _signed),
    11: _Scalar(VARINT, int),
    13: _Scalar(VARINT, int),
    15: _Scalar(VARINT, _zigzag),
    17: _Scalar(VARINT, _zigzag),
    19: _fixed("I"),
    21: _fixed("Q"),
    23: _fixed("i"),
    25: _fixed("q"),
    27: _Scalar(VARINT, bool),
    29: _Scalar(BYTES, _text),
    31: _Scalar(BYTES, bytes),
}


def _scalar(number: int, wire: int, value: Any) -> Any:
    if wire != SCALARS[number].wire:
        raise ValueError(f"an attribute's field {number} {ANOTHER_SCHEMA}")
    return SCALARS[number].decode(value)


def _elements(number: int, message: bytes) -> Iterator[Any]:
    kind = SCALARS[number]
    size = 8 if kind.wire == FIXED64 else 4
    for field, wire, value in _fields(message):
        if field != 1:
            continue
        if wire == kind.wire:
            yield kind.decode(value)
        elif wire == BYTES and kind.wire == VARINT:
            yield from map(kind.decode, _varints(value))
        elif wire == BYTES and len(value) % size == 0:
            yield from (kind.decode(value[i : i + size]) for i in range(0, len(value), size))
        else:
            raise ValueError(f"a list in an attribute's field {number + 1} {ANOTHER_SCHEMA}")


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field; the value is an int for wire type 0 and bytes otherwise."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
        elif wire == BYTES:
            part, at = _sized(message, at)
            yield number, wire, part
        elif wire in (FIXED64, FIXED32):
            end = at + (8 if wire == FIXED64 else 4)
            if end > len(message):
                raise ValueError(f"field {number} is cut short")
            yield number, wire, message[at:end]
            at = end
        else:
            raise ValueError(f"field {number} has wire type {wire}, which protobuf does not use")


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    size, begin = _varint(data, at)
    if begin + size > len(data):
        raise ValueError(f"{size} bytes announced, {len(data) - begin} left: the file is cut short or is not protobuf")
    return data[begin : begin + size], begin + size


def _varints(data: bytes) -> list[int]:
    result, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        result.append(value)
    return result


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128 and value < 1 << 64:
                return value, at
            shift += 7
    except IndexError:
        raise ValueError("a number is cut short") from None
    raise ValueError("a number has more than 64 bits")
