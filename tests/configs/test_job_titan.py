"""TorchTitan's files of all years."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from presage.configs.job import Job, Recompute
from presage.configs.job_file import read_job_file
from presage.configs.torchtitan import titan_sections
from presage.errors import PresageError

ROOT = Path(__file__).resolve().parents[2]
OLD = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "405B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 8e-5
[training]
batch_size = 16
seq_len = 8192
tensor_parallel_degree = 8
compile = true
data_parallel_shard_degree = -1
[experimental]
pipeline_parallel_degree = 8
pipeline_parallel_schedule = "Interleaved1F1B"
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = 'full'
[float8]
enable_float8_linear = true
"""


def job(tmp_path: Path, text: str, gpus: int) -> tuple[Job, tuple[str, ...]]:
    (tmp_path / "titan.toml").write_text(text)
    path = tmp_path / "job.toml"
    path.write_text(f'titan = "titan.toml"\n[parallel]\ngpus = {gpus}\n[cluster]\nplatform = "dgx-h100"\n')
    return read_job_file(path)[:2]


def sections(text: str) -> dict[str, Any]:
    return titan_sections(tomllib.loads(text))[0]


def test_the_example_is_llama_on_256_gpus() -> None:
    made, notes, *_ = read_job_file(ROOT / "examples" / "jobs" / "torchtitan.toml")
    assert made.model.name == "llama3-70b" and made.model.parameters == pytest.approx(70.55e9, rel=1e-3)
    p = made.parallel
    assert (p.tp, p.sequence_parallel, p.fsdp, p.zero, made.dp, made.global_batch) == (8, True, True, 3, 32, 256)
    assert made.precision == "fp8" and made.overlap.tensor and made.framework.key == "torchtitan" and notes == ()


def test_an_old_file(tmp_path: Path) -> None:
    made, notes = job(tmp_path, OLD, 512)
    p = made.parallel
    assert (p.tp, p.pp, p.virtual, p.schedule, made.dp) == (8, 8, 2, "interleaved", 8)
    assert (made.micro_batch, made.microbatches) == (2, 8)  # as many as stages
    assert made.precision == "fp8" and made.recompute == Recompute("full") and made.overlap.tensor
    assert p.fsdp and p.zero == 2  # parameters stay gathered in a pipeline
    assert notes == ()


@pytest.mark.parametrize(
    ("text", "section", "found"),
    [
        ("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8", "parallel",
         {"dp": 32, "replicate": 4, "fsdp": True}),
        ("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1", "parallel", {"dp": 4}),
        ("[parallelism]\nexpert_parallel_degree = 8\ncontext_parallel_degree = 2", "parallel", {"ep": 8, "cp": 2}),
        ("[activation_checkpoint]\nselective_ac_option = 'op'", "training", {"recompute": "selective:op"}),
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'", "training",
         {"recompute": "every-2"}),
        ("[activation_checkpoint]\nmode = 'none'", "training", {"recompute": "none", "precision": "bf16"}),
        ("[model]\nconverters = ['quantize.linear.mx']", "training", {"precision": "mxfp8"}),
        ("[training]\nmixed_precision_reduce = 'bfloat16'", "framework",
         {"name": "torchtitan-eager", "reduce_bytes": 2}),
        ("[compile]\nenable = true", "framework", {"name": "torchtitan"}),
        ("[compile]\nenable = true\ncomponents = ['loss']", "framework",
         {"name": "torchtitan-eager", "fused_loss": True}),
        ("[model]\nname = 'deepseek_v3'\nflavor = '671B'", "model", {"preset": "deepseek-v3"}),
        ("[model]\nname = 'llama4'\nflavor = '17bx128e'", "model", {"preset": "llama4-maverick"}),
    ],
)  # fmt: skip
def test_settings_in_our_words(text: str, section: str, found: dict[str, Any]) -> None:
    made = sections(text)[section]
    assert {k: made[k] for k in found} == found


def test_plain_replicas_are_no_fsdp() -> None:
    made = sections("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1")["parallel"]
    assert "fsdp" not in made


def test_a_pipelines_batch_is_cut_up() -> None:
    stages = "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 2"
    made = sections(f"[training]\nlocal_batch_size = 32\n{stages}")["training"]
    assert (made["micro_batch"], made["microbatches"]) == (2, 16)


def test_what_was_not_read_is_told() -> None:
    _, notes = titan_sections(
        {"training": {"seq_len": 8, "steps": 3, "novelty": 1}, "odd": {"key": 1}, "job": {"x": 1}}
    )
    assert notes == ("not read: training.novelty, odd.key",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nname = 'llama3'\nflavor = '9B'", "model.flavor: 'llama3' of flavor '9B' is not known"),
        ("[training]\nseq_len = '8k'", "training.seq_len: is '8k': it should be a whole number"),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Fancy'",
            "is 'Fancy': choose from 1F1B",
        ),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(PresageError, match=says):
        sections(text)
