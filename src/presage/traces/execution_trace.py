"""PyTorch execution traces (ET): JSON, plain or gzip, in all the shapes that PyTorch has written.

Schema 1.0.1 has flat fields; since 1.0.2 a node has `attrs`, and `ctrl_deps` names its parent. Files with GPU kernels
merged in (`et_plus`) add times to every node and one node for each kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any, TypeAlias, TypeVar

import msgspec

from presage.errors import InputError
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


class _Attr(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Io(msgspec.Struct):
    values: list[Any]
    shapes: list[Any]
    types: list[Any]


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
    return ordered_graph(str(path), file.schema, nodes, global_rank(nodes))


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
        named = msgspec.convert(found, _Named)
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
            return read.read(io.values, io.shapes, io.types)
        return read.read(io, shapes, types)
    except ValueError as e:
        raise InputError(path, str(e), f"node {raw.id}: {field}") from None


# The link between an execution trace and a profiler trace of the same step. No id is in both, but each thread runs the
# same things in the same order in both, so their names line up, but for what only one of them saw.

GRAM = 8  # names in a row that rarely repeat within a step by chance
RARE = 64  # a run of names found more often than this says little about where we are
TRIES = 32
REACH = {3: 1024, 2: 64, 1: 8}  # after a mismatch: how far away so many equal names in a row may lie


@dataclass(frozen=True, slots=True)
class KinetoLink:
    """Where the nodes of a graph are in a profiler trace: `positions[i]` of `nodes[i]` in its thread's events, or -1.

    `threads` gives the profiler's thread for each thread of the graph.
    """

    threads: Mapping[int, Hashable]
    positions: tuple[int, ...]


def link_to_kineto(
    graph: ExecutionGraph,
    names: Mapping[Any, Sequence[str]],
    sequences: Mapping[Any, Sequence[int | None]] | None = None,
) -> KinetoLink:
    """Match host nodes with profiler events, thread by thread, in order, by name.

    `names` holds for each profiler thread the names of its host operators and annotations ordered by start, the longer
    first of two that start together. Where the profiler saw many equal steps, names cannot tell which of them the graph
    is; `sequences`, the sequence number of each of these events or None, can.
    """
    ours: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.thread is not None and not node.on_gpu and node.kind not in ("process", "thread"):
            ours.setdefault(node.thread, []).append(i)
    sides = {t: _Side.of_nodes(graph, at) for t, at in ours.items()}
    theirs = {t: _Side(tuple(n), tuple((sequences or {}).get(t, ()))) for t, n in names.items()}
    positions = [-1] * len(graph.nodes)
    threads: dict[int, Hashable] = {}
    for ours_id, theirs_id, starts in _pairs(sides, theirs):
        if ours_id not in threads and theirs_id not in threads.values():
            threads[ours_id] = theirs_id
            for i, j in _best(sides[ours_id].names, theirs[theirs_id].names, starts):
                positions[ours[ours_id][i]] = j
    return KinetoLink(threads, tuple(positions))


@dataclass(frozen=True, slots=True)
class _Side:
    names: tuple[str, ...]
    sequences: tuple[int | None, ...]

    @classmethod
    def of_nodes(cls, graph: ExecutionGraph, at: Iterable[int]) -> _Side:
        nodes = [graph.nodes[i] for i in at]
        return cls(tuple(n.name for n in nodes), tuple(n.sequence for n in nodes))

    def grams(self, length: int) -> Iterator[tuple[Hashable, int]]:
        for i in range(len(self.names) - length + 1):
            yield self.names[i : i + length], i

    def numbered(self) -> Iterator[tuple[Hashable, int]]:
        pairs = zip(self.names, self.sequences, strict=False)
        return (((name, number), i) for i, (name, number) in enumerate(pairs) if number is not None)


Keys: TypeAlias = Iterable[tuple[Hashable, int]]
Match: TypeAlias = tuple[int, int]


def _pairs(ours: Mapping[int, _Side], theirs: Mapping[Any, _Side]) -> list[tuple[int, Any, list[Match]]]:
    """(our thread, their thread, matches to begin at), the surest first. Sequence numbers are surer than names."""
    found = []
    for a, mine in ours.items():
        for b, other in theirs.items():
            length = min(GRAM, len(mine.names), len(other.names))
            sure, starts = _vote(mine.numbered(), other.numbered())
            likely, likely_starts = _vote(mine.grams(length), other.grams(length))
            if sure or likely:
                found.append(((sure, likely), a, b, starts or likely_starts))
    return [pair[1:] for pair in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _vote(ours: Keys, theirs: Keys) -> tuple[int, list[Match]]:
    """The shifts that most of the rarer keys agree on: how many agree on the first of them, and a match for each."""
    places: dict[Hashable, list[int]] = {}
    for key, j in theirs:
        places.setdefault(key, []).append(j)
    shared = [(i, places[key]) for key, i in ours if key in places]
    limit = max(RARE, min((len(at) for _, at in shared), default=0))
    votes: Counter[int] = Counter()
    first: dict[int, Match] = {}
    for i, at in shared:
        for j in at if len(at) <= limit else ():
            votes[j - i] += 1
            first.setdefault(j - i, (i, j))
    most = votes.most_common(TRIES)
    return (most[0][1] if most else 0), [first[shift] for shift, _ in most]


def _best(ours: Sequence[str], theirs: Sequence[str], starts: Iterable[Match]) -> list[Match]:
    """The alignment of names that matches most of them; among equals the one without gaps.

    Votes alone do not settle it: in a model of equal layers a shift by one layer gets nearly as many.
    """
    ways = (sorted(_aligned(ours, theirs, start)) for start in starts)
    return max(ways, key=lambda way: (len(way), way[0][1] - way[-1][1]))


def _aligned(ours: Sequence[str], theirs: Sequence[str], start: Match) -> Iterator[Match]:
    """Matched positions, walking forward and backward from one match."""
    i, j = start
    yield from ((i + a, j + b) for a, b in _walk(ours[i:], theirs[j:]))
    yield from ((i - 1 - a, j - 1 - b) for a, b in _walk(ours[:i][::-1], theirs[:j][::-1]))


def _walk(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[Match]:
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if ours[i] == theirs[j]:
            yield i, j
            i, j = i + 1, j + 1
        elif ours[i : i + 2] == theirs[j : j + 2][::-1]:
            # Same start: an event of length 0 may come before the next one or be its callee, and the clock cannot tell.
            yield from ((i, j + 1), (i + 1, j))
            i, j = i + 2, j + 2
        elif step := _resume(ours, theirs, i, j):
            i, j = i + step[0], j + step[1]
        else:
            return


def _resume(ours: Sequence[str], theirs: Sequence[str], i: int, j: int) -> Match | None:
    """How much to skip on each side, as little as possible, to find names that agree again."""
    for length, reach in REACH.items():
        ahead: dict[Sequence[str], int] = {}
        for b in range(min(reach, len(theirs) - j - length + 1)):
            ahead.setdefault(theirs[j + b : j + b + length], b)
        steps = ((a, ahead.get(ours[i + a : i + a + length])) for a in range(min(reach, len(ours) - i - length + 1)))
        found = [(a + b, a, b) for a, b in steps if b is not None]
        if found:
            return min(found)[1:]
    return None
