"""`presage job` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import runner
from presage.cli.app import app
from presage.cli.job import command
from presage.errors import InputError, PresageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LLAMA = EXAMPLES / "jobs" / "llama3.1-405b.toml"
job = runner(command)


def found(*args: str | Path) -> dict[str, object]:
    value = json.loads(job(*args, "--json", "-"))
    assert isinstance(value, dict)
    return value


def test_the_answer_comes_first() -> None:
    text = job(LLAMA, "--tokens", "15T", "--price", "2.5")
    answer, fit, model, spread, *_ = text.splitlines()
    assert model == "llama3.1-405b, 405.9 B parameters, on 16,384 x NVIDIA H100 SXM 80 GB (dgx-h100)"
    assert spread.startswith(
        "tp 8 with sequence parallel, pp 8 x 8 chunks, cp 2, dp 128, ZeRO-1, 16 microbatches of 1 x 8,192"
    )
    assert "tokens/s/GPU, MFU" in answer
    assert "/step (90% interval " in answer
    assert fit.startswith("Fits in memory with ") and "p95 +" in fit
    for word in ("15 T tokens", "days", "GPU-hours", "MWh", "cost", "HFU", "pipeline bubble", "activations"):
        assert word in text


def test_json_carries_it_all() -> None:
    value = found(LLAMA, "--tokens", "15T")
    names = {"step_ms", "tokens_per_second_per_gpu", "mfu", "hfu", "flop_convention", "breakdown", "stages", "memory"}
    assert value.keys() >= names | {"bound", "energy", "cost", "notes", "run"}


def test_keys_said_anew() -> None:
    value = found(LLAMA, "--gpus", "8192", "--set", "training.recompute=full", "--set", "parallel.virtual=4")
    parallel = value["parallel"]
    assert isinstance(parallel, dict)
    assert (value["gpus"], parallel["dp"], parallel["virtual"]) == (8192, 64, 4)
    hfu, mfu = value["hfu"], value["mfu"]
    assert isinstance(hfu, float)
    assert isinstance(mfu, float)
    assert hfu > 1.2 * mfu


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--set", "parallel.tpp=8"], "parallel.tpp: is unknown: did you mean 'tp'?"),
        (["--set", "tp=8"], "tp: is unknown: it belongs in"),
        (["--set", "parallel.tp=many"], "parallel.tp"),
        (["--set", "parallel.tp=3"], "gpus = tp x pp x cp x dp: 16384 is no multiple of 3 x 8 x 2 = 48"),
        (["--gpus", "100"], "gpus = tp x pp x cp x dp: 100 is no multiple of 8 x 8 x 2 = 128"),
        (["--set", "cluster.gpu=h100"], "give platform or gpu, not both"),
        (["--pue", "0.3"], "pue >= 1: it is 0.3"),
        (["--set", "cluster.power_W=much"], "cluster.power_W"),
        (["--set", "cluster=dgx-h100"], "cluster is a section: say one of its keys"),
        (["--tokens", "lots"], "'lots' is not a number of tokens"),
        (["--flops", "7N"], "unknown FLOP convention '7N'"),
    ],
)
def test_mistakes_are_named(args: list[str], told: str) -> None:
    with pytest.raises(PresageError) as caught:
        job(LLAMA, *args)
    assert told in str(caught.value)


def test_recommendation_jobs_are_sent_on() -> None:
    with pytest.raises(InputError, match="is a recommendation job: use presage dlrm"):
        job(EXAMPLES / "dlrm" / "criteo.toml")


def test_a_job_that_does_not_fit_says_what_helps() -> None:
    text = job(LLAMA, "--set", "training.micro_batch=4", "--set", "training.global_batch=8192")
    assert "Does NOT fit" in text.splitlines()[1] and "if it fitted" in text.splitlines()[1]
    assert "What would save memory" in text
    assert "full recomputation" in text


def test_one_stage_has_no_table_of_stages() -> None:
    text = job(EXAMPLES / "jobs" / "own_model.toml")
    assert "Stages" not in text
    assert "FSDP over 8" in text
    assert "full recompute in 50% of the layers" in text


def test_low_precisions_name_both_peaks() -> None:
    text = job(EXAMPLES / "jobs" / "deepseek-v3.toml")
    assert "of fp8's peak of 1979 TFLOPS" in text
    assert "of bf16's" in text
    assert "active" in text.splitlines()[2]


def test_the_timeline(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    text = job(LLAMA, "--trace", out)
    assert "open it at ui.perfetto.dev" in text
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"stage 0 (15 layers)", "stage 7 (15 layers)"} <= names
    drawn = {e["name"] for e in events if e["ph"] == "X"}
    assert {"F0.0", "B15.7", "optimizer"} <= drawn


def test_it_is_a_command() -> None:
    assert "job" in {c.name for c in app.registered_commands}
    assert command.__doc__
    assert command.__doc__.count("presage job") == 5
