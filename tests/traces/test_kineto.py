"""The Kineto reader: what the files say, in every dialect, is what the Trace holds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from presage.errors import InputError
from presage.traces import jsonfile, kineto
from presage.traces.trace import GpuKind, HostKind
from presage.traces.trace_set import read_run
from synthetic import Tracer


def small() -> Tracer:
    t = Tracer()
    t.step(0, 0, 100)
    t.op("aten::linear", 10, 50)
    t.op("aten::addmm", 20, 30)
    t.launch("gemm", 30, 45, 20)
    return t


def test_tree_links_and_steps(tmp_path: Path) -> None:
    trace = kineto.read(small().write(tmp_path / "t.json"))
    names = [trace.host_name(i) for i in range(len(trace.host))]
    assert names == ["ProfilerStep#0", "aten::linear", "aten::addmm", "cudaLaunchKernel"]
    assert trace.host.parent.tolist() == [-1, 0, 1, 2]
    assert trace.gpu.launch.tolist() == [3]
    assert [(s.name, s.end - s.start) for s in trace.steps] == [("ProfilerStep#0", 100_000)]
    assert trace.gpus == ("Test GPU",)


def test_gzip_and_plain_and_bare_list_agree(tmp_path: Path) -> None:
    t = small()
    plain = kineto.read(t.write(tmp_path / "a.json"))
    packed = kineto.read(t.write(tmp_path / "b.json.gz"))
    (tmp_path / "c.json").write_text(json.dumps(t.events))
    bare = kineto.read(tmp_path / "c.json")
    for other in (packed, bare):
        assert np.array_equal(plain.host.start, other.host.start)
        assert np.array_equal(plain.gpu.end, other.gpu.end)


def test_the_dialect_of_2021(tmp_path: Path) -> None:
    t = Tracer()
    t.add("Operator", "aten::relu", 1.7e15, 20, "77", 77)
    t.add("Runtime", "cudaLaunchKernel", 1.7e15 + 5, 4, "77", 77, correlation=9)
    t.add("Kernel", "relu_kernel", 1.7e15 + 12, 3, "stream 7", 0, correlation=9)
    t.add("Memset", "Memset (Device)", 1.7e15 + 16, 1, "stream 7", 0, correlation=10)
    trace = kineto.read(t.write(tmp_path / "t.json"))
    assert trace.host.kind.tolist() == [HostKind.OP, HostKind.CALL]
    assert trace.gpu.kind.tolist() == [GpuKind.KERNEL, GpuKind.MEMSET]
    assert trace.gpu.launch.tolist() == [1, -1]
    assert trace.streams[0].stream == 7
    assert (trace.gpu.start - trace.host.start[0]).tolist() == [12_000, 16_000]


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    t = Tracer()
    t.head["baseTimeNanoseconds"] = 1_790_857_026_000_000_000
    t.op("a", 3848643458822.011, 233.366)
    t.op("b", 3848643458855.378, 1.001)
    trace = kineto.read(t.write(tmp_path / "t.json"))
    assert (trace.host.start[1] - trace.host.start[0]) == pytest.approx(33_367, abs=1)
    assert trace.host.end[0] - trace.host.start[0] == 233_366


def test_a_graph_launch_owns_many_kernels(tmp_path: Path) -> None:
    t = Tracer()
    graph = t.call("cudaGraphLaunch", 10, 5)
    for i in range(3):
        t.kernel(f"k{i}", 20 + 10 * i, 8, graph)
    trace = kineto.read(t.write(tmp_path / "t.json"))
    assert trace.gpu.launch.tolist() == [0, 0, 0]


def test_a_call_stamped_by_another_clock_goes_inside_its_op(tmp_path: Path) -> None:
    t = Tracer()
    t.op("aten::transpose", 0, 10)
    t.op("aten::bmm", 11, 100)
    t.call("cudaMalloc", 0, 100)  # began, by its own clock, before the op that made it
    trace = kineto.read(t.write(tmp_path / "t.json"))
    names = [trace.host_name(i) for i in range(3)]
    assert trace.host_name(trace.host.parent[names.index("cudaMalloc")]) == "aten::bmm"


def test_nan_reads_as_unknown(tmp_path: Path) -> None:
    t = small()
    text = t.text().replace(b'"stream": 7', b'"stream": 7, "est. achieved occupancy %": NaN')
    (tmp_path / "t.json").write_bytes(text)
    assert len(kineto.read(tmp_path / "t.json").gpu) == 1


def test_forward_backward_by_arrows_and_by_sequence_number(tmp_path: Path) -> None:
    t = Tracer()
    t.op("aten::mul", 10, 5, **{"Sequence number": 4})
    t.op("MulBackward0", 50, 5, tid=2, **{"Sequence number": 4, "Fwd thread id": 1})
    by_number = kineto.read(t.write(tmp_path / "a.json"))
    t.events += [
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 100, "tid": 1, "ts": 10},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 100, "tid": 2, "ts": 50, "bp": "e"},
    ]
    by_arrow = kineto.read(t.write(tmp_path / "b.json"))
    assert by_number.forward_of.tolist() == by_arrow.forward_of.tolist() == [-1, 0]


@pytest.mark.parametrize("chunk", [64, 257, 1024])
def test_reading_in_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    t = small()
    t.op('odd "},{" name \\', 70, 5, nested=[{"a": 1}, {"b": "},{"}])
    for i in range(50):
        t.op(f"op{i}", 200 + i, 0.5)
    path = t.write(tmp_path / "t.json")
    whole = kineto.read(path)
    monkeypatch.setattr(jsonfile, "CHUNK", chunk)
    pieces = kineto.read(path)
    assert [whole.host_name(i) for i in range(len(whole.host))] == [
        pieces.host_name(i) for i in range(len(pieces.host))
    ]
    assert np.array_equal(whole.host.start, pieces.host.start)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello", "not JSON"),
        (b'{"nodes": []}', "traceEvents"),
        (b'{"traceEvents": [{"ph": "X"', "cut off"),
        (b'{"traceEvents": [}', "traceEvents"),
        (b'{"traceEvents": [{"ph": 5}]}', "ph"),
        (b'{"traceEvents": []}', "no operator"),
        (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":-2}]}', "negative"),
        (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","dur":2}]}', "ts"),
        (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":1}]}', "dur"),
        (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":1e300,"dur":1}]}', "ts"),
        (b'{"traceEvents": [{"ph":"X","cat":"banana","name":"a","ts":1,"dur":1}]}', "banana"),
        (b"\x1f\x8b\x08\x00", "gzip"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as e:
        kineto.read(path)
    assert says in str(e.value)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_unknown_categories_can_be_left_out(tmp_path: Path) -> None:
    t = small()
    t.add("banana", "b", 1, 1)
    path = t.write(tmp_path / "t.json")
    assert kineto.read(path, ignore=["banana"]).ignored == {"banana": 1}


def test_a_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = small().write(tmp_path / "t.json.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="gzip"):
        kineto.read(path)


@pytest.mark.slow
def test_counts_agree_with_the_check_table(shared: Path) -> None:
    """Every Kineto file of the collection: ops, calls, kernels, collectives, launch links and steps as listed."""
    with (shared / "traces" / "CHECK.tsv").open() as f:
        rows = [r for r in csv.DictReader(f, delimiter="\t") if "cpu_only" not in r["file"]]
    assert len(rows) > 80
    for row in rows:
        trace = kineto.read(shared / "traces" / row["file"])
        kernels = int((trace.gpu.kind == GpuKind.KERNEL).sum())
        assert kernels == int(row["gpu_kernels"]), row["file"]
        assert int(trace.is_collective.sum()) == int(row["collectives"]), row["file"]
        linked = (trace.gpu.launch >= 0).mean() if len(trace.gpu) else 0.0
        assert linked == pytest.approx(float(row["launch_linked"]), abs=0.006), row["file"]
        steps = 0 if row["steps"] == "-" else int(row["steps"].split("x")[0])
        assert len(trace.steps) == steps, row["file"]


def impossible(kind: str) -> Tracer:
    """Three steps with a launch each, of which something cannot have been so."""
    t = Tracer()
    for i in range(3):
        t.step(i, 1000 * i, 5000 if kind == "steps" else 900)
        t.launch("gemm", 1000 * i + 400, 1000 * i + (100 if kind == "kernels" else 450), 90)
        t.correlation -= kind == "ids"
    return t


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("steps", "2 of 3 steps overlap the next (ProfilerStep#0): step times are in doubt"),
        ("kernels", "kernels start before their launch: the GPU's times were moved by 0.305 ms"),
        ("ids", "3 of 3 GPU events share a correlation id: which call launched them is unknown"),
    ],
)
def test_what_cannot_have_been_so_is_noted(tmp_path: Path, kind: str, says: str) -> None:
    assert read_run([impossible(kind).write(tmp_path / "t.json")]).notes == [f"t.json: {says}"]


def test_a_trace_without_contradictions_has_no_notes(tmp_path: Path) -> None:
    assert read_run([impossible("none").write(tmp_path / "t.json")]).notes == []


def test_a_negative_rank_is_refused(tmp_path: Path) -> None:
    t = Tracer(rank=-1, world=2)
    t.launch("gemm", 0, 10, 5)
    with pytest.raises(InputError, match=r"distributedInfo.rank: is -1: ranks are 0 and up"):
        kineto.read(t.write(tmp_path / "t.json"))
