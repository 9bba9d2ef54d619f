"""`presage run` as a user meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import runner
from presage.cli.app import app
from presage.cli.run import command
from presage.errors import InputError, PresageError
from presage.prediction.jobs.job_prediction import predict_job
from presage.runs.run import SETUP, STORAGE, CheckpointPlan, checkpoint_bytes, checkpoints_of
from presage.runs.sets import reliability
from presage.runs.steps import step_times
from presage.runs.whole import predict_run
from run_times import USUAL

pytestmark = pytest.mark.usefixtures("few_draws")

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "jobs" / "llama3.1-405b.toml"
META = ROOT / "examples" / "jobs" / "llama3-405b-meta.toml"
SMALL = ROOT / "examples" / "jobs" / "own_model.toml"  # on 64 GPUs
FEW = ("--draws", "200")
OFTEN = ("--steps", "20000", "--no-model-error", "--rate", "2000")  # failures per 1,000 node-days
run = runner(command)


def found(*args: str | Path) -> dict[str, Any]:
    value = json.loads(run(*args, *FEW, "--json", "-"))
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def text() -> str:
    return run(LLAMA, "--tokens", "1T", "--deadline", "60h", "--price", "2.5", *FEW)


def test_the_answer_comes_first(text: str) -> None:
    answer, fit, what, *_ = text.splitlines()
    assert what.startswith("llama3.1-405b: 1 T tokens, 59,605 steps of 5.0 s, on 16,384 x NVIDIA H100")
    assert answer.startswith("3.") and "(90% interval " in answer
    assert "goodput; " in answer and "chance by 2.5 days." in answer
    assert fit.startswith("Fits in memory with ")
    assert "with exact step time and failure rates: p50 3." in text


def test_tables_tell_what_matters(text: str) -> None:
    words = (
        "mean step of a run", "run, with presage's own error", "cost", "steps repeated",
        "faulty GPU", "planned maintenance", "Young", "Daly, higher order", "exact optimum", "this run",
        "checkpoints in half the time", "restarts in half the time", "Spare nodes", "standard errors",
    )  # fmt: skip
    for word in words:
        assert word in text


def test_json_carries_it_all() -> None:
    value = found(LLAMA, "--tokens", "1T", "--deadline", "5d", "--price", "2", "--seed", "7")
    assert value["kind"] == "run"
    assert value["steps"] == 59605
    days, exact = value["days"], value["days_without_model_error"]
    assert days["p5"] < days["p50"] < days["p95"]
    assert exact["p95"] - exact["p5"] < (days["p95"] - days["p5"]) / 3
    assert 0.85 < value["goodput"]["mean"] < value["ettr"]["mean"] < 1
    assert sum(part["mean"] for part in value["hours_by_cause"].values()) == pytest.approx(24 * days["mean"], rel=1e-6)
    due = value["deadline"]
    assert 0 < due["probability"] < due["probability_without_model_error"] <= 1
    assert value["cost"]["mean"] == pytest.approx(days["mean"] * 24 * 16384 * 2, rel=1e-6)
    assert value["reliability"]["mttf_hours"] == pytest.approx(3.09, abs=0.01)
    assert "faulty GPU" in [c["class"] for c in value["classes"]]
    assert value["checkpoints"]["choices"][-1]["name"] == "this run"
    assert value["step_ms"]["steps"]["p99"] > value["step_ms"]["run_mean"]["p99"]
    assert value["spares"][0]["p50_days"] > value["spares"][-1]["p50_days"]
    assert value["changes"]
    assert value == found(LLAMA, "--tokens", "1T", "--deadline", "5d", "--price", "2", "--seed", "7")


def test_llama3_as_meta_trained_it() -> None:
    job = predict_job(META)
    assert job.seconds == pytest.approx(6.45, rel=0.1)  # by the 400 TFLOP/s a GPU they had
    p = predict_run(job, 660_000, saves=CheckpointPlan(10.0), times=replace(USUAL, seconds=6.45), draws=300).exact
    assert p.quantile(0.5) / 86400 == pytest.approx(54, abs=0.5)
    assert np.quantile(p.goodput, 0.05) > 0.90
    low, high = np.quantile(p.failures, [0.05, 0.95])
    assert low < 419 < high


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return found(SMALL, *OFTEN)


@pytest.mark.parametrize(
    ("args", "where", "value"),
    [
        (["--interval", "500"], ("checkpoints", "steps"), 500),
        (["--interval", "40 steps"], ("checkpoints", "steps"), 40),
        (["--interval", "30min"], ("checkpoints", "minutes"), 30),
        (["--restart-seconds", "77"], ("reliability", "restart_s"), 77),
        (["--checkpoint-seconds", "12.5"], ("checkpoints", "save_s"), 12.5),
        (["--step-seconds", "3"], ("step_ms", "predicted"), 3000),
        (["--superlinear"], ("reliability", "growth"), 1),
        (["--failures", "rsc2"], ("reliability", "name"), "Meta RSC-2, 8,000 A100, 11 months"),
        (["--noise", "screened"], ("noise",), '"screened" preset (no measurements given)'),
    ],
)
def test_options_reach_the_run(args: list[str], where: tuple[str, ...], value: float | str) -> None:
    told: Any = found(SMALL, *OFTEN, *args)
    for key in where:
        told = told[key]
    assert told == (value if isinstance(value, str) else pytest.approx(value, rel=0.01))


@pytest.mark.slow
def test_more_failures_and_fewer_spares_take_longer(plain: dict[str, Any]) -> None:
    assert found(SMALL, *OFTEN[:-1], "8000")["failures"]["mean"] > 3 * plain["failures"]["mean"]
    assert found(SMALL, *OFTEN, "--spares", "0")["days"]["p50"] > plain["days"]["p50"]
    none = found(SMALL, *OFTEN[:-1], "0")
    assert none["failures"]["mean"] == 0
    assert none["reliability"]["mttf_hours"] is None


def test_checkpoints_by_their_storage(plain: dict[str, Any]) -> None:
    slow = found(SMALL, *OFTEN, "--storage-GBps", "1")["checkpoints"]
    assert slow["save_s"] > plain["checkpoints"]["save_s"] + 40
    behind = found(SMALL, *OFTEN, "--storage-GBps", "1", "--background", "0.9")["checkpoints"]
    assert behind["save_s"] + behind["background_s"] == pytest.approx(slow["save_s"])


def test_runs_of_nothing_to_fear_are_told_too(tmp_path: Path) -> None:
    calm = tmp_path / "calm.toml"
    calm.write_text('name = "calm"\n')
    told = run(SMALL, "--steps", "100", "--failures", calm, *FEW)
    assert "no failures" in told
    assert "What stops it" not in told
    assert "Checkpoints" not in told


def test_noise_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    path.write_text("[common]\nrun_sd = 0.05\n")
    noisy, usual = (
        found(SMALL, "--steps", "5000", "--no-model-error", *more)["step_ms"]["run_mean"]
        for more in (("--noise", str(path)), ())
    )
    assert noisy["p95"] - noisy["p5"] > 3 * (usual["p95"] - usual["p5"])


def test_a_date_is_a_deadline() -> None:
    base = (SMALL, "--steps", "5000", "--start", "2027-01-01")
    assert found(*base, "--deadline", "2027-01-03")["deadline"]["days"] == 2
    assert found(*base, "--deadline", "36h")["deadline"]["days"] == 1.5


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "give the length of the run"),
        (["--steps", "5", "--tokens", "1T"], "give the length of the run"),
        (["--steps", "5", "--deadline", "soon"], "--deadline soon: write 60d"),
        (["--steps", "5", "--deadline", "5x"], "--deadline 5x: write 60d"),
        (["--steps", "5", "--deadline", "2027-13-01"], "--deadline 2027-13-01: write a date"),
        (["--steps", "5", "--deadline", "2027-01-01", "--start", "2027-01-01"], "should be after the start"),
        (["--steps", "5", "--interval", "0"], "--interval 0"),
        (["--steps", "5", "--interval", "often"], "--interval often: write auto"),
        (["--steps", "5", "--failures", "none"], "no failure rates 'none': choose from"),
        (["--steps", "5", "--background", "2"], "in the background"),
        (["--steps", "500000", "--rate", "400000"], "hardly move"),
        (["--steps", "500000", "--rate", "5000", "--interval", "100000"], "hardly move"),
    ],
)
def test_mistakes_are_told_in_a_sentence(args: list[str], told: str) -> None:
    with pytest.raises(PresageError) as e:
        run(SMALL, *args, *FEW)
    assert told in str(e.value)
    assert "\n" not in str(e.value)


def test_files_that_are_not_there() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        run(LLAMA, "--steps", "5", "--failures", "nowhere.toml")
    with pytest.raises(InputError, match="cannot be read"):
        run(LLAMA, "--steps", "5", "--noise", "nowhere.toml")


def test_steps_of_a_run_are_drawn_from_the_job() -> None:
    job = predict_job(SMALL)
    usual, source = step_times(job)
    calm, _ = step_times(job, "screened")
    assert source.startswith('"production"')
    assert job.seconds < calm.seconds < usual.seconds < 1.05 * job.seconds
    assert calm.run_sd < usual.run_sd < 0.02
    assert usual.stalls.per_node_hour > 0
    fleet, _ = step_times(predict_job(LLAMA), "unscreened")
    kept, _ = step_times(predict_job(LLAMA))
    assert fleet.seconds > 1.02 * kept.seconds  # 80 slow GPUs that nobody looks for
    shared, _ = step_times(job, episodes=False)
    assert shared.seconds > usual.seconds  # congestion, where no slow episodes stand for it


def test_what_a_checkpoint_takes() -> None:
    job = predict_job(LLAMA).job
    assert checkpoint_bytes(job) == pytest.approx(14 * job.model.parameters)
    kind = reliability("llama3")
    usual = checkpoints_of(job, kind)
    assert usual.save == pytest.approx(SETUP + checkpoint_bytes(job) / (STORAGE * 2048))
    assert usual.save == pytest.approx(9.2, abs=0.1)
    assert "5 s + 5.68 TB at 1,365 GB/s" in usual.source


def test_a_few_lines_of_python_do_the_same() -> None:
    p = predict_run(predict_job(SMALL), 20_000, draws=200)
    assert p.to_json()["days"] == found(SMALL, "--steps", "20000")["days"]


def test_it_is_a_command() -> None:
    assert "run" in [c.name for c in app.registered_commands]
