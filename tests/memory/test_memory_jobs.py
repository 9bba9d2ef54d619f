"""Memory of a job: laws of its parts."""

import timeit
from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest

from presage.configs.check import problems
from presage.configs.frameworks import Framework, framework
from presage.configs.job import Job, Recompute
from presage.configs.transformer import Experts, Latent, Transformer
from presage.hardware import platform
from presage.memory import in_flight, job_memory, memory_by_module, memory_savings
from presage.memory.activations import layer_activations, layer_parts
from presage.memory.optimizer_state import optimizer_state, parameter_shards
from presage.parallel.pipeline import Schedule
from presage.parallel.plan import ParallelPlan

GPT = Transformer(12288, 96, 96, 51200, 49152, 96, 128, activation="gelu", norm="layernorm", bias=True, tied=True)
LLAMA = Transformer(8192, 80, 64, 128256, 28672, 8, 128)
DEEPSEEK = Transformer(
    7168,
    61,
    128,
    129280,
    18432,
    128,
    192,
    latent=Latent(1536, 512, 64, 128, 128),
    experts=Experts(256, 8, 2048, 2048, 3),
)
MEGATRON = Framework()
OLD = Framework(
    key="megatron-2021",
    attention="fused-softmax",
    dropout=True,
    fused_loss=False,
    gradient_bytes=2,
    host="megatron-2021",
)
DEEPSPEED = replace(OLD, key="megatron-deepspeed", host="deepspeed")
TITAN = Framework(key="torchtitan", compiled=True, host="compiled")


def job(model: Transformer = LLAMA, gpus: int = 64, **given: object) -> Job:
    usual = {"sequence": 2048, "micro_batch": 1, "global_batch": 512, "parallel": ParallelPlan(zero=1)}
    return Job(model, platform("dgx-h100"), gpus, **(usual | given))


# ---- activations


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer_keeps_what_korthikanti_et_al_count(tp: int) -> None:
    """arXiv 2205.05198: s b h (10 + 24/t + 5 a s / (h t)); divided by t with sequence parallelism; selective, full."""
    h, a, s = GPT.hidden, GPT.heads, 2048
    statistics = 16  # means and deviations of two normalisations, which they leave out

    def kept(recompute: Recompute, sequence: bool) -> float:
        one = job(GPT, parallel=ParallelPlan(tp=tp, sequence_parallel=sequence), framework=OLD, recompute=recompute)
        return layer_activations(one, experts=False).kept - statistics

    scores = 5 * a * s / tp
    assert kept(Recompute(), False) == pytest.approx(10 * h + 24 * h / tp + scores)
    assert kept(Recompute(), True) == pytest.approx(34 * h / tp + scores)
    assert kept(Recompute("selective", ("core_attn",)), True) == pytest.approx(34 * h / tp)
    assert kept(Recompute("full"), False) + statistics == pytest.approx(2 * h)


def test_fused_attention_keeps_statistics_not_scores() -> None:
    scored, fused = (
        layer_activations(job(GPT, framework=replace(OLD, dropout=False, attention=kind)), experts=False).kept
        for kind in ("fused-softmax", "flash2")
    )
    assert scored - fused == GPT.heads * (2 * 2048 - 4)


def test_fp8_keeps_inputs_of_products_in_a_byte() -> None:
    h, f = LLAMA.hidden, LLAMA.ffn
    bf16, fp8 = (layer_activations(job(precision=p), experts=False).kept for p in ("bf16", "fp8"))
    assert bf16 - fp8 == h + h - h + f  # two normalised inputs and the activation; attention's output is there twice


def test_experts_keep_a_copy_of_a_token_for_each_one_chosen() -> None:
    full, half = (
        layer_activations(job(replace(DEEPSEEK, experts=replace(DEEPSEEK.experts, top_k=k)), 256), experts=True).kept
        for k in (8, 4)
    )
    each = 2 * DEEPSEEK.hidden + 8 + 3 * 2 * 2048
    assert full - half == 4 * each


# ---- weights


@pytest.mark.parametrize("model", [GPT, LLAMA, DEEPSEEK])
def test_ranks_hold_every_parameter_once(model: Transformer) -> None:
    s = parameter_shards(job(model))
    dense = model.layers - model.expert_layers
    found = dense * s.dense + model.expert_layers * (s.moe + s.experts) + s.embedding + s.norm
    assert found + (0 if model.tied else s.head) == model.parameters


