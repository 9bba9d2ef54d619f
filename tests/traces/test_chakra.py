"""Chakra graphs: both forms of a file agree, every protobuf type is read, and bad files get one sentence."""

from __future__ import annotations

import gzip
import json
import struct
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_bytes import META, attr, chakra, field, node, sized, varint
from presage.errors import InputError
from presage.traces.chakra import read_chakra
from presage.traces.execution_graph import ExecutionGraph, TensorRef, producers, tensors, topological_order


@cache
def graph_of(shared: Path, name: str) -> ExecutionGraph:
    return read_chakra(shared / "traces" / "chakra" / name)


# Real files


@pytest.mark.parametrize(
    ("name", "nodes", "dropped"),
    [
        ("two_rank.0.et", 1634, 0),
        ("two_rank.1.et", 1634, 0),
        ("feeder_chakra.0.et.gz", 3664, 3664),  # its control dependencies name other nodes than they mean
        ("feeder_chakra.0.json.gz", 3664, 0),
        ("feeder_small_chakra.0.json", 7, 7),  # seven nodes cut out of the larger graph
    ],
)
def test_every_published_graph_loads_whole(shared: Path, name: str, nodes: int, dropped: int) -> None:
    graph = graph_of(shared, name)
    assert (len(graph.nodes), graph.dropped_deps) == (nodes, dropped)
    at = {node: i for i, node in enumerate(topological_order(graph))}
    assert len(at) == nodes
    for one in graph.nodes:
        assert all(at[dep] < at[one.id] for dep in (*one.ctrl_deps, *one.data_deps))


def test_protobuf_and_json_of_one_graph_agree_node_by_node(shared: Path) -> None:
    protobuf, twin = (graph_of(shared, f"feeder_chakra.0.{form}.gz") for form in ("et", "json"))
    edges = 0
    for a, b in zip(protobuf.nodes, twin.nodes, strict=True):
        assert (a.id, a.kind, a.on_gpu, a.data_deps, a.duration_us) == (
            b.id,
            b.kind,
            b.on_gpu,
            b.data_deps,
            b.duration_us,
        )
        # The tool that wrote the JSON capitalised `id` and `name` everywhere, inside kernel names too (`voId`).
        assert a.name.replace("id", "Id").replace("name", "Name") == b.name
        edges += len(a.data_deps)
    assert edges == 181_878


def test_two_ranks_ran_the_same_program(shared: Path) -> None:
    first, second = (graph_of(shared, f"two_rank.{rank}.et") for rank in (0, 1))
    assert (first.rank, second.rank) == (0, 1)
    assert [n.name for n in first.nodes] == [n.name for n in second.nodes]
    for graph in (first, second):
        assert {t.device for n in graph.nodes for t in tensors(n.outputs)} == {f"cuda:{graph.rank}", "cpu"}
        collectives = [n for n in graph.nodes if n.kind == "collective"]
        assert [(n.attrs["comm_type"], n.attrs["comm_size"]) for n in collectives] == [(0, 1 << 32)] * 2
        assert all(n.on_gpu and n.stream == 7 and n.thread is None for n in collectives)


def test_a_converted_graph_keeps_calls_arguments_and_attributes(shared: Path) -> None:
    graph = graph_of(shared, "two_rank.0.et")
    full = next(n for n in graph.nodes if n.name == "aten::full")
    out = TensorRef(5, 1, 0, 32768, 4, "cuda:0", (32768,), "float32")
    assert full.inputs == ((32768,), 0, 6, None, "cuda", False)
    assert full.outputs == (out,) and full.op_schema.startswith("aten::full(SymInt[] size")
    assert (full.parent, full.thread, full.sequence, full.fw_parent) == (1, 1, None, None)
    assert Counter(n.kind for n in graph.nodes) >= Counter(process=1, thread=1, annotation=12, kernel=40)
    assert sum(map(len, producers(graph).values())) > 1000


# A protobuf writer, just enough to make files


def read(tmp_path: Path, data: bytes) -> ExecutionGraph:
    (tmp_path / "a.et").write_bytes(data)
    return read_chakra(tmp_path / "a.et")


