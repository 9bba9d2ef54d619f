"""PyTorch execution traces: what the readers promise about real files, bad files and the link to profiler traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import InputError
from presage.traces.execution_graph import (
    ExecutionGraph,
    ExecutionNode,
    TensorRef,
    ordered_graph,
    producers,
    tensors,
    topological_order,
)
from presage.traces.execution_trace import read_et

RANKS = range(8)
COUNTS = {
    **{f"megatron_tp8_a100/et_{r}": 5424 for r in RANKS},  # 5422 events, the process and its thread
    **{f"dlrm_8xv100/et_{r}": 1675 for r in RANKS},
    **{f"dlrm_8xv100/et_plus_{r}": 1675 + gpu for r, gpu in enumerate((261, 326, 262, 331, 267, 261, 262, 262))},
    "resnet_ddp2_et/et_0": 4801,
    "resnet_ddp2_et/et_1": 4797,
    "param_et/resnet_1gpu_et_1.0.3": 14391,
    "param_et/resnet_2gpu_et_1.1.0": 14392,
    "param_et/hf_gpt2_et_1.1.0": 27156,
    "param_2080ti/resnet_et": 1313,
    "param_2080ti/linear_et": 931,
    "hta/simple_add_et": 38,
}
SOME = ("dlrm_8xv100/et_1", "dlrm_8xv100/et_plus_1", "resnet_ddp2_et/et_1", "param_et/resnet_2gpu_et_1.1.0")


@cache
def graph_of(shared: Path, name: str) -> ExecutionGraph:
    return read_et(shared / "traces" / f"{name}.json.gz")


# Real files


@pytest.mark.parametrize("name", COUNTS)
def test_every_published_trace_loads_whole(shared: Path, name: str) -> None:
    graph = graph_of(shared, name)
    assert len(graph.nodes) == COUNTS[name]
    assert graph.dropped_deps == 0
    kinds = Counter(n.kind for n in graph.nodes)
    assert kinds["process"] == 1 and kinds["thread"] >= 1
    assert [n.kind for n in graph.nodes if n.parent is None] == ["process"], "all else was called from somewhere"


@pytest.mark.parametrize("name", SOME)
def test_nothing_comes_before_its_caller(shared: Path, name: str) -> None:
    graph = graph_of(shared, name)
    position = {n.id: i for i, n in enumerate(graph.nodes)}
    assert all(position[n.parent] < position[n.id] for n in graph.nodes if n.parent is not None)
    assert topological_order(graph) == tuple(n.id for n in graph.nodes)


def test_schema_generations_say_the_same_things(shared: Path) -> None:
    for name, schema in (("dlrm_8xv100/et_0", "1.0.1"), ("resnet_ddp2_et/et_0", "1.0.2-chakra.0.0.4")):
        graph = graph_of(shared, name)
        assert graph.schema == schema
        addmm = next(n for n in graph.nodes if n.name == "aten::addmm")
        assert addmm.op_schema.startswith("aten::addmm(Tensor self, Tensor mat1, Tensor mat2")
        bias, left, right = list(tensors(addmm.inputs))[:3]
        (out,) = tensors(addmm.outputs)
        assert out.shape == (left.shape[0], right.shape[1]) and bias.shape == (right.shape[1],)
        assert {t.dtype for t in (bias, left, right, out)} == {"float32"} and out.device == "cuda:0"


def test_a_tensor_never_fits_more_than_its_shape(shared: Path) -> None:
    graph = graph_of(shared, "param_et/resnet_2gpu_et_1.1.0")
    for node in graph.nodes:
        for t in (*tensors(node.inputs), *tensors(node.outputs)):
            size = 1
            for n in t.shape:
                size *= n
            assert size == t.elements, (node.name, t)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("resnet_ddp2_et/et_0", 0),
        ("resnet_ddp2_et/et_1", 1),
        ("param_et/resnet_2gpu_et_1.1.0", 1),
        ("megatron_tp8_a100/et_3", None),
    ],
)
def test_the_rank_is_read_off_the_collectives_where_they_say_it(shared: Path, name: str, rank: int | None) -> None:
    assert graph_of(shared, name).rank == rank


@pytest.mark.parametrize("name", ["dlrm_8xv100/et_0", "param_2080ti/resnet_et", "param_et/resnet_2gpu_et_1.1.0"])
def test_backward_nodes_find_their_forward_ops_by_sequence(shared: Path, name: str) -> None:
    graph = graph_of(shared, name)
    backward = [n for n in graph.nodes if n.fw_parent is not None]
    forward = {n.sequence for n in graph.nodes if n.thread == 1 and n.fw_parent is None}
    assert backward and all(n.sequence in forward for n in backward if n.sequence is not None)
    assert all("AccumulateGrad" in n.name for n in backward if n.sequence is None)


def test_merged_kernels_carry_times_and_streams(shared: Path) -> None:
    graph = graph_of(shared, "dlrm_8xv100/et_plus_0")
    kernels = [n for n in graph.nodes if n.on_gpu]
    assert Counter(n.kind for n in kernels) == {"kernel": 245, "memcpy": 16}
    assert len({n.stream for n in kernels}) == 4
    assert all(n.start_us is not None and n.duration_us is not None for n in graph.nodes)
    assert all(n.thread is None and n.attrs["correlation"] for n in kernels)


# Producers


def tensor(i: int, storage: int | None = None) -> TensorRef:
    return TensorRef(i, i if storage is None else storage, 0, 1, 4, "cpu", (1,), "float32")


def graph(*nodes: ExecutionNode) -> ExecutionGraph:
    return ordered_graph("made.json", "1.0.1", nodes)


def test_a_caller_writes_after_what_it_called() -> None:
    made = graph(
        ExecutionNode(1, "root", "process"),
        ExecutionNode(2, "outer", parent=1, outputs=(tensor(9),)),
        ExecutionNode(3, "inner", parent=2, outputs=(tensor(9),)),
        ExecutionNode(4, "inner too", parent=2, inputs=((tensor(9), 3),)),
        ExecutionNode(5, "reader", parent=1, inputs=(tensor(9),)),
    )
    assert producers(made) == {1: (), 2: (), 3: (), 4: (3,), 5: (2,)}


def test_views_are_tied_by_their_storage_only() -> None:
    made = graph(ExecutionNode(1, "write", outputs=(tensor(1, 7),)), ExecutionNode(2, "read", inputs=(tensor(2, 7),)))
    assert producers(made) == {1: (), 2: ()}
    assert producers(made, "storage") == {1: (), 2: (1,)}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("identity", ["tensor", "storage"])
def test_producers_come_first_and_are_no_callers(shared: Path, name: str, identity: Any) -> None:
    made = graph_of(shared, name)
    found = producers(made, identity)
    position = {n.id: i for i, n in enumerate(made.nodes)}
    parent = {n.id: n.parent for n in made.nodes}
    assert sum(map(len, found.values())) > len(found) / 2
    for reader, writers in found.items():
        callers, at = set(), parent[reader]
        while at is not None:
            callers.add(at)
            at = parent[at]
        assert all(position[w] < position[reader] and w not in callers for w in writers)


def test_the_loss_is_what_backward_begins_with(shared: Path) -> None:
    made = graph_of(shared, "param_2080ti/resnet_et")
    by_id = {n.id: n for n in made.nodes}
    backward = next(n for n in made.nodes if n.name == "aten::nll_loss_backward")
    names = {by_id[w].name for w in producers(made)[backward.id]}
    assert any(n.endswith("log_softmax") for n in names), "across threads"


# Order


@st.composite
def dags(draw: st.DrawFn) -> list[ExecutionNode]:
    n = draw(st.integers(1, 12))
    ids = draw(st.permutations(range(n)))
    nodes = []
    for i in range(n):
        deps = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        nodes.append(
            ExecutionNode(
                ids[i], "op", parent=None if parent is None else ids[parent], data_deps=tuple(ids[d] for d in deps)
            )
        )
    return draw(st.permutations(nodes))


@given(dags())
def test_the_order_respects_every_dependency_and_is_the_same_for_any_file_order(nodes: list[ExecutionNode]) -> None:
    order = topological_order(graph(*nodes))
    at = {node: i for i, node in enumerate(order)}
    assert sorted(order) == sorted(n.id for n in nodes)
    for node in nodes:
        assert all(at[d] < at[node.id] for d in (*node.data_deps, *([node.parent] if node.parent is not None else [])))
    assert topological_order(graph(*reversed(nodes))) == order


@given(st.integers(1, 8), st.integers(0, 5))
def test_a_cycle_is_named(length: int, others: int) -> None:
    ring = [ExecutionNode(i, "op", data_deps=((i + 1) % length,)) for i in range(length)]
    tail = [ExecutionNode(length + i, "op", data_deps=(0,)) for i in range(others)]
    with pytest.raises(
        InputError, match=rf"made.json: node [0-{length - 1}]: depends on itself in a circle of {length}"
    ):
        graph(*ring, *tail)


# Bad files: one sentence with the file and the field


def flat(i: int = 2, **changes: Any) -> dict[str, Any]:
    node = {"id": i, "name": "aten::relu", "parent": 1, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0}
    io: dict[str, Any] = {
        "inputs": [],
        "input_shapes": [],
        "input_types": [],
        "outputs": [],
        "output_shapes": [],
        "output_types": [],
    }
    return {k: v for k, v in (node | {"op_schema": "", "rf_id": 1} | io | changes).items() if v is not ...}


ROOT = flat(1, name="[pytorch|profiler|execution_trace|process]", parent=1)
TENSOR = {"inputs": [[5, 6, 0, 4, 4, "cpu"]], "input_shapes": [[4]], "input_types": ["Tensor(float)"]}


def file(*nodes: Any, **more: Any) -> bytes:
    return json.dumps({"schema": "1.0.1", "nodes": [ROOT, *nodes], **more}).encode()


WHOLE = file(flat(2, **TENSOR))
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "spaces": (b"  \n", "the file is empty"),
    "text": (b"hello", "not JSON"),
    "protobuf": (b"\x07\n\x050.0.4\x02\x08\x01", "not JSON; if it is a Chakra graph"),
    "list": (b"[1, 2]", "something else"),
    "number": (b"7", "something else"),
    "half of the JSON": (WHOLE[: len(WHOLE) // 2], "ends in the middle"),
    "half of the gzip": (gzip.compress(WHOLE)[:-20], "gzip"),
    "nested without end": (b'{"nodes":' + b"[" * 100_000, "bad.json"),
    "a profiler trace": (b'{"schemaVersion": 1, "traceEvents": []}', "Kineto"),
    "a Chakra graph": (b'{"workload_graph": []}', "Chakra graph in JSON"),
    "another object": (b'{"a": 1}', "nodes: no such list"),
    "no nodes": (b'{"nodes": []}', "nodes: the file holds no node"),
    "nodes of another type": (b'{"nodes": 3}', "nodes: Expected `array"),
    "a node of another type": (file(3), r"nodes\[1\]: Expected `object`"),
    "no id": (file(flat(id=...)), r"nodes\[1\]: Object missing required field `id`"),
    "no name": (file(flat(name=...)), r"nodes\[1\]: Object missing required field `name`"),
    "an id of another type": (file(flat(id="x")), r"nodes\[1\].id: Expected `int`, got `str`"),
    "the same id twice": (file(flat(2), flat(2)), "node 2: id: two nodes"),
    "a parent that is not there": (file(flat(2, parent=99)), "node 2: parent: there is no node 99"),
    "a circle": (file(flat(2, parent=3), flat(3, parent=2)), r"node 2: depends on itself in a circle of 2"),
    "a negative duration": (file(flat(2, ts=1, dur=-5)), "node 2: duration: .*negative"),
    "an endless duration": (file(flat(2, ts=1, dur=1e308)).replace(b"1e+308", b"1e999"), "bad.json"),
    "fewer shapes than inputs": (file(flat(2, inputs=[1])), "node 2: inputs: 1 values, 0 shapes and 0 types"),
    "half a tensor": (file(flat(2, **TENSOR | {"inputs": [[5, 6]]})), "node 2: inputs: .* is not a tensor"),
    "no tensor": (file(flat(2, **TENSOR | {"inputs": [5]})), "node 2: inputs: .* is not a tensor"),
    "an object for an input": (file(flat(2, inputs=[{}], input_shapes=[[]], input_types=["Int"])), "node 2: inputs: "),
    "an unknown place": (file(flat(2, cat="cpu_op")), "node 2: cat: 'cpu_op' is none of kernel"),
    "an attribute of another type": (
        file(
            {
                "id": 2,
                "name": "x",
                "ctrl_deps": 1,
                "inputs": [],
                "outputs": [],
                "attrs": [{"name": "tid", "value": "x"}],
            }
        ),
        "node 2: attrs: ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, case: str) -> None:
    data, sentence = BAD[case]
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(InputError, match=sentence) as e:
        read_et(tmp_path / "bad.json")
    assert str(tmp_path / "bad.json") in str(e.value) and "\n" not in str(e.value)


def test_what_is_not_a_file_gets_one_sentence_too(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "none.json", "cannot be read")):
        with pytest.raises(InputError, match=said):
            read_et(path)


def test_plain_and_gzip_files_are_told_apart_by_content(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(WHOLE))
    (tmp_path / "b.json.gz").write_bytes(WHOLE)
    assert read_et(tmp_path / "a.json").nodes == read_et(tmp_path / "b.json.gz").nodes


def test_odd_arguments_are_kept(tmp_path: Path) -> None:
    lists = {"inputs": [[[5, 6, 0, 4, 4, "cpu"], [7, 0, 0, 0, 0, ""]], "<None>", [1, [2.5]], True]} | {
        "input_shapes": [[[2, 2], []], [], [[], [[]]], []],
        "input_types": [
            "GenericList[Tensor(long int),Tensor(nullptr (uninitialized))]",
            "None",
            "Tuple[Int,GenericList[Double]]",
            "Bool",
        ],
    }
    (tmp_path / "a.json").write_bytes(file(flat(2, **lists)))
    (_, node) = read_et(tmp_path / "a.json").nodes
    assert node.inputs == ((TensorRef(5, 6, 0, 4, 4, "cpu", (2, 2), "int64"), None), None, (1, (2.5,)), True)
