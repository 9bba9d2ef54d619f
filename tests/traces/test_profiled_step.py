"""Steps predicted from profiler (Kineto) traces with shapes: results are inferred, kernels tied to ops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from presage.errors import InputError, PresageError
from presage.graph.graph import Graph, check
from presage.graph.rescale import with_batch
from presage.prediction.api import predict
from presage.prediction.machine import kernel_times, machine
from presage.report.predict_answer import predict_answer
from presage.traces.execution_graph import Argument, TensorRef
from presage.traces.output_rules import results
from presage.traces.trace_graph import trace_graphs, with_recorded_kernels


class Recorded:
    """Events of a hand-written trace; an op's kernels are (name, microseconds)."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.calls = 0.0, 0

    def event(self, cat: str, name: str, start: float, end: float, args: dict[str, Any], tid: int = 1) -> None:
        place = {"pid": 0 if cat in ("kernel", "gpu_memcpy") else 9, "tid": tid, "ts": 1e6 + start, "dur": end - start}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, "args": args})

    def kernel(self, name: str, took: float, **meta: Any) -> None:
        self.calls += 1
        self.event("cuda_runtime", "cudaLaunchKernel", self.now, self.now + 2, {"correlation": self.calls})
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        where = {"device": 0, "stream": 7, "correlation": self.calls, **meta}
        self.event(cat, name, self.now + 5, self.now + 5 + took, where, tid=7)
        self.now += 3

    def op(
        self,
        name: str,
        inputs: Sequence[Any] = (),
        kernels: Sequence[Any] = (),
        calls: Sequence[Any] = (),
        seq: int = -1,
    ) -> None:
        start = self.now
        self.now += 1
        for each in calls:
            self.op(*each)
        for each in kernels:
            self.kernel(*each)
        self.now += 1
        args: dict[str, Any] = {"Sequence number": seq} if seq >= 0 else {}
        if inputs:
            tensors = [i if isinstance(i, tuple) else () for i in inputs]
            args |= {
                "Input Dims": [list(t) for t in tensors],
                "Input type": ["float" if isinstance(i, tuple) else "Scalar" for i in inputs],
                "Concrete Inputs": ["" if isinstance(i, tuple) else str(i) for i in inputs],
            }
        self.event("cpu_op", name, start, self.now, args)

    def write(self, path: Path, **about: Any) -> Path:
        path.write_text(
            json.dumps({"deviceProperties": [{"name": "NVIDIA H200"}], **about, "traceEvents": self.events})
        )
        return path


def linear() -> Recorded:
    trace = Recorded()
    product = ["aten::mm", [(64, 32), (32, 16)], [("sm90_xmma_gemm_f32f32_tf32f32_f32_nn", 4.0)]]
    trace.op("aten::linear", [(64, 32), (16, 32)], calls=[["aten::t", [(16, 32)]], product])
    trace.op("aten::add_", [(64, 16), (16,), 1], [("add", 2.0)])
    return trace


def graph_of(trace: Recorded, folder: Path) -> Graph:
    return check(trace_graphs(trace.write(folder / "a.json"))[0])


def test_the_op_with_the_launches_directly_beneath_it_has_the_kernels(tmp_path: Path) -> None:
    graph = graph_of(linear(), tmp_path)
    assert [(op.name, op.kernels) for op in graph.ops] == [("aten::t", False), ("aten::mm", True), ("aten::add_", True)]
    product, add = graph.ops[1:]
    assert graph.outputs_of(product)[0].shape == (64, 16) and product.recorded is not None
    assert product.recorded.seconds == pytest.approx(4e-6) and product.recorded.launches == 1
    assert graph.inputs_of(add)[0].storage == graph.outputs_of(product)[0].storage  # the latest of its size


def test_names_of_kernels_tell_whether_tf32_was_used(tmp_path: Path) -> None:
    graph = graph_of(linear(), tmp_path)
    assert graph.flags["allow_tf32"] is True and not graph.assumptions
    assert trace_graphs(tmp_path / "a.json", {"allow_tf32": "false"})[0].flags["allow_tf32"] is False


def test_memory_is_not_known_and_is_not_shown_as_if_it_were(tmp_path: Path) -> None:
    result = predict(graph_of(linear(), tmp_path), draws=1)
    data, answer = result.to_json(), predict_answer(result, page=True)
    assert data["peak_memory_bytes"] is None and data["fits"] is None
    assert "Memory is not known" in answer.verdict and "fits" not in answer.verdict
    assert {f.value for f in answer.facts if f.label == "Peak memory"} == {"not known"}


def test_measured_kernels_stand_beside_predicted_ones_and_can_take_their_place(tmp_path: Path) -> None:
    graph = graph_of(linear(), tmp_path)
    table = predict(graph, draws=1).to_json()["recorded"]
    assert [(p["name"], p["recorded_ms"]) for p in table] == [
        ("matrix multiply", pytest.approx(4e-3)), ("elementwise", pytest.approx(2e-3)),
    ]  # fmt: skip
    kept = with_recorded_kernels([graph])
    assert [t.seconds for t in kernel_times(kept[0], machine("a100"))] == [
        0.0,
        pytest.approx(4e-6),
        pytest.approx(2e-6),
    ]
    with pytest.raises(PresageError, match="--kernels-from trace: the step is not from a profiler's trace"):
        with_recorded_kernels([])


