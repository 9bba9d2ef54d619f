"""A job's prediction: its parts add up, its figures agree with each other, more work never takes less time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import presage
from presage.configs.check import problems
from presage.configs.job import PRECISIONS, Job, Recompute
from presage.configs.job_file import read_transformer_job
from presage.configs.schema import parse_overrides
from presage.costs.closed_form import ClosedFormKernels
from presage.errors import InputError, PresageError
from presage.hardware import cluster, gpus
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.cost import CostTerms, parse_tokens
from presage.prediction.jobs.job_detail import job_timeline
from presage.prediction.jobs.job_prediction import JobResult, predict_job

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "jobs").glob("[!g]*.toml"))
LLAMA = next(path for path in EXAMPLES if path.stem == "llama3.1-405b")
SPREADS = {
    "one stage": ParallelPlan(tp=8, sequence_parallel=True, zero=1),
    "1f1b": ParallelPlan(tp=4, pp=4, zero=1),
    "interleaved": ParallelPlan(tp=4, pp=4, virtual=4, schedule="interleaved", zero=1),
    "gpipe": ParallelPlan(tp=4, pp=4, schedule="gpipe"),
    "zero-bubble": ParallelPlan(tp=4, pp=4, schedule="zero-bubble", zero=2),
    "context": ParallelPlan(tp=4, cp=4, sequence_parallel=True, zero=1),
    "fsdp": ParallelPlan(zero=3, fsdp=True),
    "hsdp": ParallelPlan(zero=3, fsdp=True, shard=8),
}


def small(parallel: ParallelPlan, **more: object) -> Job:
    """An 8B model on 64 GPUs."""
    one = {"model": {"preset": "llama3-8b"}, "parallel": {"gpus": 64, "pp": 1, "virtual": 1}}
    job = replace(read_transformer_job(LLAMA, one), global_batch=256)
    return replace(job, parallel=parallel, **more)  # type: ignore[arg-type]


def adds_up(p: JobResult) -> None:
    assert sum(p.breakdown.values()) == pytest.approx(p.seconds, rel=1e-9)
    assert min(p.breakdown.values()) >= -1e-9 * p.seconds


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    p = predict_job(path)
    adds_up(p)
    assert 0.05 < p.mfu <= p.hfu < 1
    assert len(p.stages) == p.job.parallel.pp
    step = json.loads(msgspec.json.encode(p.to_json(1e12)))["step_ms"]
    assert step["p50"] == pytest.approx(1e3 * p.step.p50) and step["point"] == pytest.approx(1e3 * p.seconds)
    assert step["p5"] < step["p50"] < step["p95"]


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_add_up(name: str, recompute: str) -> None:
    p = predict_job(small(SPREADS[name], recompute=Recompute(recompute)))
    adds_up(p)
    for s in p.stages:
        assert s.busy + s.bubble == pytest.approx(p.job_step.pipeline.total)
    assert (p.hfu > p.mfu) == (recompute == "full")


def test_figures_agree() -> None:
    p = predict_job(LLAMA)
    job = p.job
    assert p.tokens_per_second_per_gpu * job.gpus * p.step.p50 == pytest.approx(job.tokens)
    assert p.samples_per_second * p.step.p50 == pytest.approx(job.global_batch)
    assert p.mfu == pytest.approx(p.flops_per_gpu / job.platform.gpu.peak["bf16"])
    told = p.to_json()
    assert told["breakdown"].keys() >= {
        "products",
        "attention",
        "streams",
        "tp",
        "cp",
        "ep",
        "pp",
        "dp",
        "bubble",
        "host",
    }
    assert sum(part["share"] for part in told["breakdown"].values()) == pytest.approx(1)
    assert told["memory"]["needed_bytes"] == max(s["memory_bytes"] for s in told["stages"])
    assert told["flop_convention"] == "6N + causal attention"
    assert told["cost"] is None


def test_low_precisions_name_both_peaks() -> None:
    p = predict_job(small(SPREADS["one stage"], precision="fp8"))
    peak = p.job.platform.gpu.peak
    assert p.peak == ("fp8", peak["fp8"])
    assert p.mfu == p.mfu_by_peak["fp8"]
    assert p.mfu_by_peak["bf16"] == pytest.approx(p.mfu * peak["fp8"] / peak["bf16"])


def test_conventions_change_no_times() -> None:
    usual, full = (predict_job(LLAMA, convention=c) for c in ("6N + causal attention", "full attention"))
    assert usual.seconds == full.seconds
    assert usual.mfu < full.mfu


def test_more_to_do_takes_longer() -> None:
    job = small(SPREADS["1f1b"])
    step = predict_job(job).seconds
    assert predict_job(replace(job, global_batch=2 * job.global_batch)).seconds > 1.5 * step
    assert predict_job(replace(job, recompute=Recompute("full"))).seconds > step
    assert predict_job(replace(job, model=replace(job.model, layers=40))).seconds > step


# ---- what it takes


def test_energy_and_money() -> None:
    p = predict_job(LLAMA, terms=CostTerms(price=2.5, pue=1.2))
    gpu, run = p.job.platform.gpu, p.spent(15e12)
    assert 0.3 * gpu.power_limit < p.watts / p.job.gpus / 1.2 <= gpu.power_limit
    assert run.seconds == pytest.approx(15e12 / p.job.tokens * p.step.mean)
    assert run.gpu_hours == pytest.approx(run.days * 24 * p.job.gpus)
    assert run.cost == pytest.approx(2.5 * run.gpu_hours)
    assert run.kwh == pytest.approx(p.watts / 1e3 * run.days * 24)
    assert p.spent().energy * run.steps == pytest.approx(run.energy)


def test_power_is_what_was_said() -> None:
    said, usual = (predict_job(LLAMA, terms=t) for t in (CostTerms(power=350.0), CostTerms()))
    assert said.watts == pytest.approx(usual.watts * 350 / 700)


def test_terms_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    text = LLAMA.read_text()
    file.write_text(text + "price_per_gpu_hour = 2\npue = 1.1\n")
    assert predict_job(file).terms == CostTerms(None, 2.0, 1.1)
    assert predict_job(file, {"cluster": {"power_W": 500}}).terms == CostTerms(500.0, 2.0, 1.1)
    assert predict_job(file).to_json()["cost"]["price_per_gpu_hour"] == 2
    file.write_text(text + "pue = 0.5\n")
    with pytest.raises(InputError, match=r"job.toml: cluster: pue >= 1: it is 0.5"):
        predict_job(file)


@pytest.mark.parametrize(("text", "value"), [("15T", 15e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("2,000 m", 2e9)])
def test_counts(text: str, value: float) -> None:
    assert parse_tokens(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "T", "many", "-3B", "1.2.3T", "15Q", "0"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(PresageError, match="not a number of tokens: write 15T"):
        parse_tokens(text)


# ---- keys said anew


def test_overrides() -> None:
    pairs = [
        "parallel.tp=4",
        "training.recompute=full",
        "model.experts.imbalance = 1.5",
        "overlap.tensor=true",
        "name=x",
    ]
    assert parse_overrides(pairs, {}) == {
        "parallel": {"tp": 4},
        "training": {"recompute": "full"},
        "model": {"experts": {"imbalance": 1.5}},
        "overlap": {"tensor": True},
        "name": "x",
    }


def test_a_word_of_the_file_stays() -> None:
    """framework = "torchtitan" is framework.name = "torchtitan": other switches leave it as it is."""
    table = {"framework": "torchtitan", "training": {"recompute": "full"}}
    found = parse_overrides(["framework.compiled=false", "training.recompute.share=0.5"], table)
    assert found["framework"] == {"name": "torchtitan", "compiled": False}
    assert found["training"]["recompute"] == {"mode": "full", "share": 0.5}


@pytest.mark.parametrize("pair", ["parallel.tp", "=8", "parallel.=8", "parallel.tp.x=1", "parallel=3"])
def test_overrides_that_are_none(pair: str) -> None:
    with pytest.raises(PresageError, match="--set"):
        parse_overrides(["parallel.tp=8", pair], {})


# ---- the timeline


@pytest.mark.parametrize("name", SPREADS)
def test_the_timeline_ends_with_the_step(name: str) -> None:
    p = predict_job(small(SPREADS[name]))
    drawn = job_timeline(p.job_step)
    assert drawn.finish == pytest.approx(p.seconds, rel=1e-9)
    tasks = [drawn.program.label(t) for t in np.flatnonzero(drawn.program.lane == 0)]
    assert sum(t.startswith("F") for t in tasks) == p.job.microbatches * p.job.parallel.virtual
    assert "optimizer" in tasks


def test_timelines_too_long_to_draw() -> None:
    job = small(SPREADS["interleaved"], global_batch=256 * 1024)
    with pytest.raises(PresageError, match="too long to draw"):
        job_timeline(predict_job(job).job_step)


# ---- Python


def test_python() -> None:
    p = presage.predict_job(presage.read_transformer_job(LLAMA))
    assert isinstance(p, presage.JobResult)
    assert p.seconds == predict_job(LLAMA).seconds
    assert predict_job(LLAMA, {"parallel": {"gpus": 8192}}).job.gpus == 8192


DRAWN = {("h100_sxm", "bf16"), ("mi300x", "bf16"), ("t4", "fp16")}  # a second each


def test_any_gpu_at_any_precision_it_has() -> None:
    """Those without measured kernels too: they say so."""
    job = small(SPREADS["1f1b"], sequence=2048)
    for gpu in gpus():
        for precision in PRECISIONS:
            there = replace(job, platform=cluster(gpu.key, 8), precision=precision)
            if not any("has no" in text for text in problems(there)):
                p = replace(predict_job(there), drawn=(gpu.key, precision) in DRAWN)
                adds_up(p)
                assert 0.001 < p.mfu < 1, (gpu.key, precision)
                assert any(gpu.name in note for note in p.notes) == bool(ClosedFormKernels.of(gpu).transferred)
