"""Recommendation jobs: their layers as PyTorch runs them, their ranks through the engine, their files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.embeddings import Reuse, Table
from presage.embeddings.dlrm_graph import SPARSE, EmbeddingCounts, dlrm_graph
from presage.embeddings.dlrm_job import DlrmJob, read_job
from presage.embeddings.dlrm_ranks import DlrmRanks, dlrm_ranks, predict_dlrm
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, TablePlacement
from presage.errors import InputError, PresageError
from presage.graph.graph import Graph
from presage.prediction.step import StepResult

ROOT = Path(__file__).resolve().parents[2]
TABLES = tuple(Table(f"t{i}", 200_000, 64, 8.0, Reuse(alpha=1.0)) for i in range(8))
JOB = DlrmJob(
    "job", TABLES, 32768, 4, "dgx-h200", bottom=(256, 64), top=(256, 128, 1), precision="fp32", plan="naive"
)  # fmt: skip
NO_HOST = 1e-3


def _found(job: DlrmJob, **more: float) -> tuple[DlrmRanks, StepResult]:
    team = dlrm_ranks(job, **more)  # type: ignore[arg-type]
    return team, predict_dlrm(team, draws=1)


# ---- the layers

TORCH = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(64 + 36, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
        rows, columns = torch.tril_indices(9, 9, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        joined = torch.cat([x, sparse], 1).view(len(x), 9, 64)
        products = torch.bmm(joined, joined.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([x, products], 1))


def build(device):
    model = Model().to(device)
    dense, labels = torch.randn(8192, 13, device=device), torch.zeros(8192, 1, device=device)
    sparse = torch.randn(8192, 512, device=device, requires_grad=True)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.BCEWithLogitsLoss()

    def step():
        optimizer.zero_grad()
        loss(model(dense, sparse), labels).backward()
        optimizer.step()

    return step
"""
LAYERS = ("addmm", "mm", "bmm", "clamp_min", "threshold_backward", "sum", "index", "_index_put_impl_", "sigmoid")


def _shapes(graph: Graph) -> Counter[tuple[str, tuple[tuple[int, ...], ...], str]]:
    """The ops of layers with their shapes; a bias's gradient is summed in two ways that are one."""
    out: Counter[tuple[str, tuple[tuple[int, ...], ...], str]] = Counter()
    for op in graph.ops:
        if op.name.removeprefix("aten::") in LAYERS and op.kernels:
            out[op.name, tuple(t.shape for t in graph.inputs_of(op)), op.phase] += 1
    return out


def test_the_layers_are_the_ops_that_pytorch_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from presage.capture import capture, load

    path = tmp_path / "model.py"
    path.write_text(TORCH)
    real = capture(load(f"{path}:build"), {}, source="x")
    mine = dlrm_graph(replace(JOB, optimizer="sgd"), EmbeddingCounts(512, 0, 0, 1, 1, 0))
    assert _shapes(mine) == _shapes(real)


