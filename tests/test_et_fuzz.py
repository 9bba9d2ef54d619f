"""Whatever the bytes are, the readers of execution graphs give a graph or an InputError, never anything else."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.errors import InputError
from presage.traces.graphs.chakra import read_chakra
from presage.traces.graphs.et import link_to_kineto, read_et
from presage.traces.graphs.graphfile import ExecutionGraph, consumers, topological_order
from test_chakra import attr, chakra, field, node

fuzz = settings(max_examples=300, deadline=None, derandomize=True)

VALUES = [[5, 6, 0, 4, 4, "cuda:0"], [[1, 2, 0, 4, 4, "cpu"], [3, 0, 0, 0, 0, ""]], "<None>", [1, [2]], -0.5]
SHAPES = [[2, 2], [[4], []], [], [[], [[]]], []]
TYPES = ["Tensor(float)", "GenericList[Tensor(int),Tensor(nullptr (uninitialized))]", "None", "Tuple[Int]", "Double"]


def flat(i: int, parent: int, name: str = "aten::add", **more: Any) -> dict[str, Any]:
    io = {
        f"{side}put{kind}": value
        for side in ("in", "out")
        for kind, value in zip(("s", "_shapes", "_types"), (VALUES, SHAPES, TYPES), strict=True)
    }
    ids = {"rf_id": i, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": "aten::add()"}
    return {"id": i, "name": name, "parent": parent} | ids | io | more


def nested(i: int, parent: int, name: str = "record_param_comms") -> dict[str, Any]:
    io = {
        "values": [*VALUES, 1, "allreduce", [], [], 0, 1, 2],
        "shapes": [*SHAPES, *[[]] * 7],
        "types": [*TYPES, *["Int"] * 7],
    }
    attrs = {"rf_id": i, "fw_parent": 1, "seq_id": 4, "scope": 7, "tid": 1, "op_schema": "", "pg_name": "0"}
    named = [{"name": k, "type": "x", "value": v} for k, v in attrs.items()]
    return {"id": i, "name": name, "ctrl_deps": parent, "inputs": io, "outputs": io, "attrs": named}


KERNEL: dict[str, Any] = {"cat": "kernel", "ts": 17.5, "dur": 2.0, "args": {"stream": 7}}
ETS = [
    {"schema": "1.0.1", "nodes": [flat(1, 1, "[pytorch|profiler|execution_trace|process]"), flat(2, 1), flat(3, 2)]},
    {"schema": "1.0.3-chakra.0.0.4", "nodes": [nested(1, 1), nested(3, 2), nested(2, 1)]},
    {"schema": "1.0.1", "nodes": [flat(1, 1, ts=1.0, dur=30.0), flat(2, 1, ts=2.0, dur=3.0), flat(3, 2, **KERNEL)]},
]
FEEDER = {
    "workload_graph": [
        {"Id": 1, "Name": "a", "NodeType": 4, "ctrlDeps": [9], "data_deps": [], "runtime": 3, "is_cpu_op": True},
        {"Id": 2, "Name": "b", "NodeType": 7, "data_deps": [1], "is_cpu_op": False, "comm_size": 4},
    ]
}
IO = field(1, repr(VALUES)) + field(2, repr(SHAPES)) + field(3, repr(TYPES))
GRAPHS = [
    chakra(
        node(0, field(8, IO), field(10, attr("is_cpu_op", 27, 1)), field(10, attr("tid", 9, 1))),
        node(
            1, field(4, b"\x00"), field(5, b"\x00"), field(7, 318), field(9, IO), field(10, attr("op_schema", 29, "x"))
        ),
        node(2, field(4, 1), field(6, 5), field(10, attr("involved_dim", 28, field(1, b"\x01\x00"))), kind=7),
        meta=field(1, "0.0.4") + field(2, attr("schema", 29, "1.0.1")),
    )
]


def check(path: Path, data: bytes, read: Callable[[Path], ExecutionGraph]) -> None:
    path.write_bytes(data)
    try:
        graph = read(path)
    except InputError as e:
        assert str(path) in str(e)
        return
    assert topological_order(graph) == tuple(n.id for n in graph.nodes)
    assert set(consumers(graph, "storage")) == {n.id for n in graph.nodes if not n.on_gpu}
    link_to_kineto(graph, {1: [n.name for n in graph.nodes]})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.et"


@st.composite
def damaged(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """A file with a few pieces overwritten, cut out, put in or doubled, and perhaps compressed before or after."""
    data = bytearray(draw(st.sampled_from(whole)))
    if early := draw(st.booleans()):
        data = bytearray(gzip.compress(data, mtime=0))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 12)) | st.just(len(data)))
        data[at:end] = draw(st.binary(max_size=12) | st.just(bytes(data[at:end] * 2)))
    return bytes(data) if early or draw(st.booleans()) else gzip.compress(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def altered(draw: st.DrawFn, whole: list[Any]) -> bytes:
    """Sound JSON in which one to three values are of another kind, gone or moved from elsewhere."""
    file = copy.deepcopy(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(1, 3))):
        at, key = file, None
        while isinstance(at, dict | list) and at and (key is None or draw(st.integers(0, 3))):
            holder, key = at, draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            at = holder[key]
        if key is None:
            break
        if draw(st.booleans()):
            holder[key] = draw(JSON | st.sampled_from([1, 2, 3, -1, "kernel", [], [1], [[5, 6, 0, 4, 4, "cpu"]]]))
        else:
            del holder[key]
    return json.dumps(file).encode()


@fuzz
@given(data=damaged([json.dumps(et).encode() for et in ETS]))
def test_damaged_execution_traces(path: Path, data: bytes) -> None:
    check(path, data, read_et)


@fuzz
@given(data=altered(ETS))
def test_altered_execution_traces(path: Path, data: bytes) -> None:
    check(path, data, read_et)


@fuzz
@given(data=damaged(GRAPHS))
def test_damaged_chakra_graphs(path: Path, data: bytes) -> None:
    check(path, data, read_chakra)


@fuzz
@given(data=damaged([json.dumps(FEEDER).encode()]) | altered([FEEDER]))
def test_damaged_and_altered_chakra_json(path: Path, data: bytes) -> None:
    check(path, data, read_chakra)


@fuzz
@given(data=st.binary(max_size=200))
def test_any_bytes(path: Path, data: bytes) -> None:
    check(path, data, read_et)
    check(path, data, read_chakra)


@pytest.mark.parametrize("number", range(len(ETS)))
def test_the_undamaged_files_are_read(path: Path, number: int) -> None:
    path.write_text(json.dumps(ETS[number]))
    assert len(read_et(path).nodes) == 3
    for data in (GRAPHS[0], json.dumps(FEEDER).encode()):
        path.write_bytes(data)
        assert len(read_chakra(path).nodes) >= 2
