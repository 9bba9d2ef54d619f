"""What TorchRec copies around its exchange of pooled rows, and the intervals of recommendation jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from presage.embeddings import Table
from presage.embeddings.dlrm_graph import SPARSE
from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import dlrm_ranks, predict_dlrm
from presage.embeddings.sharding_plan import ShardingPlan
from presage.graph.graph import Graph
from presage.prediction.result import model_error

TABLES = tuple(Table(f"t{i}", 100_000, 256, 1.0) for i in range(8))
JOB = DlrmJob("copies", TABLES, 16384, 4, "dgx-h200", bottom=(256,), top=(64, 1), precision="fp32")
PLAN = ShardingPlan.table_wise(4, [t % 4 for t in range(8)])
BYTES = 4096 * 8 * 256 * 4  # of pooled rows of a rank's samples


def _graph(job: DlrmJob) -> Graph:
    return dlrm_ranks(job, given=PLAN).team.steps[0].graph


def _copied(graph: Graph, phase: str) -> float:
    """Times that all pooled rows go through a copy of the embeddings."""
    ops = [op for op in graph.ops if op.phase == phase and op.module == "embeddings" and op.kernels]
    names = ("aten::copy_", "aten::cat", "aten::div_")
    return sum(sum(t.nbytes for t in graph.outputs_of(op)) for op in ops if op.name in names) / BYTES


def test_pooled_rows_are_copied_as_often_as_torchrec_copies_them() -> None:
    """Forward: into the buffer sent, by rank, by feature. Backward: by feature, cut by rank, together, divided."""
    graph = _graph(JOB)
    assert _copied(graph, "forward") == pytest.approx(3.0)
    assert _copied(graph, "backward") == pytest.approx(4.0)


def test_one_rank_exchanges_nothing() -> None:
    alone = dlrm_ranks(replace(JOB, ranks=1), given=ShardingPlan.table_wise(1, [0] * 8)).team.steps[0].graph
    assert _copied(alone, "forward") == _copied(alone, "backward") == pytest.approx(4.0)  # four times the samples


def test_half_precision_on_the_wire_is_encoded_and_decoded() -> None:
    names = [op.name for op in _graph(JOB).ops if op.module == "embeddings"]
    halves = [op.name for op in _graph(replace(JOB, wire="fp16")).ops if op.module == "embeddings"]
    assert halves.count("aten::clamp") - names.count("aten::clamp") == 2
    assert halves.count("aten::copy_") - names.count("aten::copy_") == 4
    brain = [op.name for op in _graph(replace(JOB, wire="bf16")).ops if op.module == "embeddings"]
    assert brain.count("aten::clamp") == 0


def test_the_exchange_comes_after_its_copy() -> None:
    graph = _graph(JOB)
    modules = [(op.module, op.name) for op in graph.ops if op.phase == "forward"]
    sent = modules.index((f"{SPARSE}output", "c10d::alltoall_base_"))
    assert modules[sent - 1] == ("embeddings", "aten::copy_")


def test_jobs_without_nvlink_have_the_interval_of_such_runs() -> None:
    near = predict_dlrm(dlrm_ranks(JOB, given=PLAN), draws=1)
    far = predict_dlrm(dlrm_ranks(replace(JOB, platform="8xl40s"), given=PLAN), draws=1)
    assert near.step.p95 / near.step.p50 == pytest.approx(model_error("recommendation").high, rel=0.05)
    assert far.step.p95 / far.step.p50 == pytest.approx(model_error("recommendation_pcie").high, rel=0.05)
    assert any("without NVLink" in note for note in far.notes)