def test_products_are_in_the_precision_of_the_job() -> None:
    graph = dlrm_graph(replace(JOB, precision="bf16"), EmbeddingCounts(512, 0, 0, 1, 1, 0))
    products = [op for op in graph.ops if op.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert {t.dtype for op in products for t in graph.inputs_of(op)} == {"bfloat16"}
    gradients = [t for t in graph.tensors if graph.storages[t.storage].role == "gradient"]
    assert {t.dtype for t in gradients} == {"float32"}
    assert dlrm_graph(replace(JOB, precision="tf32"), EmbeddingCounts(512, 0, 0, 1, 1, 0)).flags["allow_tf32"] is True


def test_a_cross_network_multiplies_by_its_low_rank_matrices() -> None:
    graph = dlrm_graph(
        replace(JOB, interaction="dcn", cross_layers=2, cross_rank=32), EmbeddingCounts(512, 0, 0, 1, 1, 0)
    )
    wide = 64 + 512
    forward = [op for op in graph.ops if op.module.startswith("cross") and op.name in ("aten::mm", "aten::addmm")]
    shapes = [graph.outputs_of(op)[0].shape for op in forward if op.phase == "forward"]
    assert shapes == [(8192, 32), (8192, wide)] * 2
    weights = sum(s.nbytes // 4 for s in graph.storages if s.role == "parameter" and s.module.startswith("cross"))
    assert weights == 2 * (2 * 32 * wide + wide)


def test_a_dot_interaction_needs_equal_widths() -> None:
    with pytest.raises(PresageError, match="as wide as the bottom layers' output, 32"):
        dlrm_graph(replace(JOB, bottom=(32,)), EmbeddingCounts(512, 0, 0, 1, 1, 0))


# ---- the ranks


def test_equal_ranks_are_folded_and_nobody_waits() -> None:
    _, found = _found(JOB, pace=NO_HOST)
    assert found.many is not None
    assert [(k.ranks, k.wait) for k in found.many.kinds] == [(4, 0.0)]


def test_ranks_with_less_to_look_up_wait_for_the_one_with_more() -> None:
    placed = [TablePlacement(TABLE, (0,))] * 5 + [TablePlacement(TABLE, (r,)) for r in (1, 2, 3)]
    plan = ShardingPlan(4, tuple(placed))
    team = dlrm_ranks(JOB, given=plan, pace=NO_HOST)
    found = predict_dlrm(team, draws=1)
    assert found.many is not None
    busy, light = found.many.kinds[0], found.many.kinds[-1]
    assert (busy.rank, busy.wait) == (0, 0.0)
    more = team.cost.load.forward[0] - team.cost.load.forward[3]
    more += team.cost.load.backward[0] - team.cost.load.backward[3]
    assert light.wait == pytest.approx(more, rel=0.1)
    assert found.step.p50 > _found(JOB, pace=NO_HOST)[1].step.p50


def test_sending_the_next_batch_beside_this_one_helps() -> None:
    (_, beside), (_, before) = (_found(replace(JOB, pipelined=p), pace=NO_HOST) for p in (True, False))
    assert beside.step.p50 < before.step.p50


def test_one_rank_sends_nothing() -> None:
    _, found = _found(replace(JOB, ranks=1, batch=8192))
    assert found.many is not None
    assert found.many.communication == 0


@pytest.mark.parametrize("kind", [ROW, DATA, COLUMN])
def test_every_way_of_cutting_goes_through_the_engine(kind: str) -> None:
    first = TablePlacement(kind, (0, 1) if kind == COLUMN else ())
    plan = ShardingPlan(4, (first, *(TablePlacement(TABLE, (i % 4,)) for i in range(1, 8))))
    team = dlrm_ranks(JOB, given=plan, pace=NO_HOST)
    found = predict_dlrm(team, draws=1)
    assert found.step.p50 > team.cost.seconds / 2
    names = {op.module.removeprefix(SPARSE) for op in team.team.steps[0].graph.ops if op.module.startswith(SPARSE)}
    expected = {ROW: {"rows.forward", "scatter", "gather"}, DATA: {"replicas", "replicas.update"}, COLUMN: {"output"}}
    assert expected[kind] <= names


def test_memory_is_tables_and_layers() -> None:
    team, found = _found(JOB)
    held = 2 * (200_000 * 64 * 4 + 200_000 * 4)
    assert held < found.peak_memory < held + 2e9
    assert team.cost.load.memory.max() > held


def test_an_unknown_plan_and_one_that_does_not_fit_are_told() -> None:
    with pytest.raises(PresageError, match="unknown plan 'best'"):
        dlrm_ranks(replace(JOB, plan="best"))
    with pytest.raises(PresageError, match="GiB more than a rank has"):
        dlrm_ranks(replace(JOB, memory=1e8))


# ---- the file and the command


def test_the_examples_can_be_read() -> None:
    for path in (ROOT / "examples" / "dlrm").glob("*.toml"):
        assert read_job(path).tables


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('interaction = "dot"', 'interaction = "sum"', "interaction: is 'sum': choose from dot, cat, dcn"),
        ("ranks = 8", 'ranks = "8"', "ranks: Expected `int`"),
        ("ranks = 8", "rank = 8", "missing required field `ranks`|unknown field `rank`"),
        ("bottom = [512, 256, 128]", "bottom = []", "dense.bottom: should be widths"),
        ('tables = "criteo_tables.json"', 'tables = "none.json"', "none.json: cannot be read"),
    ],
)
def test_bad_jobs_are_told_where(tmp_path: Path, old: str, new: str, problem: str) -> None:
    text = (ROOT / "examples/dlrm/criteo.toml").read_text()
    assert old in text
    (tmp_path / "job.toml").write_text(text.replace(old, new))
    with pytest.raises(InputError, match=problem):
        read_job(tmp_path / "job.toml")


def test_the_command_tells_the_step_and_draws_it(tmp_path: Path) -> None:
    job, trace = ROOT / "examples/dlrm/criteo.toml", tmp_path / "trace.json"
    args = ["dlrm", str(job), "--plan", "size_greedy", "--trace", str(trace), "--draws", "20", "--json", "-"]
    run = CliRunner().invoke(app, args)
    assert run.exit_code == 0, run.output
    value = json.loads(run.stdout)
    assert value["kind"] == "dlrm"
    assert value["step_ms"]["p5"] <= value["step_ms"]["p50"]
    assert sum(k["ranks"] for k in value["kinds"]) == 8
    assert value["embeddings_ms"]["lookup"] > 0
    assert "traceEvents" in trace.read_text()[:200]
    shown = CliRunner().invoke(app, ["dlrm", str(job), "--plan", "naive", "--ranks", "2", "--draws", "1"])
    assert "sharded embeddings + ddp" in shown.output
