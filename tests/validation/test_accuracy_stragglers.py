"""The claim on per-operation tables: bars on measured jobs, every table of another shape scored or named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands import runner
from made_up_ops import SHAPES, made_up_job
from planted_ops import Planted, table_of
from presage.errors import InputError
from presage_fit import optable
from presage_validation.command import command
from presage_validation.score import Skipped
from presage_validation.stragglers import (
    Effort,
    JobForecast,
    StragglersResult,
    score_stragglers,
    score_table,
    unfold_ranks,
)

COLUMNS = ("op", "dp", "stage", "rank", "step", "seq", "chunk", "microbatch", "model_chunk", "start", "duration")
QUICK = Effort(draws=600, refits=3, seeds=1)
METRICS = {
    "p50_error",
    "p95_error",
    "p99_error",
    "w1_over_mean",
    "crps_ratio",
    "coverage_95",
    "ks",
    "ks_floor",
    "run_interval_90_coverage",
}


# ---- measured jobs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(shared: Path) -> StragglersResult:
    folder = shared / "traces" / "bytedance_straggler"
    return score_stragglers([folder], effort=Effort(draws=4000, refits=5, seeds=2))


def of(result: StragglersResult, job: str) -> JobForecast:
    return next(j for j in result.jobs if j.job == job)


@pytest.mark.slow
def test_a_slow_worker_job_is_predicted(measured: StragglersResult) -> None:
    job = of(measured, "AR")
    for found in (job.ours, job.back):
        assert found.n == 22
        assert abs(found.p95_error) <= 0.005 and found.w1_over_mean <= 0.003
        assert found.ks <= found.ks_floor + 0.05
    assert all(abs(e) <= 0.005 for e in job.sure.seeds)
    assert 0 < job.sure.monte_carlo < job.sure.training_steps < 0.005


@pytest.mark.slow
def test_a_slow_stage_job_is_predicted(measured: StragglersResult) -> None:
    job = of(measured, "ST")
    for found in (job.ours, job.back):
        assert found.n == 16 and found.w1_over_mean <= 0.01
        assert found.ks <= found.ks_floor + 0.05
    assert job.ours.run_interval_90_coverage == 1.0


@pytest.mark.slow
def test_independent_draws_miss(measured: StragglersResult) -> None:
    slow = of(measured, "AR")
    assert slow.iid.p95_error == pytest.approx(-0.33, abs=0.03)
    assert slow.iid.w1_over_mean > 100 * slow.ours.w1_over_mean
    assert slow.iid.run_interval_90_coverage == 0.0


@pytest.mark.slow
def test_what_the_command_says(measured: StragglersResult) -> None:
    told = measured.to_json()
    json.dumps(told)
    assert set(told["metrics"]) >= METRICS and set(told["baselines"]["iid_pool"]) >= METRICS
    assert set(told["groups"]) == {"AR", "ST"} and told["n"] == 38 and not told["skipped"]
    assert told["groups"]["AR"]["slow_workers"][0]["dp_rank"] == 0
    assert told["metrics"]["p95_error"] == pytest.approx(
        np.median([abs(told["groups"][j]["p95_error"]) for j in ("AR", "ST")])
    )
    assert len(measured.lines()) == 39


# ---- jobs made up ----------------------------------------------------------------------------------------------------


def test_lengths_that_vary() -> None:
    """A job as the third published one: dp 32, pp 2, 8 microbatches, work that varies by 22% forward, 37% backward."""
    found = score_table(table_of(Planted(), 44, seed=1), effort=QUICK)
    assert found.ours.ks <= found.ours.ks_critical_5pct
    assert found.ours.w1_over_mean < 0.02 < 0.06 < found.iid.w1_over_mean
    assert found.iid.p95_error < -0.06


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tables_of_every_shape(tmp_path: Path, shape: dict[str, object]) -> None:
    varied = {"spread": 0.05, **shape, "steps": 12}
    result = score_stragglers([made_up_job(tmp_path / "trace-X.csv", **varied)], effort=QUICK)  # type: ignore[arg-type]
    assert not result.skipped and result.jobs[0].ours.n == 6
    assert abs(result.jobs[0].ours.p50_error) < 0.1
    json.dumps(result.to_json())


def test_several_ranks_a_worker_are_replicas_that_go_together() -> None:
    table = table_of(Planted(replicas=4, microbatches=4), 12)
    twice = replace(table, **{k: np.concatenate([getattr(table, k)] * 2) for k in COLUMNS})  # type: ignore[arg-type]
    twice = replace(twice, rank=twice.rank + np.repeat([0, 1000], len(table)))
    apart = unfold_ranks(twice)
    assert apart.replicas == 8 and unfold_ranks(table) is table
    found = score_table(apart, effort=QUICK)
    assert found.effects.parts.together == 2
    more = replace(twice, rank=np.where(twice.dp == 0, twice.rank + 2000 * (twice.step % 3), twice.rank))
    with pytest.raises(InputError, match="ranks a worker"):
        unfold_ranks(more)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    good = made_up_job(tmp_path / "trace-A.csv", steps=12, spread=0.05)
    extra = "".join(f"0,0,0,{s},teleport,0.0,0.1,0,-1,-1,-1\n" for s in range(12))
    good.write_text(good.read_text() + extra + "0,0,0,4,gc,0.0,0.0,0,-1,-1,-1\n")
    made_up_job(tmp_path / "trace-B.csv", steps=4)
    (tmp_path / "trace-C.csv").write_text("once upon a time\n")
    result = score_stragglers([tmp_path], effort=QUICK)
    assert [j.job for j in result.jobs] == ["A"]
    said = {s.row: s.reason for s in result.skipped}
    assert "not known" in said["A: optype teleport"] and "not fitted" in said["A: step 4"]
    assert "at least" in said["trace-B.csv"] and "not a table" in said["trace-C.csv"]
    assert all(isinstance(s, Skipped) for s in result.skipped)


def test_steps_of_two_kinds_are_drawn_as_often_as_they_were(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "trace-A.csv", steps=24, spread=0.01)
    lines = path.read_text()
    slow = "".join(f"0,0,0,{s},gc,0.0,60.0,0,-1,-1,-1\n" for s in range(24) if s % 8 < 2)
    path.write_text(lines + slow)
    found = score_table(optable.read(path), effort=QUICK)
    assert found.ours.coverage_95 == 1.0
    assert abs(found.ours.p50_error) < 0.05 and abs(found.ours.p99_error) < 0.05


def test_missing_steps_and_odd_numbers_change_nothing() -> None:
    table = table_of(Planted(replicas=4, microbatches=4), 12)
    sparse = replace(table, step=table.step**2 * 7 + 3)
    one, other = (score_table(t, effort=QUICK).ours for t in (table, sparse))
    assert one.p95_error == other.p95_error and one.ks == other.ks


def test_folders_without_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table of operations"):
        score_stragglers([tmp_path])
    with pytest.raises(InputError, match="no such file"):
        score_stragglers([tmp_path / "nowhere"])


def test_command(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "trace-A.csv", steps=12, spread=0.05)
    run = runner(command)
    said = run("stragglers", path, "--out", tmp_path / "rows.csv")
    assert "iid pool" in said and "W1/mean" in said
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 7
    told = json.loads(run("stragglers", path, "--json", "-"))
    assert told["kind"] == "stragglers" and set(told["metrics"]) >= METRICS