def test_a_kernel_that_no_op_launched_takes_what_it_took_by_memory_bandwidth(tmp_path: Path) -> None:
    trace = linear()
    trace.op("FusedNorm", [(64, 16)], [("fused_norm", 100.0)])
    graph = graph_of(trace, tmp_path)
    assert graph.ops[-1].name == "kernel::FusedNorm" and graph.ops[-1].opaque
    here, there = (kernel_times(graph, machine(gpu))[-1].seconds for gpu in ("h200", "a100"))
    assert here == pytest.approx(1e-4, rel=0.05) and 2.0 < there / here < 3.5
    assert any("94.3% of the GPU time, take what they took" in note for note in graph.notes)


def test_what_an_op_made_is_the_gradient_that_its_backward_gets_where_no_rule_tells(tmp_path: Path) -> None:
    trace = linear()
    trace.op("aten::index", [(8, 6), "..."], [("index", 2.0)], seq=5)
    trace.op("IndexBackward0", [(3, 6)], seq=5)
    graph = graph_of(trace, tmp_path)
    op = next(op for op in graph.ops if op.name == "aten::index")
    assert graph.outputs_of(op)[0].shape == (3, 6)


def test_a_collective_is_that_of_its_kernel(tmp_path: Path) -> None:
    trace = linear()
    about = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}
    group = {"Process Group Name": "tp", "Group size": 2, "Process Group Ranks": "[0, 2]"}
    trace.now += 10
    trace.calls += 1
    trace.event("cuda_runtime", "cudaLaunchKernelExC", trace.now, trace.now + 2, {"correlation": trace.calls})
    meta = {"device": 0, "stream": 9, "correlation": trace.calls, **about, **group}
    trace.event("kernel", "ncclDevKernel_AllReduce_Sum_f32", trace.now + 9, trace.now + 99, meta, tid=9)
    file = trace.write(tmp_path / "a.json", distributedInfo={"rank": 0, "world_size": 4})
    (graph,) = trace_graphs(file)
    assert [(op.name, op.group) for op in graph.ops if op.group] == [("c10d::allreduce_", "tp")]
    assert graph.groups == {"tp": (0, 2)}


@pytest.mark.parametrize(
    ("name", "inputs", "shapes"),
    [
        ("aten::addmm", [(16,), (64, 32), (32, 16)], [(64, 16)]),
        ("aten::cudnn_convolution", [(2, 3, 8, 8), (5, 3, 3, 3), (1, 1), (2, 2), (1, 1), 1], [(2, 5, 4, 4)]),
        ("aten::sum", [(4, 5), (0,), True], [(1, 5)]),
        ("aten::mean", [(4, 5), (-1,), False], [(4,)]),
        ("aten::sum", [(4, 5), None], [()]),
        ("aten::native_layer_norm", [(4, 5), (5,)], [(4, 5), (4, 1), (4, 1)]),
        ("aten::embedding", [(100, 8), (4, 7)], [(4, 7, 8)]),
        ("aten::max_pool2d_with_indices", [(2, 3, 8, 8), (2, 2), (2, 2), (0, 0), (1, 1)], [(2, 3, 4, 4)] * 2),
        ("aten::cudnn_convolution", [(2, 3, 8, 8), (5, 3, 3, 3)], None),  # an old trace without values
    ],
)
def test_results_follow_from_inputs(name: str, inputs: list[Any], shapes: list[Any] | None) -> None:
    tensors = {"aten::addmm": 3, "aten::cudnn_convolution": 2, "aten::embedding": 2}.get(name, 1)
    given: list[Argument] = [
        TensorRef(i, i, 0, 1, 4, "cuda:0", tuple(v), "float32") if i < tensors else v for i, v in enumerate(inputs)
    ]
    made = results(name, given)
    assert shapes == (None if made is None else [t.shape for t in made])


def test_what_needs_the_inputs_or_gradients_is_refused(tmp_path: Path) -> None:
    graph = graph_of(linear(), tmp_path)
    with pytest.raises(PresageError, match="give an execution trace or the code"):
        with_batch(graph, 128)


# ---- what cannot be predicted, and public and measured traces


def test_a_trace_without_shapes_is_refused_with_how_to_record_it(tmp_path: Path) -> None:
    trace = Recorded()
    trace.op("aten::mm", [], [("gemm", 4.0)])
    with pytest.raises(InputError, match=r"was recorded without shapes: record it with .*record_shapes=True"):
        trace_graphs(trace.write(tmp_path / "a.json"))


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    trace = Recorded()
    trace.op("aten::mm", [(4, 4), (4, 4)])
    with pytest.raises(InputError, match=r"has no kernel of a GPU: record it with ProfilerActivity.CUDA"):
        trace_graphs(trace.write(tmp_path / "a.json"))


@pytest.mark.parametrize("case", ["dlrm_mlperf_b2048", "resnet50_b64_amp_cl"])
def test_gpu_time_from_a_profilers_trace_is_that_from_the_execution_trace(shared: Path, case: str) -> None:
    h200 = machine("h200")
    files = (shared / "h200" / "traces" / f"{case}.json.gz", shared / "h200" / "et" / f"{case}.et.json.gz")
    profiled, recorded = (sum(t.seconds for t in kernel_times(trace_graphs(f)[0], h200)) for f in files)
    assert profiled == pytest.approx(recorded, rel=0.01)


def test_ranks_of_a_public_run_match_all_their_collectives(shared: Path) -> None:
    graphs = trace_graphs(shared / "traces" / "dlrm_8xv100" / "kineto_*.json.gz")
    assert sum(len(g.ranks) for g in graphs) == 8
    assert {sum(bool(op.group) and op.kernels for op in g.ops) for g in graphs} == {8}
    result = predict(graphs, gpu="v100", draws=1)
    assert result.many is not None and result.many.ranks == 8
