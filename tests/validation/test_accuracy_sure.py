"""Distributions composed from configs alone: jobs of logs, coverage of logs of a known distribution, the data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.model import Belief, CommonNoise, NoiseModel, WorkSpread
from presage.noise.priors import known_systems, prior
from presage_fit.step_logs import LogEvent, StepLog, step_log
from presage_validation import composed
from presage_validation.composed import ComposedResult, on_same_gpus, score_composed, score_system, with_schedule
from presage_validation.logged_jobs import job_of_log, model_of_benchmark

META: dict[str, Any] = {
    "submitter": "NVIDIA", "system": "eos", "benchmark": "llama31_8b", "accelerator": "NVIDIA H100-SXM5-80GB",
    "n_gpus": 32, "gpus_per_node": 8, "nodes": 4, "interconnect": "NVLINK Gen4", "framework": "NeMo",
    "host_network": "8x ConnectX-7 IB NDR 400Gb/s", "global_batch": 64, "seq_len": 8192,
    "parallel": {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "dp": 8, "micro_batch": 1, "precision": "fp8"},
}  # fmt: skip


def log_of(seconds: Any, stride: int = 1, run: str = "1", events: tuple[LogEvent, ...] = (), **meta: Any) -> StepLog:
    steps = stride * (np.arange(len(seconds)) + 1) - 1
    return step_log(run, "NVIDIA/eos/llama31_8b", steps, seconds, stride, events, meta={**META, **meta})


def test_jobs_are_read_from_logs() -> None:
    found = job_of_log(META, [])
    p = found.job.parallel
    assert (p.tp, p.pp, found.job.dp, found.job.gpus, found.job.precision) == (2, 2, 8, 32, "fp8")
    assert found.job.model.layers == 32 and found.config == "the log's own layout"
    assert found.job.platform.gpu.key == "h100_sxm"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"benchmark": "llama2_70b_lora"}, "LoRA"),
        ({"benchmark": "stable_diffusion"}, "stable_diffusion is not a language model"),
        ({"parallel": None}, "parallel layout"),
        ({"n_gpus": 64}, "its layout is of 32 GPUs, and the log says 64"),
        ({"parallel": {"tp": 2, "pp": 2, "dp": 8}}, "precision"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PresageError, match=reason):
        job_of_log({**META, **changes}, [])


def test_benchmarks_name_models() -> None:
    assert model_of_benchmark("llama31_405b").layers == 126
    assert model_of_benchmark("deepseekv3").experts is not None
    assert model_of_benchmark("gpt_oss_20b").experts is not None


def test_priors_leave_a_submitter_out() -> None:
    every, without = (
        prior("h100_sxm", 2048, 8, 10.0, "screened"),
        prior("h100_sxm", 2048, 8, 10.0, "screened", {"NVIDIA"}),
    )
    assert {s.submitter for s in known_systems()} == {"NVIDIA", "Nebius", "IBM+CoreWeave+NVIDIA"}
    assert without.sources["common"].endswith("7 systems") and every.sources["common"].endswith("14 systems")
    with pytest.raises(PresageError, match="at least one known system"):
        prior("h100_sxm", 2048, 8, 10.0, "screened", {s.submitter for s in known_systems()})


def test_runs_on_the_same_gpus_do_not_vary_by_gpu() -> None:
    belief = Belief(NoiseModel({"products": WorkSpread(rank=0.02, own=0.01)}))
    assert on_same_gpus(belief).noise.of("products") == WorkSpread(rank=0.0, own=0.01)


KNOWN = NoiseModel(common=CommonNoise(sd=0.02))


def known_noise(*_: Any) -> Belief:
    return Belief(KNOWN)


@pytest.mark.parametrize("stride", [1, 8])
def test_a_log_of_the_predicted_distribution_is_covered_at_the_stated_rate(
    monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """Steps of a log drawn from the very noise that is believed: intervals hold what they state, tails agree."""
    monkeypatch.setattr(composed, "prior", known_noise)
    rng = np.random.default_rng(5)
    steps = 3.0 * np.exp(0.02 * rng.standard_normal((1500, stride)))
    row = score_system([], [log_of(steps.mean(axis=1), stride)])
    assert row.coverage["50"] == pytest.approx(0.5, abs=0.05)
    assert row.coverage["90"] == pytest.approx(0.9, abs=0.03)
    assert row.coverage["95"] == pytest.approx(0.95, abs=0.025)
    assert abs(row.tails["p95"].points) < 0.5 and row.ks < 3 * row.ks_floor


def test_a_wider_log_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "prior", known_noise)
    wide = 3.0 * np.exp(0.06 * np.random.default_rng(6).standard_normal(1500))
    row = score_system([], [log_of(wide)])
    assert row.coverage["90"] < 0.6 and row.tails["p95"].points < -4


def test_validations_slow_the_scheduled_share_of_records() -> None:
    events = tuple(LogEvent("validation", k) for k in (49, 99, 149))
    log = log_of(np.full(200, 3.0), events=events)
    noise = prior("h100_sxm", 32, 8, 3.0, "screened").noise
    slowed = with_schedule(np.full((1, 1950), 3.0), [log], noise, 3.0, 0)
    assert (slowed > 3.0).mean() == pytest.approx(3 / 195, abs=0.004)


def test_few_records_and_mixed_kinds_are_refused() -> None:
    with pytest.raises(PresageError, match="too few"):
        score_system([], [log_of(np.full(12, 3.0))])
    with pytest.raises(PresageError, match="different ways"):
        score_system([], [log_of(np.full(99, 3.0)), log_of(np.full(99, 3.0), 32, "2")])


def test_no_rows_give_no_metrics() -> None:
    assert ComposedResult("x", (), ()).to_json()["metrics"] == {}


@pytest.mark.slow
def test_bars_on_mlperf_logs(shared: Path) -> None:
    """What docs/sure.md says: the one bar that is missed is the worst p95, of a system with 8% of its steps stalled."""
    found = score_composed(shared / "steps" / "mlperf_v5.0.json.gz", shared / "runs" / "public_runs.csv").to_json()
    m = found["metrics"]
    assert found["n"] == 14 and len(found["skipped"]) == 43
    assert m["p95_over_p50_points"]["median"] < 0.6 and 0.85 <= m["coverage_90"] <= 0.95
    rest = [abs(g["p95_over_p50"]["points"]) for name, g in found["groups"].items() if "n320" not in name]
    assert max(rest) < 2.5 and m["p50_error"] < 0.02
