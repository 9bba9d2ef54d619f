"""`presage plan` as a user meets it, and the job files it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands import runner
from presage.cli.app import app
from presage.cli.plan import command
from presage.configs.job import Recompute
from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.memory import job_memory
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.job_step import job_step
from presage.search.job_toml import cluster_beside, job_toml

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
LLAMA = JOBS / "llama3.1-405b.toml"
plan = runner(command)
KEPT = "tp=8,cp=1,cp=2,micro_batch=1,sharding=zero1,virtual=8,virtual=1"
QUICK = ("--gpus", "1024", "--keep", KEPT)


def found(*args: str | Path) -> dict[str, Any]:
    value = json.loads(plan(*args, "--json", "-"))
    assert isinstance(value, dict)
    return value


def test_the_best_comes_first_and_is_explained() -> None:
    text = plan(LLAMA, *QUICK)
    best, what, *_ = text.splitlines()
    assert what.startswith("llama3.1-405b on NVIDIA H100 SXM 80 GB (dgx-h100), 2,048 samples of 8,192 tokens")
    assert (
        best.startswith("Best of 240 plans on 1,024 GPUs: tp8 ")
        and "/step (90% interval " in best
        and "of 80 GiB" in best
    )
    assert "legal plans" in text and "do not fit in memory" in text and "were evaluated" in text
    for title in ("Best plans", "Pareto front", "The best plan with each choice"):
        assert title in text
    for sentence in ("The runner-up (", "of the step is compute", "Memory ", "the job's own: tp8 cp2 pp8 v8 ends dp8"):
        assert sentence in text


def test_json_has_all_of_it() -> None:
    value = found(LLAMA, *QUICK, "--top", "3")
    assert value["kind"] == "plan" and value["objective"] == "mean" and value["complete"] is True
    assert len(value["best"]) == 3
    times = [p["step_ms"] for p in value["best"]]
    assert times == sorted(times)
    first, counts = value["best"][0], value["counts"]
    assert (
        first["tp"] == 8 and first["dp"] * first["pp"] * first["cp"] * 8 == 1024 and first["recompute"] in first["plan"]
    )
    assert sum(first["breakdown_ms"].values()) == pytest.approx(first["step_ms"], rel=1e-6)
    assert counts["legal"] == counts["too_large"] + counts["set_aside"] + counts["priced"]
    assert value["front"][0]["step_ms"] == pytest.approx(first["step_ms"])
    assert value["own"]["pp"] == 8 and value["explanation"]


def test_the_plan_written_is_the_plan_found(tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    value = found(LLAMA, *QUICK, "--out", out)
    again = read_transformer_job(out)
    assert job_step(again).seconds * 1e3 == pytest.approx(value["best"][0]["step_ms"], rel=1e-12)
    assert job_memory(again).needed == pytest.approx(value["best"][0]["memory_bytes"], rel=1e-12)


@pytest.mark.parametrize("name", sorted(p.name for p in JOBS.glob("[!g]*.toml")))
def test_every_job_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    from presage.hardware.facts import load_toml

    job = read_transformer_job(JOBS / name)
    again = tmp_path / "again.toml"
    again.write_text(job_toml(job, cluster_beside(load_toml(JOBS / name)["cluster"], JOBS / name, again)))
    read = read_transformer_job(again)
    assert read == replace(job, parallel=read.parallel, name=read.name)
    assert job_step(read).seconds == pytest.approx(job_step(job).seconds, rel=1e-12)
    assert read.stage_layers() == job.stage_layers()


def test_unusual_jobs_read_back_too(tmp_path: Path) -> None:
    job = read_transformer_job(LLAMA)
    uneven = ParallelPlan(
        tp=8, sequence_parallel=True, pp=4, virtual=5, schedule="interleaved", zero=3, fsdp=True, shard=8
    )
    odd = replace(
        job, parallel=uneven, recompute=Recompute("selective", ("mlp", "norm"), 0.25), name='a "name"',
        framework=replace(job.framework, key="mine", attention="flash2", bucket_bytes=1e9, gradient_bytes=2),
    )  # fmt: skip
    path = tmp_path / "odd.toml"
    path.write_text(job_toml(odd, {"platform": "dgx-h100"}, "two\nlines"))
    read = read_transformer_job(path)
    assert read.recompute == odd.recompute and read.name == odd.name and read.stage_layers() == odd.stage_layers()
    assert job_step(read).seconds == pytest.approx(job_step(odd).seconds, rel=1e-12)
    assert path.read_text().startswith("# two\n# lines\n")


def test_files_that_a_cluster_names_are_found_from_elsewhere() -> None:
    moved = cluster_beside({"platform": "mine.toml", "per_node": 8}, Path("/a/b/job.toml"), Path("/a/c/best.toml"))
    assert moved == {"platform": "../b/mine.toml", "per_node": 8}


def test_a_model_that_does_not_fit_is_told() -> None:
    done = CliRunner().invoke(app, ["plan", str(LLAMA), "--gpus", "8"])
    assert done.exit_code == 1
    assert "legal plans fits in 80 GiB: the smallest needs" in done.stdout


def test_keys_can_be_said_anew_and_several_numbers_given() -> None:
    value = found(LLAMA, *QUICK[2:], "--gpus", "512,1024", "--objective", "cost", "--set", "training.global_batch=512")
    assert {w: s["gpus"] for w, s in value["by_knob"]["gpus"].items()} == {"512": 512, "1024": 1024}
    best = value["best"][0]
    assert all(best["gpus"] * best["step_ms"] <= p["gpus"] * p["step_ms"] * (1 + 1e-12) for p in value["best"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "many"), "number of GPUs"),
        (("--gpus", "16", "--keep", "tp"), "tp=8"),
        (("--gpus", "16", "--objective", "p99"), "objective"),
        (("--gpus", "16", "--objective", "p95", "--noise", "nowhere.toml"), "nowhere.toml"),
        (("--gpus", "16", "--micro-batch", "3"), "no legal plan"),
    ],
)
def test_mistakes_are_told(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(PresageError, match=said):
        plan(LLAMA, *args)