def test_tied_embeddings_are_on_both_ends_of_a_pipeline() -> None:
    first, middle, last = job_memory(job(GPT, 96, parallel=ParallelPlan(pp=3))).stages
    matrix = 2 * GPT.vocab * GPT.hidden
    assert first.weights - middle.weights == matrix
    assert last.weights - middle.weights == pytest.approx(matrix + 2 * GPT.norm_parameters)


@pytest.mark.parametrize(
    ("parallel", "framework", "weight", "gradient", "optimizer"),
    [
        (ParallelPlan(), MEGATRON, 2, 4, 12),
        (ParallelPlan(zero=1), MEGATRON, 2, 4, 12 / 64),
        (ParallelPlan(zero=2), MEGATRON, 2, 4 / 64, 12 / 64),
        (ParallelPlan(zero=3), MEGATRON, 2 / 64, 4 / 64, 12 / 64),
        (ParallelPlan(zero=3, fsdp=True), TITAN, 4 / 64, 4 / 64, 8 / 64),
        (ParallelPlan(zero=3, fsdp=True, shard=8), TITAN, 4 / 8, 4 / 8, 8 / 8),
        (ParallelPlan(zero=1, cp=4), MEGATRON, 2, 4, 12 / 64),  # context-parallel ranks hold the same weights
    ],
)
def test_bytes_of_a_parameter(
    parallel: ParallelPlan, framework: Framework, weight: float, gradient: float, optimizer: float
) -> None:
    found = optimizer_state(job(parallel=parallel, framework=framework))
    assert (found.weight, found.gradient, found.optimizer) == (weight, gradient, optimizer)


def test_experts_are_sharded_over_their_copies() -> None:
    found = optimizer_state(job(DEEPSEEK, 256, parallel=ParallelPlan(zero=1, ep=32)))
    assert (found.optimizer, found.expert_optimizer) == (12 / 256, 12 / 8)


# ---- pipelines


@pytest.mark.parametrize(
    ("kind", "virtual", "many"), [("1f1b", 1, 16), ("1f1b", 1, 2), ("gpipe", 1, 16), ("1f1b", 3, 16), ("1f1b", 2, 4)]
)
def test_microbatches_in_flight_are_those_of_the_schedule(kind: str, virtual: int, many: int) -> None:
    one = job(
        replace(LLAMA, layers=24), 4, parallel=ParallelPlan(pp=4, virtual=virtual, schedule=kind), global_batch=many
    )
    named = "interleaved" if virtual > 1 else kind
    assert [in_flight(one, s) for s in range(4)] == list(Schedule.of(named, 4, many, virtual).in_flight)


def test_the_first_stage_keeps_most_activations() -> None:
    kept = [
        s.activations
        for s in job_memory(job(gpus=64, parallel=ParallelPlan(pp=8, tp=8, sequence_parallel=True))).stages
    ]
    assert all(a > b for a, b in pairwise(kept[:-1]))
    assert kept[0] / kept[3] == pytest.approx(8 / 5)


# ---- whole jobs


def test_each_help_is_real_and_the_best_is_first() -> None:
    one = job(
        gpus=64, micro_batch=2, parallel=ParallelPlan(tp=2, sequence_parallel=True, pp=4, zero=1), global_batch=512
    )
    before = job_memory(one)
    found = memory_savings(one)
    assert not before.fits
    assert found[0].fits
    assert [h.saved for h in found] == sorted((h.saved for h in found), reverse=True)
    for h in found:
        assert not problems(h.job)
        assert before.needed - job_memory(h.job).needed == h.saved
    words = " ".join(h.change for h in found)
    for knob in (
        "tensor parallel 2 -> 4",
        "full recomputation",
        "microbatches of 1",
        "pipeline stages 4 -> 8",
        "ZeRO-2",
    ):
        assert knob in words


@pytest.mark.parametrize("model", [GPT, LLAMA, DEEPSEEK])
@pytest.mark.parametrize("framework", [MEGATRON, OLD, DEEPSPEED, TITAN, replace(TITAN, compiled=False, host="torch")])
def test_more_work_never_needs_less(model: Transformer, framework: Framework) -> None:
    one = job(model, 256, micro_batch=2, parallel=ParallelPlan(pp=4, zero=1), framework=framework)
    needed = job_memory(one).needed
    for more in (
        replace(one, micro_batch=4),
        replace(one, sequence=4096),
        replace(one, model=replace(model, layers=model.layers + 4)),
        replace(one, parallel=replace(one.parallel, zero=0)),
        replace(one, parallel=replace(one.parallel, schedule="gpipe")),
    ):
        assert job_memory(more).needed > needed
    for mode in (Recompute("selective", ("core_attn",)), Recompute("full", share=0.5), Recompute("full")):
        assert job_memory(replace(one, recompute=mode)).needed <= needed


