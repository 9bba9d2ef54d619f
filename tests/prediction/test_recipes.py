"""Jobs with adapters, hybrid layers, packed sequences, Muon, fp8 scalings, the host's memory and encoders of images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from presage.configs.check import problems
from presage.configs.job import Job
from presage.configs.job_file import job_from_sections
from presage.configs.lengths import packed_documents, parse_lengths, read_lengths
from presage.configs.models import preset
from presage.configs.tuning import Tuning, adapter_parameters
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.families.attention import AttentionShape
from presage.errors import PresageError
from presage.hardware import gpu
from presage.memory import job_memory
from presage.prediction.draws.data_dependence import own_load
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.efficiency import LAWS
from presage.prediction.jobs.job_flops import job_flops
from presage.prediction.jobs.job_prediction import predict_job
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.optimizer_step import iteration_seconds
from presage.prediction.jobs.transformer_layer import layer_graph
from presage.search.job_toml import job_toml

DATA = Path(__file__).parents[2] / "data" / "h200_packed"


def made(model: str = "llama3-8b", training: dict[str, Any] | None = None, **parallel: Any) -> Job:
    table = {
        "model": {"preset": model},
        "training": {"sequence": 4096, "micro_batch": 1, "microbatches": 2} | (training or {}),
        "parallel": {"gpus": 8} | parallel,
        "framework": "hf-trainer",
        "cluster": {"platform": "dgx-h100"},
    }
    job, _ = job_from_sections(table)
    assert problems(job) == []
    return job


# ---- adapters


def test_adapters_have_the_parameters_that_peft_counts() -> None:
    # PEFT prints 13,631,488 trainable parameters for rank 16 on q, k, v and o of Llama 3 8B
    total = sum(adapter_parameters(Tuning("lora", 16), preset("llama3-8b"), i) for i in range(32))
    assert total == 32 * 16 * ((4096 + 4096) * 2 + (4096 + 1024) * 2)
    assert total == 13_631_488


def test_frozen_weights_have_no_gradient() -> None:
    full, lora = made(), made(training={"tune": "lora"})
    gradients = [sum(bool(o.writes) for o in layer_graph(job, 0).graph.ops) for job in (full, lora)]
    assert gradients == [4, 8]  # of four GEMMs; of two matrices of four adapters
    assert job_step(lora).seconds < 0.85 * job_step(full).seconds
    ratio = job_flops(lora).model / job_flops(full).model
    assert 0.66 < ratio < 0.72


def test_memory_of_adapters_is_the_frozen_weights_and_little_else() -> None:
    full, lora, packed = (made(training=t) for t in ({}, {"tune": "lora"}, {"tune": "qlora"}))
    memory = [job_memory(job).worst for job in (full, lora, packed)]
    assert memory[1].weights == pytest.approx(2 * preset("llama3-8b").parameters, rel=0.01)
    assert memory[1].gradients + memory[1].optimizer < 0.2e9 < memory[0].gradients
    assert 0.3 < memory[2].weights / memory[1].weights < 0.45  # ends stay in 16 bits
    assert memory[1].activations < memory[0].activations


def test_only_adapters_are_reduced_between_replicas() -> None:
    slow = {"network_Gbps": 1.0, "gpu": "h100_sxm", "per_node": 1}
    took = []
    for tune in ("full", "lora"):
        table = {"model": {"preset": "llama3-8b"}, "training": {"sequence": 1024, "tune": tune}, "cluster": slow}
        job, _ = job_from_sections(table | {"parallel": {"gpus": 2}})
        took.append(job_step(job).replicas)
    assert took[1] < 0.02 * took[0]


def test_packed_weights_are_unpacked_before_each_gemm() -> None:
    lora, packed = made(training={"tune": "lora"}), made(training={"tune": "qlora"})
    assert job_step(packed).parts["streams"] > job_step(lora).parts["streams"]


def test_what_adapters_cannot_do_is_said() -> None:
    with pytest.raises(PresageError, match="no matrix 'q_prj': did you mean q_proj"):
        made(training={"lora": {"targets": ["q_prj"]}})
    with pytest.raises(PresageError, match="does nothing with tune = 'full'"):
        made(training={"tune": "full", "lora": {"rank": 8}})
    moe = replace(made("mixtral-8x7b"), tuning=Tuning("lora", targets=("up",)))
    assert any("adapters on experts" in p and "target attention" in p for p in problems(moe))


# ---- hybrid layers


def test_a_hybrid_has_the_layers_of_its_pattern() -> None:
    m = preset("nemotron-h-8b")
    assert m.parameters == 8_100_852_736  # as its weights' files have
    assert [m.pattern.count(x) for x in "M-*"] == [24, 24, 4]
    names = [{o.module for o in layer_graph(made("nemotron-h-8b"), i).graph.ops} for i in (0, 1, 7)]
    assert "scan" in names[0] and "mlp_up" not in names[0]
    assert "mlp_up" in names[1] and "norm1" not in names[1]
    assert "core_attn" in names[2]


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-3-nano", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b"])
def test_hybrids_have_time_memory_and_flops(name: str) -> None:
    job = made(name, gpus=64, zero=1)
    assert 0 < job_step(job).seconds < 60
    assert job_flops(job).model / job.tokens == pytest.approx(6 * job.model.active_parameters, rel=0.25)
    states = job_memory(job).worst
    assert states.weights == pytest.approx(2 * job.model.parameters, rel=0.01)
    assert any("none was measured" in note for note in predict_job(job).notes)


def test_experts_of_a_latent_width_are_sent_and_hold_less() -> None:
    """Tokens are made narrow before the dispatch and wide after the combine; weights, FLOPs, bytes follow."""
    narrow = made("nemotron-3-super", gpus=64, ep=64, zero=1)
    assert narrow.model.experts is not None
    whole = replace(narrow, model=replace(narrow.model, experts=replace(narrow.model.experts, latent=0)))
    graphs = [layer_graph(j, 1) for j in (narrow, whole)]
    names = [{o.module for o in g.graph.ops} for g in graphs]
    assert {"moe_narrow", "moe_wide"} <= names[0] and not {"moe_narrow", "moe_wide"} & names[1]
    assert narrow.model.expert_parameters(1) * 4 == whole.model.expert_parameters(1)
    assert job_flops(narrow).model / narrow.tokens == pytest.approx(6 * narrow.model.active_parameters, rel=0.25)
    assert job_step(narrow).parts["ep"] < 0.5 * job_step(whole).parts["ep"]
    assert job_memory(narrow).worst.weights < 0.7 * job_memory(whole).worst.weights


def test_a_long_sequence_costs_a_hybrid_less_than_attention() -> None:
    def growth(name: str) -> float:
        short, long = (job_step(made(name, {"sequence": n})).seconds / n for n in (4096, 65_536))
        return long / short

    assert growth("nemotron-h-8b") < 1.4 < growth("llama3-8b")


def test_stages_of_a_hybrid_have_the_weights_of_their_layers() -> None:
    job = made("nemotron-h-8b", {"microbatches": 8}, pp=4)
    whole = sum(s.weights for s in job_memory(job).stages) / 2
    assert whole == pytest.approx(job.model.parameters, rel=0.01)


# ---- packed sequences


def test_lengths_come_from_laws_and_files(tmp_path: Path) -> None:
    assert parse_lengths("fixed 512", "f") == (512,)
    lengths = parse_lengths("lognormal 900 1.0", "f")
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(900, rel=0.01)
    (tmp_path / "h.csv").write_text("length,count\n100,3\n300,1\n")
    assert read_lengths(tmp_path / "h.csv").mean() == pytest.approx(150, rel=0.01)
    (tmp_path / "h.json").write_text(json.dumps({"100": 3, "300": 1}))
    assert read_lengths(tmp_path / "h.json").mean() == pytest.approx(150, rel=0.01)
    with pytest.raises(PresageError, match="should be like 'lognormal MEDIAN SIGMA"):
        parse_lengths("lognormal 900", "f")
    with pytest.raises(PresageError, match=r"a law .*, or a file"):
        parse_lengths("zipfian", "f")


def test_documents_fill_a_sequence() -> None:
    documents = packed_documents((100, 1000, 3000), 8192)
    assert sum(documents) == 8192 and max(documents) <= 3000


def test_packed_documents_save_attention_and_make_steps_differ() -> None:
    whole, packed = (
        made(training={"sequence": 32_768}),
        made(training={"sequence": 32_768, "lengths": "lognormal 900 1.2"}),
    )
    assert job_step(packed).parts["attention"] < 0.5 * job_step(whole).parts["attention"]
    assert job_flops(packed).model < job_flops(whole).model
    load = own_load(packed)
    assert load is not None and own_load(whole) is None
    assert predict_job(packed).jitter > predict_job(whole).jitter


def test_context_parallel_ranks_wait_for_the_last_where_they_are_not_balanced() -> None:
    even = made(training={"sequence": 32_768}, cp=4)
    uneven = replace(even, balanced=False)
    ratio = job_step(uneven).parts["attention"] / job_step(even).parts["attention"]
    assert ratio == pytest.approx(7 / 4, rel=0.05)  # seven eighths of the keys, not a half


def test_chunks_are_cut_as_documents_are() -> None:
    llama4 = made("llama4-scout", {"sequence": 32_768}, gpus=64, ep=16)
    window = replace(llama4, model=replace(llama4.model, chunked=False))
    assert job_step(llama4).parts["attention"] < 0.8 * job_step(window).parts["attention"]


def test_kernels_over_packed_documents_take_what_was_measured() -> None:
    """FlashAttention-2 on an H200; the law was fitted on whole sequences, and windows on the same file."""
    kernels, packed, windows = ClosedFormKernels.of(gpu("h200"), "flash2"), [], []
    for row in json.loads((DATA / "attention.json").read_text())["rows"]:
        documents = tuple(row["documents"])
        tokens = sum(documents)
        shape = AttentionShape(
            1, row["heads"], row["kv_heads"], tokens, tokens, row["dim"], row["dim"], True, row["window"],
            documents=documents if len(documents) > 1 else (),
        )  # fmt: skip
        for way, measured in ((False, row["forward_us"]), (True, row["backward_us"])):
            error = abs(kernels.attention(shape._replace(backward=way)) * 1e6 / measured - 1)
            (windows if row["window"] else packed).append(error)
    assert sum(packed) / len(packed) < 0.13
    assert sum(windows) / len(windows) < 0.09


# ---- recipes


def test_newton_schulz_takes_what_was_measured() -> None:
    job, _ = job_from_sections(
        {
            "model": {"preset": "llama3-8b"},
            "training": {"sequence": 2048},
            "parallel": {"gpus": 8},
            "cluster": {"gpu": "h200"},
        }
    )
    pricer = BlockCostModel(job, LAWS)
    for size, measured in json.loads((DATA / "host_step.json").read_text())["newton_schulz_s"].items():
        m, n = map(int, size.split("x"))
        allowed = 0.2 if min(m, n) >= 4096 else 0.5  # small ones wait for the host, which also casts and transposes
        assert iteration_seconds(pricer, m, n, 5) == pytest.approx(measured, rel=allowed), size


def test_muon_costs_products_and_less_where_it_is_sharded() -> None:
    adam, sharded, gathered = (
        made(training=t, zero=1) for t in ({}, {"optimizer": "muon"}, {"optimizer": "muon", "muon": "gathered"})
    )
    took = [job_step(job).update for job in (adam, sharded, gathered)]
    assert took[0] < took[1] < took[2] / 4
    assert job_memory(sharded).worst.optimizer < job_memory(adam).worst.optimizer


def test_scalings_cost_their_casts() -> None:
    took = {
        s: job_step(made(training={"precision": "fp8", "scaling": s})).parts["streams"]
        for s in ("delayed", "block", "tensorwise", "rowwise")
    }
    assert took["delayed"] < took["block"] < took["tensorwise"] < took["rowwise"]
    bf16 = replace(made(), recipe=made(training={"precision": "fp8", "scaling": "block"}).recipe)
    assert problems(bf16) == ["scaling is of precision fp8: bf16 has none"]


def test_the_host_steps_what_it_keeps_and_that_is_not_free() -> None:
    here, there = made(zero=1), made(training={"host_optimizer": 1.0}, zero=1)
    assert job_step(there).update > 3 * job_step(here).update
    assert job_memory(there).worst.optimizer == 0 < job_memory(here).worst.optimizer
    beside = made(training={"host_optimizer": 1.0, "host_overlap": True}, zero=1)
    assert job_step(beside).update < job_step(there).update


def test_activations_that_move_slower_than_compute_are_waited_for() -> None:
    kept = made(training={"recompute": {"offload": 0.0}})
    moved = made(training={"recompute": {"offload": 1.0}})
    assert job_memory(moved).worst.activations < 0.2 * job_memory(kept).worst.activations
    assert job_step(moved).parts["host"] > job_step(kept).parts["host"]


# ---- encoders of images


def test_a_tower_costs_its_passes_and_its_weights() -> None:
    frozen = made("qwen2.5-vl-7b")
    trained = replace(frozen, model=replace(frozen.model, vision=replace(frozen.model.vision, frozen=False)))
    text = replace(frozen, model=replace(frozen.model, vision=None))
    took = [job_step(job).seconds for job in (text, frozen, trained)]
    assert took[0] < took[1] < took[2]
    assert took[2] - took[0] == pytest.approx(3 * (took[1] - took[0]), rel=0.25)
    memory = [job_memory(job).worst for job in (text, frozen, trained)]
    assert memory[1].weights - memory[0].weights == pytest.approx(2 * frozen.model.vision_parameters, rel=0.01)
    assert memory[0].gradients < memory[1].gradients < memory[2].gradients


# ---- files


@pytest.mark.parametrize(
    "training",
    [
        {"tune": "qlora", "lora": {"targets": ["q", "v"], "rank": 8}},
        {"lengths": "lognormal 900 1.2"},
        {"optimizer": "muon", "muon": "gathered"},
        {"precision": "fp8", "scaling": "row"},
        {"host_optimizer": 0.5, "host_overlap": True},
    ],
)
def test_a_job_reads_back_from_its_text(training: dict[str, Any], tmp_path: Path) -> None:
    from presage.configs.job_file import read_transformer_job

    job = made(training=training)
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job, {"platform": "dgx-h100"}))
    assert replace(read_transformer_job(path), name="") == replace(job, name="")


def test_a_hybrid_reads_back_from_its_text(tmp_path: Path) -> None:
    from presage.configs.job_file import read_transformer_job

    for name in ("nemotron-3-nano", "kimi-linear-48b-a3b", "qwen2.5-vl-7b"):
        path = tmp_path / "job.toml"
        path.write_text(job_toml(made(name), {"platform": "dgx-h100"}))
        assert read_transformer_job(path, checked=False).model == preset(name)
