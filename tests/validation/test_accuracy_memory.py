"""`presage accuracy memory`: tables told by their columns, bytes found one by one, and verdicts."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.errors import InputError, PresageError
from presage.memory import SAFETY, job_memory
from presage_validation.finetune import finetune_job
from presage_validation.goldens import golden_bytes, golden_job
from presage_validation.peak_memory import Verdict, chosen_margin, confusion, half, score_memory

GIB, MIB = 1024.0**3, 1024.0**2
FLAGS = {
    "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024, "max-position-embeddings": 1024,
    "micro-batch-size": 4, "global-batch-size": 32, "bf16": True, "deterministic-mode": True, "transformer-impl":
    "transformer_engine", "use-distributed-optimizer": True, "no-gradient-accumulation-fusion": True,
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1,
}  # fmt: skip
GOLDEN = {
    "suite": "gpt", "case": "one", "gpu": "A100-SXM", "n_gpus": "8", "environment": "dev", "golden_date": "2026-01-01",
    "env": json.dumps({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), "tokenizer": "GPT2 BPE vocab.json", "steps": "100",
    "vocab_padded": "50304", "mem_max_allocated_bytes": "2711714304", "mem_allocated_bytes": "552128512",
}  # fmt: skip


def golden(**changes: object) -> dict[str, str]:
    flags = FLAGS | {k.replace("_", "-"): v for k, v in changes.items()}
    return GOLDEN | {"config": json.dumps({k: v for k, v in flags.items() if v is not None})}


def fine_tuned(**changes: str) -> dict[str, str]:
    row = {
        "case": "one", "model": "mistralai/Mistral-7B-v0.1", "method": "full fine-tuning", "fused_kernels": "no",
        "liger_loss": "no", "weights_quant": "none", "torch_dtype": "bfloat16", "amp": "", "lora_r": "",
        "lora_targets": "", "n_gpus": "1", "per_device_batch": "4", "grad_accum": "1", "seq_len": "4096",
        "tokens_per_sample": "4096", "step_time_s": "5.3", "mem_torch_peak_bytes": "72434837504", "outcome": "ok",
        "software": "transformers 4.48.1", "framework_config": "none",
    }  # fmt: skip
    return row | changes


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as f:
        table = csv.DictWriter(f, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


# ---- Megatron-LM's tests


def test_the_peak_of_a_small_test_is_found_to_a_thousandth() -> None:
    """Twelve layers of 512 on eight A100, of which the allocator counted 2,711,714,304 bytes at its peak."""
    peak, _, found = golden_bytes(golden())
    assert not found
    assert peak == pytest.approx(2711714304, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"no_create_attention_mask_in_dataloader": True}, -4 * MIB),  # 4 x 1024 x 1024 bytes
        ({"attention_backend": "unfused"}, 12 * (160 - 4) * MIB),  # softmax, mask and dropout for a copy of the output
        ({"cross_entropy_loss_fusion": True}, 4 * 4096 * 50304),
        ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2}, 4 * 4096 * 50304),
    ],
)
def test_a_flag_adds_the_tensors_it_stands_for(changes: dict[str, object], more: float) -> None:
    before, after = golden_bytes(golden())[0], golden_bytes(golden(**changes))[0]
    assert after - before == pytest.approx(more, abs=2 * MIB)


@pytest.mark.parametrize(
    ("gpu", "where", "date", "kernels"),
    [
        ("A100-SXM", "dev", "2026-01-01", "flash2"),
        ("H100-80GB-SXM", "dev", "2026-01-01", "flash3"),
        ("GB200", "dev", "2026-01-01", "flash2"),
        ("A100-SXM", "lts", "2025-10-12", "unfused"),
        ("A100-SXM", "lts", "2025-11-06", "flash2"),
    ],
)
def test_deterministic_attention_goes_by_gpu_and_container(gpu: str, where: str, date: str, kernels: str) -> None:
    row = golden() | {"gpu": gpu, "environment": where, "golden_date": date}
    assert golden_job(row).framework.attention == kernels


def test_what_is_not_modelled_is_refused() -> None:
    for flag, what in {
        "encoder_num_layers": "T5",
        "img_h": "vision",
        "fine_grained_activation_offloading": "module",
    }.items():
        with pytest.raises(PresageError, match=what):
            golden_job(golden(**{flag: 12}))
    with pytest.raises(PresageError, match="fp32"):
        golden_job(golden(bf16=None, fp8_format="e4m3"))


def test_gpus_that_are_not_stated_are_found_from_the_bytes_between_steps() -> None:
    _, job, found = golden_bytes(golden() | {"n_gpus": ""})
    assert found and job.gpus == 8


# ---- fine-tuning


def test_an_update_needs_one_more_copy_of_what_is_trained() -> None:
    """Mistral 7B in bf16: weights, gradients, two moments and a temporary, five times 13.49 GiB."""
    found = job_memory(finetune_job(fine_tuned()))
    assert found.worst.allocated == pytest.approx(72434837504, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({}, 24.87),
        ({"per_device_batch": "8"}, 36.08),
        ({"n_gpus": "2", "per_device_batch": "2"}, 14.10),
        ({"weights_quant": "nf4 (bitsandbytes)", "fused_kernels": "yes"}, 13.15),
    ],
)
def test_adapters_leave_inputs_of_layers_and_the_loss(changes: dict[str, str], peak: float) -> None:
    """GiB that PyTorch's allocator counted with LoRA of rank 16 on attention."""
    lora = {"method": "LoRA", "lora_r": "16", "lora_targets": "q_proj k_proj v_proj o_proj"}
    found = job_memory(finetune_job(fine_tuned(**lora, **changes)))
    assert found.worst.allocated / GIB == pytest.approx(peak, rel=0.02)