ATTRIBUTES: dict[int, tuple[Any, bytes]] = {
    3: (2.5, field(3, struct.pack("<d", 2.5), 1)),
    5: (-0.5, field(5, struct.pack("<f", -0.5), 5)),
    7: (-3, field(7, -3)),
    9: (-(1 << 62), field(9, -(1 << 62))),
    11: (7, field(11, 7)),
    13: ((1 << 64) - 1, field(13, (1 << 64) - 1)),
    15: (-2, field(15, 3)),
    17: (2, field(17, 4)),
    19: (9, field(19, struct.pack("<I", 9), 5)),
    21: (9, field(21, struct.pack("<Q", 9), 1)),
    23: (-9, field(23, struct.pack("<i", -9), 5)),
    25: (-9, field(25, struct.pack("<q", -9), 1)),
    27: (True, field(27, 1)),
    29: ("héllo", field(29, "héllo")),
    31: (b"\xff", field(31, b"\xff")),
    4: ((1.0, 2.0), field(4, field(1, struct.pack("<dd", 1, 2)))),
    10: ((1, -1), field(10, field(1, varint(1) + varint(-1)))),
    12: ((1, 300), field(12, field(1, 1) + field(1, 300))),
    18: ((-1,), field(18, field(1, varint(1)))),
    24: ((5,), field(24, field(1, struct.pack("<i", 5)))),
    28: ((True, False), field(28, field(1, b"\x01\x00"))),
    30: (("a", "b"), field(30, field(1, "a") + field(1, "b"))),
    32: ((b"", b"\x00"), field(32, field(1, b"") + field(1, b"\x00"))),
}


@pytest.mark.parametrize("number", ATTRIBUTES)
def test_every_type_of_attribute_is_read(tmp_path: Path, number: int) -> None:
    value, encoded = ATTRIBUTES[number]
    graph = read(tmp_path, chakra(node(1, field(10, field(1, "x") + field(2, "why") + encoded), field(99, 1))))
    assert graph.nodes[0].attrs == {"x": value}


@given(st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.text(max_size=9)), min_size=1, unique_by=lambda n: n[0]))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, str]]) -> None:
    ids = sorted(i for i, _ in written)
    messages = [node(i, field(7, i >> 12), *(field(5, d) for d in ids[:1] if d < i), name=n) for i, n in written]
    graph = read(tmp_path_factory.getbasetemp(), chakra(*messages))
    assert {(n.id, n.name) for n in graph.nodes} == set(written)
    assert all(n.duration_us == float(n.id >> 12) for n in graph.nodes)
    assert all(n.data_deps == (ids[0],) for n in graph.nodes if n.id != ids[0])


def test_packed_and_single_dependencies_are_the_same(tmp_path: Path) -> None:
    packed, single = field(5, varint(1) + varint(2)), field(5, 1) + field(5, 2)
    for deps in (packed, single):
        graph = read(tmp_path, chakra(node(1), node(2), node(3, deps)))
        assert graph.nodes[2].data_deps == (1, 2)


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("[True, False, None]", (True, False, None)),
        ("[1.5, -2, 1e-05]", (1.5, -2, 1e-05)),
        ("[inf, -inf, nan]", ("inf", "-inf", "nan")),
        (repr(['it\'s "so"', "a\\b\n", "\x01", "é", "True"]), ('it\'s "so"', "a\\b\n", "\x01", "é", "True")),
        ("[[1, [2]], []]", ((1, (2,)), ())),
    ],
)
def test_printed_lists_are_read_back_without_running_them(tmp_path: Path, printed: str, value: tuple[Any, ...]) -> None:
    io = field(1, printed) + field(2, repr([[]] * len(value))) + field(3, repr(["Int"] * len(value)))
    assert read(tmp_path, chakra(node(1, field(8, io)))).nodes[0].inputs == value


def test_kinds_of_nodes(tmp_path: Path) -> None:
    gpu = field(10, attr("is_cpu_op", 27, 0))
    graph = read(tmp_path, chakra(*(node(i, gpu if i == 10 else b"", kind=i % 6 if i == 10 else i) for i in range(11))))
    kinds = ["other", "metadata", "load", "store", "op", "send", "recv", "collective", "storage", "other", "kernel"]
    assert [n.kind for n in graph.nodes] == kinds


def test_metadata_of_both_layouts(tmp_path: Path) -> None:
    schema = attr("schema", 29, "1.0.1")
    for meta in (field(1, schema), field(1, "0.0.4") + field(2, schema)):
        assert read(tmp_path, chakra(node(1), meta=meta)).schema == "1.0.1"
    assert read(tmp_path, chakra(node(1), meta=b"")).schema == "chakra"


def test_only_control_dependencies_may_be_wrong(tmp_path: Path) -> None:
    missing = read(tmp_path, chakra(node(1), node(2, field(4, 1), field(4, 9))))
    assert missing.nodes[1].ctrl_deps == (1,) and missing.dropped_deps == 1
    circle = read(tmp_path, chakra(node(1, field(4, 2)), node(2, field(5, 1))))
    assert [n.id for n in circle.nodes] == [1, 2] and circle.dropped_deps == 1


# Bad files


def json_file(**changes: Any) -> bytes:
    one = {"Id": 1, "Name": "op", "NodeType": 4, "data_deps": [], "runtime": 3, "is_cpu_op": True} | changes
    return json.dumps({"workload_graph": [{k: v for k, v in one.items() if v is not ...}]}).encode()


