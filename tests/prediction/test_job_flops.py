"""FLOPs of a job: the formulas people use, the op lists the step is priced by, and what papers printed."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from presage.configs.job import Job, Recompute
from presage.configs.models import find_preset
from presage.configs.transformer import Transformer
from presage.errors import PresageError
from presage.graph.work import flops as op_flops
from presage.hardware import gpu, platform
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.job_flops import DEFAULT, job_flops, layer_flops, peak_of
from presage.prediction.jobs.transformer_layer import layer_graph
from presage_validation.run_jobs import job_of_run

GPT = Transformer(6144, 40, 48, 51200, 4 * 6144, 48, 128, activation="gelu", norm="layernorm", bias=True, tied=True)


def job_of(model: Transformer, **more: object) -> Job:
    given = {"gpus": 8, "sequence": 2048, "micro_batch": 1, "global_batch": 16, "parallel": ParallelPlan(tp=8)} | more
    return Job(model, platform("dgx-h100"), **given)  # type: ignore[arg-type]


def preset(name: str) -> Transformer:
    found = find_preset(name)
    assert found is not None
    return found


def test_megatron_formulas() -> None:
    """72 B s L h^2 (1 + s/6h + V/12hL), and with full recomputation 96 B s L h^2 (1 + s/6h + V/16hL)."""
    b, s, layers, h, v = 16, 2048, GPT.layers, GPT.hidden, GPT.vocab
    found = job_flops(job_of(GPT, recompute=Recompute("full")), "full attention")
    assert found.model == pytest.approx(72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * h * layers)))
    assert found.hardware == pytest.approx(96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * h * layers)))


def test_6n() -> None:
    job = job_of(GPT)
    assert job_flops(job, "6N").model == 6 * GPT.parameters * job.tokens
    moe = preset("mixtral-8x7b")
    assert job_flops(job_of(moe), "6N").model == 6 * moe.active_parameters * job.tokens


def test_a_causal_mask_halves_the_scores() -> None:
    job = job_of(GPT)
    causal, full = (job_flops(job, c).model for c in (DEFAULT, "full attention"))
    scores = 12 * job.sequence * GPT.hidden * GPT.layers * job.tokens
    assert full - causal == pytest.approx(scores / 2)


def test_windows_see_less() -> None:
    at = {w: layer_flops(replace(GPT, window=w), 0, 4096)["core_attn"] for w in (0, 512, 4096, 8192)}
    assert at[0] == at[4096] == at[8192]
    assert at[512] == pytest.approx(at[0] * (512 - 512**2 / 8192) / 2048)
    every = replace(GPT, window=512, window_every=2)
    assert layer_flops(every, 1, 4096)["core_attn"] == at[0]
    assert layer_flops(every, 2, 4096)["core_attn"] == at[512]


@pytest.mark.parametrize("name", ["llama3.1-405b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "deepseek-v2"])
def test_the_op_lists_of_the_step_do_these_flops(name: str) -> None:
    """Block by block, on one GPU: what is counted is what is priced."""
    m = preset(name)
    job = job_of(m, gpus=1, parallel=ParallelPlan(), sequence=5120, global_batch=1)  # even for every expert
    for layer in (0, m.layers - 1):
        counted: dict[str, float] = {}
        made = layer_graph(job, layer)
        for block in made.blocks:
            ops = [made.graph.ops[i] for i in block.forward]
            done = sum(op_flops(made.graph, op) / (2 if "attention" in op.name else 1) for op in ops)  # causal
            counted[block.name] = counted.get(block.name, 0.0) + done / job.tokens
        for block_name, flops in layer_flops(m, layer, job.sequence).items():
            assert counted.get(block_name, 0.0) == pytest.approx(flops, rel=1e-12), block_name


def test_recomputation_by_module() -> None:
    def again(*modules: str, mode: str = "selective", share: float = 1.0) -> float:
        job = job_of(preset("deepseek-v3"), gpus=64, parallel=ParallelPlan(), recompute=Recompute(mode, modules, share))
        return job_flops(job).again

    assert again(mode="none") == 0
    assert again("norm") == again("moe_act") == 0
    assert again("mla_up_proj") + again("moe") == pytest.approx(again("mla_up_proj", "moe"))
    assert again("moe") < again(mode="full")
    assert again(mode="full", share=0.5) == pytest.approx(0.5 * again(mode="full"))


def test_peaks() -> None:
    h100, b200, v100 = gpu("h100_sxm"), gpu("b200"), gpu("v100_32gb")
    assert peak_of(h100, "bf16") == ("bf16", h100.peak["bf16"])
    assert peak_of(h100, "fp8") == ("fp8", h100.peak["fp8"])
    assert peak_of(b200, "mxfp8") == ("fp8", b200.peak["fp8"])
    assert peak_of(b200, "nvfp4") == ("fp4", b200.peak["fp4"])
    assert peak_of(v100, "bf16") == ("fp16", v100.peak["fp16"])
    assert peak_of(v100, "tf32") == ("fp32", v100.peak["fp32"])


def test_unknown_conventions_are_named() -> None:
    with pytest.raises(PresageError, match="unknown FLOP convention '8N': choose from 6N"):
        job_flops(job_of(GPT), "8N")


@pytest.mark.parametrize(
    ("source", "convention", "recomputed"),
    [
        ("bloom_prequel", "full attention", True),
        ("llm_foundry", "full attention", False),
        ("megatron_bridge", DEFAULT, False),
    ],
)
def test_flops_that_others_printed(shared: Path, source: str, convention: str, recomputed: bool) -> None:
    """TFLOP/s a GPU that were printed beside a step time or tokens/s: within 2% where both count the same."""
    ratios = []
    with (shared / "runs" / "public_runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["source_key"] == source and not row["complete"].startswith("missing"):
                job, seconds = job_of_run(row), printed_seconds(row)
                found = job_flops(job, convention)
                flops = found.hardware if recomputed else found.model
                if seconds and row["tflops_per_gpu"]:
                    ratios.append(flops / job.gpus / seconds / 1e12 / float(row["tflops_per_gpu"]))
    assert len(ratios) > 20
    assert median(ratios) == pytest.approx(1, abs=0.02)


def printed_seconds(row: dict[str, str]) -> float:
    """Not those that were derived from the TFLOP/s."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = float(row["tokens_per_s_per_gpu"] or 0) * int(row["n_gpus"])
    return int(row["global_batch"]) * int(row["seq_len"]) / rate if rate else 0.0