# ---- verdicts


def test_the_margin_is_the_least_with_which_nothing_that_ran_out_is_called_to_fit() -> None:
    made = [Verdict("a", "", True, 70.0, 80.0), Verdict("b", "", False, 77.0, 80.0), Verdict("c", "", True, 79.0, 80.0)]
    assert chosen_margin(made) == 0.05
    c = confusion(made, 0.05)
    assert (c.true_fits, c.false_fits, c.true_oom, c.false_oom) == (1, 0, 1, 1)
    assert confusion(made, 0.0).false_fits == 1
    assert {half(name) for name in "abcdefgh"} == {0, 1}


def test_rows_that_did_not_finish_are_verdicts_alone(tmp_path: Path) -> None:
    lost = fine_tuned(
        mem_torch_peak_bytes="", outcome="oom likely", per_device_batch="32", model="NousResearch/Llama-2-70b-hf"
    )
    found = score_memory([write(tmp_path / "t.csv", fine_tuned(), lost)])
    assert found.to_json()["n"] == 1 and len(found.verdicts) == 2
    assert found.to_json()["fits"] == {"true_fits": 1, "false_fits": 0, "true_oom": 1, "false_oom": 0}


def test_lengths_that_vary_are_scored_apart(tmp_path: Path) -> None:
    found = score_memory([write(tmp_path / "t.csv", fine_tuned(seq_len="variable", tokens_per_sample="400"))])
    assert list(found.metrics()) == ["peak_memory_mean_length"]


def test_a_table_is_told_by_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", golden() | {"duplicate_of": ""}, golden() | {"duplicate_of": "line 2"})
    result = CliRunner().invoke(app, ["accuracy", "memory", str(path), "--json", "-"])
    value = json.loads(result.stdout)
    assert value["n"] == 1 and value["margin"] == SAFETY
    assert [s["reason"] for s in value["skipped"]] == ["its values are those of another row"]
    with pytest.raises(InputError, match="none of the tables"):
        score_memory([write(tmp_path / "other.csv", {"a": "1"})])


def test_the_bars(shared: Path) -> None:
    """Above 8 GiB within 5% on average, and nothing called to fit that did not run."""
    paths = [
        shared / "runs" / "megatron_goldens" / "megatron_goldens.csv",
        shared / "runs" / "fms_finetune" / "fms_finetune.csv",
    ]
    if not all(p.exists() for p in paths):
        pytest.skip(f"no tables of measured memory in {shared}")
    found = score_memory(paths)
    assert found.metrics("above 8 GiB")["peak_memory"].mape < 0.03
    assert found.metrics()["peak_memory"].mape < 0.03
    assert found.metrics()["peak_memory"].n > 500
    fits = found.to_json()["fits"]
    assert fits["false_fits"] == 0 and fits["true_oom"] >= 45 and fits["false_oom"] <= 10
    assert all(c.false_fits == 0 for _, c in found.halves)
