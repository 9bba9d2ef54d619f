"""Steps predicted from execution traces: as from the code, with what a trace cannot hold assumed in the open."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from presage.errors import InputError, PresageError
from presage.graph.graph import Graph, check
from presage.graph.work import collective as collective_of
from presage.memory.step_memory import memory_profile
from presage.prediction.api import own_times, predict, step_graph
from presage.prediction.machine import kernel_times, machine
from presage.traces.saved_trace import save_traces
from presage.traces.trace_graph import trace_graphs
from presage.whatif import what_if

ROOT = Path(__file__).resolve().parents[2]


def seconds(graph: Graph) -> float:
    return sum(t.seconds for t in kernel_times(graph, machine("h200")))


# ---- there and back


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return step_graph(f"{ROOT / 'tests' / 'report' / 'gpt.presage'}")


@pytest.mark.parametrize("suffix", [".json", ".et", ".json.gz"])
def test_a_saved_trace_is_read_back_as_the_step_it_was(gpt: Graph, suffix: str, tmp_path: Path) -> None:
    times = [t.seconds for t in own_times(gpt, machine("h200"))[0]]
    (file,) = save_traces([gpt], tmp_path / f"step{suffix}", [times])
    back = check(trace_graphs(file)[0])
    seen = ("name", "overload", "kernels", "phase", "thread", "within", "names", "sync", "module")
    assert [[getattr(op, k) for k in seen] for op in back.ops] == [[getattr(op, k) for k in seen] for op in gpt.ops]
    shapes = [[(t.shape, t.strides, t.dtype) for t in g.inputs_of(op)] for g in (gpt, back) for op in g.ops]
    assert shapes[: len(gpt.ops)] == shapes[len(gpt.ops) :]
    assert seconds(back) == pytest.approx(seconds(gpt), rel=1e-4)
    assert memory_profile(back).peak_allocated == pytest.approx(memory_profile(gpt).peak_allocated, rel=0.03)


def test_ranks_are_saved_and_read_back_with_their_groups(tmp_path: Path) -> None:
    for rank in range(4):
        group = (0, 2) if rank % 2 == 0 else (1, 3)
        write(tmp_path / f"rank_{rank}.json", [linear(), collective("allreduce", group, rank // 2)])
    graphs = trace_graphs(tmp_path)
    assert [g.ranks for g in graphs] == [(0, 1, 2, 3)] and graphs[0].groups == {"0 tp": (0, 2)}
    (tmp_path / "out").mkdir()
    files = save_traces(graphs, tmp_path / "out" / "job.et", [[1e-5] * len(graphs[0].ops)])
    assert [f.name for f in files] == [f"job.{r}.et" for r in range(4)]
    again = trace_graphs(tmp_path / "out")
    assert [op.name for op in again[0].ops] == [op.name for op in graphs[0].ops]
    result = predict(again, draws=1)
    assert result.many is not None and result.many.ranks == 4


# ---- what a trace tells


@dataclass
class Node:
    """A call in a hand-written trace: tensors are (address, shape), floats unless said otherwise."""

    name: str
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    calls: list[Node] = field(default_factory=list)
    schema: str = ""
    scope: int = 0


def tensor(address: int, *shape: int, device: str = "cuda:0") -> tuple[int, tuple[int, ...], str]:
    return address, shape, device


def linear(out: int = 9) -> Node:
    args, result = [tensor(1, 64, 32), tensor(2, 16, 32)], [tensor(out, 64, 16)]
    product = Node(
        "aten::mm",
        [tensor(1, 64, 32), tensor(2, 32, 16)],
        result,
        schema="aten::mm(Tensor self, Tensor mat2) -> Tensor",
    )
    view = Node("aten::t", [tensor(2, 16, 32)], [tensor(2, 32, 16)])
    return Node("aten::linear", args, result, [view, product])


def collective(name: str, ranks: tuple[int, ...], place: int = 0) -> Node:
    stride = ranks[1] - ranks[0]
    rest = [7, ["0", "tp"], place, name, [], [], ranks[0], stride, len(ranks)]
    inner = Node("record_param_comms", [tensor(9, 64, 16), *rest], [tensor(9, 64, 16)])
    waits = Node("record_param_comms", [7, ["", ""], 0, "wait", [], [], -1, -1, 1])
    return Node("c10d::allreduce_", [tensor(9, 64, 16)], [tensor(9, 64, 16)], [inner, waits])


def _io(values: list[Any]) -> dict[str, list[Any]]:
    def one(v: Any) -> tuple[Any, Any, str]:
        if isinstance(v, tuple):
            count = 1
            for n in v[1]:
                count *= n
            return [v[0], v[0], 0, count, 4, v[2]], list(v[1]), "Tensor(float)"
        if isinstance(v, list):
            return v, [[] for _ in v], f"GenericList[{','.join('Int' for _ in v)}]"
        return v, [], {int: "Int", str: "String"}[type(v)]

    parts = [one(v) for v in values]
    return dict(zip(("values", "shapes", "types"), ([p[k] for p in parts] for k in range(3)), strict=True))


def write(path: Path, calls: list[Node]) -> Path:
    nodes: list[dict[str, Any]] = []

    def add(node: Node, parent: int) -> None:
        number = len(nodes) + 1
        attrs = {"rf_id": 0, "fw_parent": 0, "seq_id": -1, "scope": node.scope, "tid": 1, "op_schema": node.schema}
        listed = [{"name": k, "type": "uint64", "value": v} for k, v in attrs.items()]
        fields = {"inputs": _io(node.inputs), "outputs": _io(node.outputs), "attrs": listed}
        nodes.append({"id": number, "name": node.name, "ctrl_deps": parent, **fields})
        for call in node.calls:
            add(call, number)

    add(Node("[pytorch|profiler|execution_trace|process]", scope=7), 1)
    add(Node("[pytorch|profiler|execution_trace|thread]", calls=calls, scope=7), 1)
    path.write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "nodes": nodes}))
    return path


def ops(path: Path) -> list[tuple[str, bool]]:
    return [(op.name, op.kernels) for op in check(trace_graphs(path)[0]).ops]


def test_the_op_that_does_the_work_counts_and_not_its_callers(tmp_path: Path) -> None:
    assert ops(write(tmp_path / "a.json", [linear()])) == [("aten::t", False), ("aten::mm", True)]


def test_an_op_with_kernels_besides_those_it_calls_counts_too(tmp_path: Path) -> None:
    fill = Node(
        "aten::zero_", [tensor(5, 4, 4)], [tensor(5, 4, 4)], schema="aten::zero_(Tensor(a!) self) -> Tensor(a!)"
    )
    made = Node("aten::empty", [], [tensor(5, 4, 4)])
    loss = Node(
        "aten::nll_loss_backward",
        [tensor(1, 4)],
        [tensor(5, 4, 4)],
        [Node("aten::zeros", [], [tensor(5, 4, 4)], [made, fill])],
    )
    assert ops(write(tmp_path / "a.json", [loss])) == [
        ("aten::nll_loss_backward", True), ("aten::empty", False), ("aten::zero_", True),
    ]  # fmt: skip


def test_a_kernel_of_an_extension_that_no_op_shows_is_an_op_of_its_own(tmp_path: Path) -> None:
    norm = Node("FusedNorm", [tensor(1, 64, 32)], [], [Node("aten::empty", [], [tensor(6, 64, 32)])])
    graph = trace_graphs(
        write(tmp_path / "a.json", [norm, Node("aten::relu", [tensor(6, 64, 32)], [tensor(7, 64, 32)])])
    )[0]
    assert [(op.name, op.opaque) for op in graph.ops] == [("FusedNorm", True), ("aten::relu", False)]
    assert graph.outputs_of(graph.ops[0])[0].storage == graph.inputs_of(graph.ops[1])[0].storage
    assert any("FusedNorm" in name for name in predict(graph, draws=1).coverage.fallback_ops)


def test_memory_at_an_address_that_is_used_again_is_another(tmp_path: Path) -> None:
    again = [linear(9), Node("aten::relu", [tensor(9, 64, 16)], [tensor(10, 64, 16)]), linear(9)]
    graph = trace_graphs(write(tmp_path / "a.json", again))[0]
    products = [graph.outputs_of(op)[0].storage for op in graph.ops if op.name == "aten::mm"]
    assert len(set(products)) == 2


def test_what_a_trace_cannot_hold_is_assumed_in_the_answer_and_can_be_given(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", [linear()])
    result = predict(file, draws=1)
    assert [(a.line, a.value, a.given) for a in result.assumptions] == [("allow_tf32", "false", False)]
    assert result.assumptions[0].share > 0.5
    assert result.to_json()["assumptions"][0]["share_of_step"] == result.assumptions[0].share
    told = trace_graphs(file, {"allow_tf32": "true"})[0]
    assert told.flags["allow_tf32"] is True and told.assumptions[0].given
    with pytest.raises(
        PresageError, match=r"--assume tf32=1: of a trace, allow_tf32 and cudnn.allow_tf32 can be given"
    ):
        trace_graphs(file, {"tf32": "1"})


def test_one_rank_of_several_stands_for_all_with_a_note(tmp_path: Path) -> None:
    file = write(tmp_path / "rank_1.json", [linear(), collective("allreduce", ranks=(0, 1, 2, 3))])
    result = predict(file, draws=1)
    assert result.many is not None and result.many.ranks == 4
    assert any("the other 3 are taken to do the same" in note for note in result.notes)


# ---- another batch


def test_a_trace_with_another_batch_is_the_step_of_that_batch() -> None:
    traced = step_graph(ROOT / "examples" / "traces" / "dlrm_et.json.gz", {"batch": 4096})
    code = step_graph(f"{ROOT / 'examples' / 'dlrm.py'}:build", {"batch": 4096})
    assert seconds(check(traced)) == pytest.approx(seconds(code), rel=0.01)
    assert memory_profile(traced).peak_allocated == pytest.approx(memory_profile(code).peak_allocated, rel=0.01)
    assert any("batch 2048 was made 4096" in note for note in traced.notes)


def test_a_batch_that_a_parameter_has_too_is_refused(tmp_path: Path) -> None:
    update = Node(
        "aten::sgd_", [tensor(2, 16, 32)], [tensor(2, 16, 32)], schema="aten::sgd_(Tensor(a!) self) -> Tensor(a!)"
    )
    optimizer = Node("Optimizer.step#SGD.step", calls=[update], scope=7)
    file = write(
        tmp_path / "a.json", [Node("aten::relu", [tensor(1, 16, 32)], [tensor(3, 16, 32)]), linear(), optimizer]
    )
    with pytest.raises(PresageError, match=r"a parameter of a\.json has the dimension 16, a multiple of the batch 16"):
        step_graph(file, {"batch": 32})


def test_edits_of_the_code_are_refused_and_edits_of_the_graph_are_not() -> None:
    trace = ROOT / "examples" / "traces" / "dlrm_et.json.gz"
    assert what_if(trace, "cuda_graph", draws=20).speedup.p50 > 1
    with pytest.raises(PresageError, match="autocast captures the step again: a trace has no code"):
        what_if(trace, "autocast", draws=20)


# ---- what cannot be predicted is refused in a sentence


def test_a_folder_without_all_ranks_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank_{rank}.json", [linear(), collective("allreduce", ranks=(0, 1, 2, 3))])
    with pytest.raises(InputError, match="holds 2 ranks of 4: give all of them, or the file of one alone"):
        trace_graphs(tmp_path)


def test_a_trace_of_the_host_alone_is_refused(tmp_path: Path) -> None:
    on_cpu = Node("aten::relu", [tensor(1, 4, device="cpu")], [tensor(2, 4, device="cpu")])
    with pytest.raises(InputError, match="has no op on a GPU"):
        trace_graphs(write(tmp_path / "a.json", [on_cpu]))


def test_absurd_sizes_and_endless_nesting_are_refused_at_once(tmp_path: Path) -> None:
    huge = Node("aten::relu", [tensor(1, 1 << 40, 1 << 12)], [tensor(2, 1 << 40, 1 << 12)])
    with pytest.raises(InputError, match="makes no step: is larger than 1 PiB"):
        trace_graphs(write(tmp_path / "a.json", [huge]))
    deep = Node("aten::relu", [tensor(1, 4)], [tensor(2, 4)])
    for _ in range(250):
        deep = Node("aten::relu", [tensor(1, 4)], [tensor(2, 4)], [deep])
    with pytest.raises(InputError, match="calls are nested more than 200 deep"):
        trace_graphs(write(tmp_path / "b.json", [deep]))


def test_several_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a_0.json", [linear()])
    write(tmp_path / "b_0.json", [linear()])
    with pytest.raises(InputError, match=r"holds traces of several runs: give one of them, as in '.*a_\*.json'"):
        trace_graphs(tmp_path)
    assert len(trace_graphs(tmp_path / "a_*.json")) == 1
    with pytest.raises(InputError, match="no execution trace is called so"):
        trace_graphs(tmp_path / "c_*.json")


def test_the_star_of_a_pattern_is_a_rank(tmp_path: Path) -> None:
    """et_*.json does not mean et_plus_0.json too; two files of one rank are refused."""
    for rank in range(2):
        for name in ("et", "et_plus"):
            write(tmp_path / f"{name}_{rank}.json", [linear(), collective("allreduce", (0, 1), rank)])
    assert [g.ranks for g in trace_graphs(tmp_path / "et_*.json")] == [(0, 1)]
    with pytest.raises(
        InputError, match=r"et_plus_0.json: is of rank 0, and so is et_0.json: give the files of one run alone"
    ):
        trace_graphs(tmp_path / "et*_0.json")


# ---- public and measured traces


@pytest.mark.parametrize("case", ["dlrm_default_b2048", "resnet50_b64_amp_cl", "gpt_350m_b8_s1024_ckpt"])
def test_gpu_time_and_memory_from_a_trace_are_as_measured(shared: Path, case: str) -> None:
    runs = json.loads((shared / "h200" / "measured.json").read_text())["cases"][case]
    graph = trace_graphs(shared / "h200" / "et" / f"{case}.et.json.gz")[0]
    assert seconds(graph) == pytest.approx(runs["b"]["gpu_active_ms"] * 1e-3, rel=0.05)
    assert memory_profile(graph).peak_allocated == pytest.approx(runs["b"]["peak_alloc"], rel=0.03)


@pytest.mark.parametrize(
    ("name", "ranks", "collectives"),
    [
        pytest.param("megatron_tp8_a100", 8, 84, marks=pytest.mark.slow),
        ("dlrm_8xv100/et_[0-7].json.gz", 8, 8),
        ("resnet_ddp2_et", 2, 7),
    ],
)
def test_ranks_of_public_traces_match_all_their_collectives(
    shared: Path, name: str, ranks: int, collectives: int
) -> None:
    graphs = trace_graphs(shared / "traces" / name)
    assert sum(len(g.ranks) for g in graphs) == ranks
    assert {sum(bool(collective_of(op)) for op in g.ops) for g in graphs} == {collectives}
    result = predict(graphs, gpu="a100", draws=1)
    assert result.many is not None and result.many.ranks == ranks
