"""Jobs of models by name, on GPUs by the names people use."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.configs.models import presets
from presage.configs.preset_job import preset_job
from presage.errors import PresageError
from presage.hardware import cluster, gpu, gpu_choice
from presage.search import quick_plan

pytestmark = pytest.mark.usefixtures("few_draws")

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"


def said(*args: str | Path) -> str:
    found = CliRunner().invoke(app, [str(a) for a in args])
    assert found.exit_code == 0, (found.exception, found.output)
    return found.stdout


def data(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*args, "--json", "-"))
    return found


def test_a_model_by_name_is_a_job() -> None:
    found = said("job", "llama3-8b", "--gpus", "64", "--gpu", "h100")
    assert "Fits in memory" in found.splitlines()[1] and "64 x NVIDIA H100 SXM 80 GB (dgx-h100)" in found
    for word in ("note: plan tp", "h100 was taken to be h100_sxm", "512 samples of 8,192 tokens"):
        assert word in found, word
    assert found.splitlines()[-1] == "next: presage plan llama3-8b --gpus 64 --gpu h100"


def test_what_is_set_of_the_plan_stays() -> None:
    options = ("--gpus", "64", "--on", "p4de", "--set", "parallel.tp=4", "--set", "training.global_batch=128")
    found = data("job", "Llama3_8B", *options)
    assert found["parallel"]["tp"] == 4 and found["tokens_per_step"] == 128 * 8192
    assert found["platform"] == "p4de"


def test_a_model_that_does_not_fit_is_no_answer() -> None:
    found = CliRunner().invoke(app, ["job", "llama3.1-405b", "--gpus", "8"])
    assert isinstance(found.exception, PresageError) and found.exception.exit_code == 1
    assert "no usual plan of llama3.1-405b fits on 8 x NVIDIA H100 SXM 80 GB" in str(found.exception)


def test_a_run_and_a_search_of_a_model_by_name(tmp_path: Path) -> None:
    assert "p50" in said("run", "gpt2", "--gpus", "8", "--steps", "1000", "--draws", "20", "-q")
    out = tmp_path / "best.toml"
    found = said("plan", "gpt2", "--gpus", "8", "--gpu", "a100", "--limit", "5", "--out", out)
    assert found.splitlines()[-1] == f"next: presage job {out}"
    assert tomllib.loads(out.read_text())["cluster"]["gpu"] == "a100_80gb"


def test_plan_takes_the_gpus_of_the_file() -> None:
    found = data("plan", JOBS / "hugging_face.toml", "--limit", "5", "--keep", "tp=2,cp=1,pp=4,ep=8,micro_batch=1")
    assert found["best"][0]["gpus"] == 128


def test_a_gpu_overrides_the_cluster_of_a_file() -> None:
    found = data("job", JOBS / "hugging_face.toml", "--gpu", "h200")
    assert found["platform"] == "dgx-h200"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if i % 3 else name for i, name in enumerate(presets())]
)
def test_every_model_has_a_plan_on_enough_gpus(name: str) -> None:
    """Enough: one that holds the training state at 20 bytes a parameter with room for activations."""
    from presage.configs.models import preset

    state = 20 * preset(name).parameters
    gpus = max(8, 1 << int(state / 40e9).bit_length())
    job = quick_plan(preset_job(name, gpus, {"platform": "dgx-h100"}).parse(checked=False).job)
    assert job.gpus == gpus and job.global_batch % job.dp == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100_sxm"), ("A100", "a100_80gb"), ("4090", "rtx4090"), ("RTX 4090", "rtx4090"),
        ("v100", "v100_32gb"),
        ("NVIDIA RTX A6000", "rtxa6000"), ("rtx 6000 ada", "rtx6000ada"), ("H100-PCIe", "h100_pcie"), ("l40s", "l40s"),
        ("geforce rtx 3090", "rtx3090"), ("MI300", "mi300x"), ("a100 40gb", "a100_40gb"),
    ],
)  # fmt: skip
def test_gpus_by_the_names_people_use(name: str, key: str) -> None:
    assert gpu(name).key == key


def test_a_choice_among_gpus_is_said() -> None:
    assert "others are h100_nvl, h100_pcie, h100_sxm_96gb" in gpu_choice("h100")
    assert gpu_choice("h200") == gpu_choice("RTX 4090") == gpu_choice("mine.toml") == ""
    with pytest.raises(PresageError, match="docs/my_gpu"):
        gpu("h100_smx")


def test_consumer_cards_of_a_node_share_pcie() -> None:
    assert cluster("rtx3090", 8).links[0].name == "pcie"