def test_one_job_is_quick() -> None:
    one = job(gpus=16384, parallel=ParallelPlan(tp=8, sequence_parallel=True, pp=16, zero=1), global_batch=2048)
    assert (
        min(timeit.repeat(lambda: job_memory(one), number=20, repeat=10, timer=process_time)) / 20 < 700e-6
    )  # 430 us on a machine whose cores four processes share


def test_three_figures_of_a_stage() -> None:
    stage = job_memory(job(parallel=ParallelPlan(tp=8, sequence_parallel=True, zero=1))).worst
    assert stage.allocated < stage.reserved < stage.device
    assert stage.needed == stage.allocated + stage.outside
    assert job_memory(job()).peak == job_memory(job()).worst.allocated  # what Megatron logs
    assert job_memory(job(framework=TITAN)).peak == job_memory(job(framework=TITAN)).worst.reserved


# ---- by module, and in the words of the software


def test_parts_by_module_add_up_to_what_is_needed() -> None:
    for one in (
        job(gpus=64, parallel=ParallelPlan(tp=2, sequence_parallel=True, pp=4, zero=1), global_batch=512),
        job(gpus=64, parallel=ParallelPlan(pp=4), global_batch=512, recompute=Recompute("full")),
        job(gpus=64, parallel=ParallelPlan(pp=4), global_batch=512, recompute=Recompute("selective", ("mlp",))),
    ):
        found = job_memory(one)
        parts = memory_by_module(one, found)
        assert sum(parts.values()) == pytest.approx(found.needed)
        assert all(size > 0 for size in parts.values())
        assert sum(layer_parts(one, experts=False).values()) == pytest.approx(layer_activations(one, False).kept)


def test_modules_that_are_computed_again_keep_nothing() -> None:
    one = job(gpus=64, parallel=ParallelPlan(pp=4), global_batch=512)
    again = replace(one, recompute=Recompute("selective", ("mlp",)))
    parts, less = (memory_by_module(j, job_memory(j)) for j in (one, again))
    assert less["activations: mlp"] < parts["activations: mlp"]
    assert less["activations: self_attention"] == parts["activations: self_attention"]


@pytest.mark.parametrize(
    ("software", "words"),
    [
        ("megatron-core", ("--tensor-model-parallel-size 4", "--recompute-granularity full", "--micro-batch-size 1")),
        ("nemo", ("tensor_model_parallel_size=4", "recompute_granularity=full", "micro_batch_size=1")),
        ("torchtitan", ("--parallelism.tensor_parallel_degree 4", "--activation_checkpoint.mode full")),
        ("hf-trainer", ("gradient_checkpointing=True", "per_device_train_batch_size=1", 'fsdp="full_shard auto_wrap"')),
        ("maxtext", ("parallel.tp=4", "training.recompute=full")),
    ],
)
def test_each_help_is_said_in_the_words_of_the_software(software: str, words: tuple[str, ...]) -> None:
    one = job(
        gpus=64, micro_batch=2, parallel=ParallelPlan(tp=2, pp=4, zero=1), global_batch=512,
        framework=framework(software),
    )  # fmt: skip
    said = " | ".join(h.flags for h in memory_savings(one))
    for word in words:
        assert word in said, said


def test_a_fused_loss_is_a_kernel_of_the_trainer() -> None:
    small = replace(LLAMA, layers=2)
    one = job(small, 1, parallel=ParallelPlan(), micro_batch=16, global_batch=16, framework=framework("hf-trainer"))
    assert "use_liger_kernel=True" in [h.flags for h in memory_savings(replace(one, recompute=Recompute("full")))]


def test_changes_are_made_together_where_none_suffices_alone() -> None:
    plan = ParallelPlan(tp=2, sequence_parallel=True, pp=2, zero=1)
    one = job(gpus=64, micro_batch=4, sequence=8192, parallel=plan)
    first, *others = memory_savings(one)
    assert not any(h.fits for h in others)
    assert first.fits and " and " in first.change and first.flags.count("--") > 1
    assert job_memory(first.job).fits
