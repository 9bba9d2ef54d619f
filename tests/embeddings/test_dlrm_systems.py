"""What frameworks do in a recommendation step: options, HugeCTR's planner, the two-tier exchange."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.embeddings import Reuse, Table
from presage.embeddings.dlrm_job import DlrmJob, Evaluation, read_job
from presage.embeddings.dlrm_ranks import dlrm_ranks, evaluation_seconds, predict_dlrm
from presage.embeddings.dlrm_system import FRAMEWORKS, SOURCES, DlrmSystem, dlrm_system
from presage.embeddings.sharding_cost import ShardCosts, sharding_cost
from presage.embeddings.sharding_hugectr import hugectr_plan, place_row_shards
from presage.embeddings.sharding_plan import (
    DATA,
    TABLE,
    TABLE_ROW,
    ShardingPlan,
    ShardingProblem,
    TablePlacement,
)  # fmt: skip
from presage.embeddings.table_files import read_tables
from presage.errors import InputError, PresageError
from presage.hardware import platform

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "dlrm" / "mlperf_dcnv2.toml"
TABLES = tuple(Table(f"t{i}", 2_000_000, 128, 8.0, Reuse(alpha=1.0)) for i in range(8))
HUGECTR = FRAMEWORKS["hugectr"]
JOB = DlrmJob(
    "job", TABLES, 32768, 8, "dgx-h200", interaction="dcn", precision="fp16", plan="hugectr", wire="fp16",
    system=HUGECTR,
)  # fmt: skip


def _step(job: DlrmJob) -> float:
    return predict_dlrm(dlrm_ranks(job), draws=1).step.p50


def test_every_option_names_its_source() -> None:
    options = set(DlrmSystem.__dataclass_fields__) - {"framework", "plan"}
    assert options <= set(SOURCES)


def test_options_of_a_framework_are_checked() -> None:
    assert dlrm_system("hugectr", {"exchange": "flat"}).exchange == "flat"
    for framework, options, said in (
        ("caffe", {}, "unknown framework 'caffe'"),
        ("hugectr", {"graph": True}, "unknown option 'graph'"),
        ("hugectr", {"cuda_graph": 3}, "should be a bool"),
        ("hugectr", {"exchange": "ring"}, "choose from flat, two_tier"),
        ("torchrec", {"gradient": "fp16"}, "need fused_dense"),
    ):
        with pytest.raises(PresageError, match=said):
            dlrm_system(framework, options)


def test_each_mechanism_shortens_the_step() -> None:
    usual = _step(JOB)
    for option in ("cuda_graph", "fused_dense", "bottom_beside_exchange"):
        changes: dict[str, object] = {option: False}
        if option == "fused_dense":
            changes |= {"gradient": "fp32", "one_reduce": False}
        assert _step(replace(JOB, system=replace(HUGECTR, **changes))) > usual * 1.005, option
    assert _step(replace(JOB, wire="fp32")) > usual
    assert _step(replace(JOB, system=replace(HUGECTR, gradient="fp32"))) > usual


def test_the_exchange_in_two_tiers_is_faster_between_nodes_and_the_same_inside_one() -> None:
    many = replace(JOB, ranks=32, batch=131072)
    flat = replace(HUGECTR, exchange="flat")
    assert _step(many) < _step(replace(many, system=flat))
    assert _step(JOB) == pytest.approx(_step(replace(JOB, system=flat)))


def test_partial_rows_of_a_table_leave_the_node_once() -> None:
    problem = ShardingProblem(TABLES[:1], 16384, 16, platform("dgx-h200"), wire=2, two_tier=True)
    prices = ShardCosts(problem)
    cost = sharding_cost(ShardingPlan(16, (TablePlacement(TABLE_ROW, tuple(range(8))),)), prices)
    pooled = 16384 * 128 * 2
    assert cost.load.outer is not None
    assert cost.load.outer[:8] == pytest.approx(pooled / 8)
    assert cost.load.outer[8:] == pytest.approx(0)
    assert cost.load.output[:8] == pytest.approx(pooled)


def test_the_planner_splits_the_busiest_table() -> None:
    groups = place_row_shards(np.array([100.0, 10.0, 10.0, 10.0]), np.ones(4), 4, 1.0, 1e9)
    assert len(groups[0]) == 4
    alone = place_row_shards(np.array([100.0, 10.0]), np.ones(2), 2, 1000.0, 1e9)
    assert [len(g) for g in alone] == [1, 1]  # where sending costs more than looking up
    with pytest.raises(PresageError, match="no rank has memory left"):
        place_row_shards(np.ones(2), np.full(2, 10.0), 2, 1.0, 5.0)


def test_the_planner_replicates_small_tables_as_in_the_submissions() -> None:
    tables, _ = read_tables(ROOT / "examples" / "dlrm" / "mlperf_tables.json")
    one = ShardingProblem(tables, 55296, 8, platform("dgx-h200"))
    assert hugectr_plan(one, 0.008).counts()[DATA] == 13  # fewer than 7,813 rows
    several = ShardingProblem(tables, 135168, 64, platform("dgx-h100"))
    plan = hugectr_plan(several, 0.0125)
    assert plan.counts()[DATA] == 14
    assert all(len(t.ranks) % 8 == 0 for t in plan.tables if t.sharding in (TABLE, TABLE_ROW))  # whole nodes


def test_evaluation_is_a_share_of_each_step() -> None:
    team = dlrm_ranks(replace(JOB, evaluation=Evaluation(1_000_000, 32768, 10_000_000)))
    share = evaluation_seconds(team)
    twice = dlrm_ranks(replace(JOB, evaluation=Evaluation(2_000_000, 32768, 10_000_000)))
    assert 0 < share < 0.1 * predict_dlrm(team, draws=1).step.p50
    assert evaluation_seconds(twice) == pytest.approx(2 * share, rel=0.05)
    assert evaluation_seconds(dlrm_ranks(JOB)) == 0.0


def test_the_shipped_example_is_near_the_published_steps() -> None:
    job = read_job(EXAMPLE)
    assert (job.system.framework, job.plan) == ("hugectr", "hugectr")
    team = dlrm_ranks(job)
    whole = predict_dlrm(team, draws=1).step.p50 + evaluation_seconds(team)
    assert 0.8 * 3.66e-3 < whole < 1.1 * 4.12e-3  # five published runs on eight H200s: 3.66 to 4.12 ms


def test_a_plan_with_an_unknown_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    placed = {t.name: {"sharding": "table_wise", "ranks": [0]} for t in TABLES} | {"other": {"sharding": "row_wise"}}
    path.write_text(json.dumps({"ranks": 8, "tables": placed}))
    with pytest.raises(InputError, match="names a table that the job does not have: 'other'"):
        dlrm_ranks(replace(JOB, plan=str(path)))


def test_plans_are_compared_by_the_whole_step() -> None:
    from presage.embeddings.step_plans import step_plans

    heavy = (Table("hot", 40_000_000, 128, 100.0, Reuse(alpha=1.0)), *TABLES[:3])
    plans = step_plans(replace(JOB, tables=heavy, ranks=16, batch=32768), seconds=1.0)
    steps = [p.step for p in plans]
    assert steps == sorted(steps)
    assert {"found", "hugectr", "hot row_wise"} <= {p.name.rpartition(", ")[2] for p in plans}
    assert plans[0].step < next(p.step for p in plans if p.name == "naive")
