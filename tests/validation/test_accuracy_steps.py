"""Scores of predicted step times: what each figure is, and the bars on MLPerf's logs and the H200 series."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.errors import PresageError
from presage_validation.steps import WITHIN, StepsResult, score_steps, summary
from presage_validation.temporal import best_family, crps, forecast, ks_distance, ks_floor, score_temporal, wasserstein


def quiet(_: str) -> None:
    pass


# ---- figures


def test_crps_of_a_normal() -> None:
    """Closed form: sigma (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))."""
    from scipy.special import ndtr

    draws = 5 + 2 * np.random.default_rng(0).standard_normal((40_000, 1))
    for y in (5.0, 8.0):
        z = (y - 5) / 2
        exact = 2 * (z * (2 * ndtr(z) - 1) + 2 * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi))
        assert crps(draws, np.array([y]))[0] == pytest.approx(exact, rel=0.03)
    assert crps(np.full((10, 1), 3.0), np.array([4.5]))[0] == pytest.approx(1.5)


def test_distances() -> None:
    pool = np.sort(np.random.default_rng(1).standard_normal(5000))
    assert wasserstein(pool, pool + 0.5) == pytest.approx(0.5, abs=1e-6)
    assert ks_distance(pool, pool) < 1e-3 and ks_distance(pool, pool + 100) == 1
    rng = np.random.default_rng(2)
    mean = np.mean([ks_distance(pool, rng.standard_normal(100)) for _ in range(200)])
    assert mean == pytest.approx(ks_floor(100), rel=0.15)


def test_perfect_forecast() -> None:
    rng = np.random.default_rng(3)
    draws, seen = 10 + rng.standard_normal((2000, 800)), 10 + rng.standard_normal(800)
    f = forecast(draws, seen)
    assert abs(f.p95_error) < 0.02 and f.ks < 2 * f.ks_floor and f.covered_95 / f.n == pytest.approx(0.95, abs=0.03)
    assert sum(f.pit) == 800 and max(f.pit) < 120


def test_best_family_is_the_right_one() -> None:
    rng = np.random.default_rng(4)
    assert best_family(rng.lognormal(0, 0.8, 4000))[0] == "LogNormal"
    assert best_family(np.maximum(0.01, 10 + rng.standard_normal(4000)))[0] in ("Normal", "Gamma")


# ---- the command's rules


def run(system: str, name: str, seconds: list[float], stride: int = 1) -> dict[str, object]:
    steps = [[stride * i, s] for i, s in enumerate(seconds)]
    return {"submitter": "x", "system": system, "benchmark": "b", "run": name, "steps": steps, "step_stride": stride}


def scored(tmp_path: Path, runs: list[dict[str, object]]) -> StepsResult:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": runs}))
    return score_steps([path], quiet)


def test_kinds_are_not_mixed_and_lone_runs_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = [run(s, r, list(10 + 0.05 * rng.standard_normal(60))) for s in ("m", "n") for r in "abc"]
    rows += [run("w", r, list(10 + 0.05 * rng.standard_normal(30)), 32) for r in "ab"] + [run("lone", "a", [1.0] * 20)]
    result = scored(tmp_path, rows)
    table = result.to_json()
    assert result.kinds() == ["single steps", "means of 32 steps"] and table["n"] == 8
    assert table["metrics"]["runs"] == 6 and table["metrics"]["cut"] == 30 and table["metrics"]["n"] == 330
    assert table["uncut"]["n"] == 360 and table["kinds"]["means of 32 steps"]["cut"] == 0
    assert [s["row"] for s in table["skipped"]] == ["x/lone/b"]
    assert set(table["baselines"]) == {"iid_pool", "best_family"} and set(table["groups"]) == {
        "x/m/b",
        "x/n/b",
        "x/w/b",
    }
    assert table["baselines"]["best_family"]["crps_ratio"] == pytest.approx(1)
    assert len(result.lines()) == 9 and json.dumps(table)


def test_same_seed_same_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    rows = [run("m", r, list(10 + 0.05 * rng.standard_normal(40))) for r in "abc"]
    first, second = scored(tmp_path, rows), scored(tmp_path, rows)
    assert first.to_json() == second.to_json()


def test_nothing_to_score(tmp_path: Path) -> None:
    result = scored(tmp_path, [run("m", "a", [1.0, 2.0])])
    assert not result.rows and result.to_json()["metrics"] == {} and len(result.skipped) == 1
    with pytest.raises(PresageError):
        scored(tmp_path, [])


# ---- bars


@pytest.fixture(scope="module")
def mlperf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> StepsResult:
    """Groups with single steps, left-out run by left-out run."""
    path = shared / "steps" / "mlperf_v5.0.json.gz"
    if not path.is_file():
        pytest.skip(f"no step logs at {path}")
    runs = [r for r in json.loads(gzip.decompress(path.read_bytes()))["runs"] if r["steps"]]
    single = tmp_path_factory.mktemp("steps") / "single.json"
    single.write_text(json.dumps({"runs": runs}))
    return score_steps([single], quiet)


@pytest.fixture(scope="module")
def means(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> StepsResult:
    """The same runs as newer logs would have them: one record, the mean of 32 steps."""
    path = shared / "steps" / "mlperf_v5.0.json.gz"
    if not path.is_file():
        pytest.skip(f"no step logs at {path}")
    runs = [r for r in json.loads(gzip.decompress(path.read_bytes()))["runs"] if r["steps"]]
    strided = tmp_path_factory.mktemp("steps") / "means.json"
    strided.write_text(json.dumps({"runs": [averaged(r) for r in runs]}))
    return score_steps([strided], quiet)


def averaged(run: dict[str, Any], stride: int = 32) -> dict[str, Any]:
    many = len(run["steps"]) // stride * stride
    parts = np.array(run["steps"])[:many].reshape(-1, stride, 2)
    steps = [[int(p[-1, 0]), float(p[:, 1].mean())] for p in parts]
    return {**run, "steps": steps, "step_end_s": run["step_end_s"][stride - 1 : many : stride], "step_stride": stride}


@pytest.mark.slow
def test_means_of_32_steps_meet_the_bars(means: StepsResult) -> None:
    assert means.kinds() == ["means of 32 steps"] and not means.skipped
    found = means.to_json()["metrics"]
    assert found["runs"] == 42 and found["cut"] == 0 and found["n"] == 359
    assert 0.93 <= found["coverage_95"] <= 0.97
    assert found["p95_error"] <= 0.015
    assert found["crps_ratio"] <= 0.75
    assert found["run_interval_90_coverage"] >= 0.85
    iid = summary(means.rows, "iid")
    assert found["crps_ratio"] < 0.85 * iid["crps_ratio"]


@pytest.mark.slow
def test_no_data_of_means(means: StepsResult) -> None:
    """No constant for all systems is within 1.5 points of more."""
    measured = np.array([r.measured for r in means.zero.rows])
    best = max(np.mean(np.abs(measured - c) <= WITHIN) for c in np.arange(0, 0.06, 0.0002))
    assert means.zero.metrics()["zero_data_within_1.5pt"] >= best > 0.75


@pytest.mark.slow
def test_left_out_runs_meet_the_bars(mlperf: StepsResult) -> None:
    found = mlperf.to_json()["metrics"]
    assert found["runs"] == 42 and found["n"] + found["cut"] == 12_203
    assert 0.94 <= found["coverage_95"] <= 0.96
    assert found["p95_error"] <= 0.005
    assert found["crps_ratio"] <= 0.55
    assert found["run_interval_90_coverage"] >= 0.85


@pytest.mark.slow
def test_baselines_are_worse(mlperf: StepsResult) -> None:
    ours, iid = summary(mlperf.rows), summary(mlperf.rows, "iid")
    assert ours["crps_ratio"] < iid["crps_ratio"] and ours["w1_over_mean"] < iid["w1_over_mean"]
    assert iid["run_interval_90_coverage"] < 0.7 < ours["run_interval_90_coverage"]
    assert iid["coverage_95"] < 0.93


@pytest.mark.slow
def test_no_data_meets_its_bar(mlperf: StepsResult) -> None:
    assert len(mlperf.zero.rows) == 14
    assert mlperf.zero.metrics()["zero_data_within_1.5pt"] >= 0.8


@pytest.mark.slow
def test_block_means_are_scored(shared: Path, tmp_path: Path) -> None:
    path = shared / "steps" / "mlperf_v5.0.json.gz"
    if not path.is_file():
        pytest.skip(f"no step logs at {path}")
    runs = [r for r in json.loads(gzip.decompress(path.read_bytes()))["runs"] if r["submitter"] == "Oracle"]
    result = scored(tmp_path, runs)
    found = result.to_json()["kinds"]["block means"]
    assert found["runs"] == 70 and found["p95_error"] < 0.005 and found["run_interval_90_coverage"] >= 0.85
    assert 0.92 <= found["coverage_95"] <= 1.0 and not result.zero.rows


def test_second_halves_of_kernel_series(shared: Path) -> None:
    path = shared / "h200" / "temporal.json.gz"
    if not path.is_file():
        pytest.skip(f"no series at {path}")
    result = score_temporal(path, quiet)
    assert len(result.rows) == 8 and not result.skipped
    for r in result.rows:
        for q in ("p95", "p99"):
            x = r.ratios[q]
            assert abs(x.error) <= max(0.01, 0.15 * x.measured), (r.series, q)
    found = result.metrics()
    assert found["p95_over_p50_error_points"] <= 0.25 and found["p99_over_p50_error_points"] <= 0.15


def test_odd_series_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"series": [{"name": "few", "ms": [1, 2]}, {"name": "none"}, 3]}))
    result = score_temporal(path, quiet)
    assert not result.rows and [s.row for s in result.skipped] == ["few", "none", "2"]
    path.write_text("[]")
    with pytest.raises(PresageError, match="list of series"):
        score_temporal(path, quiet)