WHOLE = chakra(node(1), node(2, field(5, 1)))
OLDER_2022 = sized(field(1, 1) + field(2, "COMP") + field(3, 4) + field(5, 1) + field(6, 1024))
OLDER_2023 = chakra(node(1, field(5, "[]"), field(6, "[]"), field(7, "[]")), meta=field(1, attr("schema", 2, 4)))
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "metadata only": (sized(META), "nodes: the file holds no node"),
    "half of the gzip": (gzip.compress(WHOLE)[:-12], "gzip"),
    "the end is missing": (WHOLE[:-1], "message 2 at byte 17: .* 10 bytes announced, 9 left"),
    "a length beyond the end": (sized(META) + varint(1 << 40), "message 1 at byte 8: .*announced"),
    "a length that does not end": (sized(META) + b"\xff" * 3, "message 1 at byte 8: .*number is cut short"),
    "a number of 70 bits": (sized(META) + b"\xff" * 12, "more than 64 bits"),
    "a number of 65 bits": (chakra(b"\x08" + b"\xff" * 9 + b"\x02"), "more than 64 bits"),
    "a field beyond the message": (chakra(b"\x12\x7fop"), "127 bytes announced"),
    "half a fixed number": (chakra(node(1, b"\xf9\x06\x00")), "cut short"),
    "a group": (chakra(b"\x0b\x0c"), "wire type 3"),
    "a name that is no text": (chakra(field(1, 1) + field(2, b"\xff")), "is not a text"),
    "an id that is a text": (chakra(field(1, "1")), r"field 1 \(id\) is not of its type"),
    "an attribute of another type": (chakra(node(1, field(10, attr("x", 29, 5)))), "attribute's field 29"),
    "a list of another type": (chakra(node(1, field(10, attr("x", 4, field(1, b"123"))))), "list in an attribute"),
    "a graph of 2022": (OLDER_2022, "not global metadata: field 1 .*newer Chakra"),
    "a graph of 2023": (OLDER_2023, "doc_string.*newer Chakra"),
    "a node of 2023": (chakra(node(1, field(6, "[]"))), r"field 6 \(start_time_micros\).*newer Chakra"),
    "the same id twice": (chakra(node(1), node(1)), "node 1: id: two nodes"),
    "no such node": (chakra(node(1, field(5, 9))), "node 1: data_deps: there is no node 9"),
    "a circle": (chakra(node(1, field(5, 2)), node(2, field(5, 1))), r"node 1: depends on itself in a circle of 2"),
    "a negative duration": (chakra(node(1, field(7, -1))), "node 1: duration: .*negative"),
    "a list that is none": (chakra(node(1, field(8, field(1, "[__import__('os')]")))), "not a list of arguments"),
    "a list that does not end": (chakra(node(1, field(8, field(1, "[" * 5000)))), "not a list of arguments"),
    "values without types": (chakra(node(1, field(8, field(1, "[1]")))), "1 values, 0 shapes and 0 types"),
    "text": (b"hello, world", "not a readable Chakra graph"),
    "half of the JSON": (json_file()[:-5], "ends in the middle"),
    "a list": (b"[]", "something else"),
    "a profiler trace": (b'{"traceEvents": []}', "Kineto"),
    "an execution trace": (b'{"nodes": []}', "PyTorch execution trace"),
    "another object": (b"{}", "workload_graph: no such list"),
    "no id": (json_file(Id=...), r"workload_graph\[0\]: Object missing required field `Id`"),
    "an id of another type": (json_file(Id="x"), r"workload_graph\[0\].Id: Expected `int`"),
    "dependencies of another type": (json_file(data_deps=["x"]), r"workload_graph\[0\].data_deps"),
    "a negative runtime": (json_file(runtime=-3), "node 1: duration: .*negative"),
    "on itself": (json_file(data_deps=[1]), r"node 1: depends on itself in a circle of 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, case: str) -> None:
    data, sentence = BAD[case]
    (tmp_path / "bad.et").write_bytes(data)
    with pytest.raises(InputError, match=sentence) as e:
        read_chakra(tmp_path / "bad.et")
    assert str(tmp_path / "bad.et") in str(e.value) and "\n" not in str(e.value)


def test_any_cut_of_a_real_file_is_noticed_or_leaves_whole_nodes(shared: Path, tmp_path: Path) -> None:
    data = (shared / "traces" / "chakra" / "two_rank.0.et").read_bytes()[:60_000]
    outcomes: Counter[str] = Counter()
    for size in range(0, len(data), 997):
        try:
            outcomes["read"] += bool(read(tmp_path, data[:size]).nodes)
        except InputError:
            outcomes["refused"] += 1
    assert outcomes["refused"] >= 59
