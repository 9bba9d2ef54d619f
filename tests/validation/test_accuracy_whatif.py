"""What edits are worth: measured pairs read, scored, and a few of the measured ones predicted again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from presage.errors import InputError, PresageError
from presage_validation.whatif import MeasuredEdit, ScoredEdit, Side, measured_pairs, points_saved, rates, score_whatif

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "h200_edits"


def measured(*speedups: float, active: float = 0.5) -> MeasuredEdit:
    runs = tuple((Side(10.0, 10 * active, 1e9), Side(10 / s, 10 / s * active, 1e9), s) for s in speedups)
    return MeasuredEdit("cuda_graph/x", "cuda_graph", runs)


def scored(predicted: float, found: float) -> ScoredEdit:
    return ScoredEdit(measured(found), predicted, predicted * 0.9, predicted * 1.1, predicted, 0.0, "")


def test_points_signs_and_ranges() -> None:
    assert points_saved(2.0) == 50.0 and points_saved(0.5) == -100.0 and points_saved(1.0) == 0.0
    pairs = [scored(2.0, 2.0), scored(1.1, 1.25), scored(1.05, 0.9), scored(0.99, 1.02)]
    found = rates(pairs)
    assert [round(p.points, 1) for p in pairs] == [0.0, -10.9, 15.9, -3.0]
    assert found["with_effect"] == 3 and found["right_sign"] == pytest.approx(2 / 3), "2% is no effect"
    assert found["interval_hit_rate"] == 0.5
    assert found["median_points"] == pytest.approx((10.9 + 3.0) / 2, abs=0.1)


def test_runs_of_a_pair_count_with_their_median() -> None:
    m = measured(1.0, 2.0, 4.0)
    assert m.speedup == 2.0 and m.noise == 50.0 and measured(2.0).noise is None
    assert measured(2.0).bound == "host-bound" and measured(2.0, active=0.99).bound == "gpu-bound"


def test_files_of_pairs(tmp_path: Path) -> None:
    side = {"step_ms": 2.0, "gpu_active_ms": 1.0, "peak_bytes": 5, "kernels": 3}
    good = {"edit": "tf32", "base": side, "changed": side | {"step_ms": 1.0}}
    text = json.dumps({"tf32/a": good, "tf32/b": {"edit": "tf32", "failed": "no"}, "_about": {}})
    (tmp_path / "run1.json").write_text(text)
    found = measured_pairs([tmp_path])
    assert list(found) == ["tf32/a"] and found["tf32/a"].speedup == 2.0
    (tmp_path / "run1.json").write_text('{"tf32/a": {"edit": 3}}')
    with pytest.raises(InputError, match=r"tf32/a: Expected `str`, got `int`"):
        measured_pairs([tmp_path])
    with pytest.raises(InputError, match=r"no run\*.json"):
        measured_pairs([tmp_path / ".."])


def test_what_was_measured() -> None:
    found = measured_pairs([DATA])
    edits = {name.partition("/")[0] for name in found}
    assert len(found) >= 120 and len(edits) >= 15
    assert sum(m.bound == "gpu-bound" for m in found.values()) >= 48


def test_paths_are_told_apart() -> None:
    with pytest.raises(PresageError, match=r"PAIRS\.py"):
        score_whatif([DATA])


FEW = ("cuda_graph/recommender", "joined_tables/recommender_wide", "tf32/mlp", "fused_adam/mlp", "fused_chains/by_hand")


@pytest.mark.slow
def test_a_few_measured_pairs_are_predicted(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="captures steps")
    runs = [json.loads(file.read_text()) for file in sorted(DATA.glob("run*.json"))]
    for k, run in enumerate(runs):
        (tmp_path / f"run{k}.json").write_text(json.dumps({n: r for n, r in run.items() if n in FEW}))
    result = score_whatif([ROOT / "workloads" / "edited.py", tmp_path])
    assert {p.measured.name for p in result.pairs} == set(FEW) and not result.skipped
    assert result.rates["median_points"] <= 3 and result.rates["right_sign"] == 1
    assert all(abs(p.gpu_speedup / p.measured.gpu_speedup - 1) < 0.05 for p in result.pairs)
    told = result.to_json()
    assert told["n"] == len(FEW) and told["groups"]["cuda_graph"]["pairs"] == 1
    assert len(result.lines()) == len(FEW) + 1
