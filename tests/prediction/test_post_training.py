"""Reinforcement-learning steps: the laws of rollouts, phases, memory and splits as properties."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import runner
from presage.cli import job as job_command
from presage.cli import plan as plan_command
from presage.configs.job_file import JobTable
from presage.configs.post_training import ResponseLengths
from presage.errors import PresageError
from presage.memory.engine_memory import engine_memory
from presage.prediction.post_training.decoding import DecodingModel, decoding_model
from presage.prediction.post_training.lengths import draw_lengths
from presage.prediction.post_training.phases import cut_microbatches, tensor_count, weight_transfer
from presage.prediction.post_training.rollout import EngineLimits, roll_out
from presage.prediction.post_training.splits import search_splits
from presage.prediction.post_training.step import PostTrainingResult, predict_post_training

EXAMPLE = Path(__file__).parents[2] / "examples/jobs/grpo_qwen3-8b.toml"
SMALL = {
    "model": {"preset": "llama3-8b"}, "parallel": {"gpus": 8, "zero": 1}, "cluster": {"platform": "dgx-h100"},
    "training": {"recompute": "full"},
}  # fmt: skip
RL = {"prompts": 16, "samples": 8, "prompt_length": 100, "response_mean": 500, "response_max": 2000}
APART = {"placement": "disaggregated", "engine": {"gpus": 8}}


def parsed(model: str = "llama3-8b", **rl: Any) -> Any:
    return JobTable(Path("job.toml"), SMALL | {"model": {"preset": model}, "rl": RL | rl}).parse()


def step(model: str = "llama3-8b", draws: int = 4, **rl: Any) -> PostTrainingResult:
    return predict_post_training(parsed(model, **rl), draws=draws)


def model_of(**engine: Any) -> DecodingModel:
    found = parsed(engine=engine)
    return decoding_model(found.job, found.rl.engine)


# ---- lengths


@pytest.mark.parametrize(("mean", "longest", "sigma"), [(500, 4096, 0.6), (3200, 4096, 0.6), (900, 1000, 1.0)])
def test_drawn_lengths_have_the_mean_and_no_more_than_the_longest(mean: float, longest: int, sigma: float) -> None:
    drawn = draw_lengths(ResponseLengths(mean, longest, sigma), 200_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.min() >= 1
    assert drawn.max() <= longest


def test_lengths_seen_are_drawn_again() -> None:
    drawn = draw_lengths(ResponseLengths(150, 200, seen=(100.0, 200.0)), 1000, np.random.default_rng(0))
    assert set(drawn) == {100.0, 200.0}


# ---- decoding


def test_an_iteration_reads_all_weights_at_least() -> None:
    model = model_of()
    gpu = model.job.platform.gpu
    least = 2 * (model.job.model.parameters - model.job.model.embedding_parameters) / gpu.memory_bandwidth
    assert least < float(model.seconds(1, 100)) < 3 * least


def test_an_iteration_grows_with_batch_and_context() -> None:
    model = model_of()
    times = model.seconds(np.arange(1.0, 1000.0), np.arange(1.0, 1000.0) * 500)
    assert (np.diff(times) > 0).all()
    assert float(model.seconds(64, 64 * 4000)) > float(model.seconds(64, 64 * 100))
    assert model.one(64, 6400.0) == pytest.approx(float(model.seconds(64, 6400)))


def test_the_kv_cache_is_read_at_the_memorys_rate() -> None:
    model, tokens = model_of(), 500_000
    m, gpu = model.job.model, model.job.platform.gpu
    nbytes = tokens * m.layers * 2 * m.kv_heads * m.head_dim * 2
    assert 0.7 < nbytes / gpu.memory_bandwidth / float(model.attention_seconds(256, tokens)) <= 1.0


def test_eager_engines_and_old_schedulers_are_slower() -> None:
    usual = model_of().iteration(16)
    assert model_of(enforce_eager=True).iteration(16) > usual
    assert model_of(async_scheduling=False).iteration(16) > usual
    assert model_of(precision="fp8").iteration(16) < usual


def test_experts_that_a_batch_touches() -> None:
    found = parsed("qwen3-30b-a3b")
    model = decoding_model(found.job, found.rl.engine)
    one, some, many = (model.pass_seconds(n) for n in (1, 8, 256))
    assert 2 * one < some < many  # more experts each
    assert model.pass_seconds(512) < 1.6 * many  # by then all


def test_latent_keys_are_few_and_whole_on_every_rank() -> None:
    table = SMALL | {"model": {"preset": "deepseek-v3"}, "parallel": {"gpus": 256}, "rl": RL}
    found = [JobTable(Path("j"), table | {"rl": RL | {"engine": {"tp": tp}}}).parse() for tp in (16, 32)]
    tokens = [engine_memory(p.job, p.rl.engine, 100).token for p in found if p.rl]
    assert tokens[0] == tokens[1] == 61 * 576 * 2


# ---- rollouts


def rolled(lengths: Any, sequences: int = 1024, tokens: int = 10_000_000, replicas: int = 1) -> Any:
    limits = EngineLimits(sequences, tokens)
    return roll_out(model_of(), np.asarray(lengths, float), 100.0, limits, replicas, 1.0)


def test_a_rollout_lasts_as_long_as_its_longest_response() -> None:
    lengths = draw_lengths(ResponseLengths(500, 4000), 256, np.random.default_rng(1))
    whole, longest = rolled(lengths), rolled([lengths.max()])
    assert whole.seconds > longest.seconds
    assert whole.iterations == lengths.max()
    assert 0 <= whole.tail <= whole.seconds
    assert whole.seconds < sum(rolled([n]).seconds for n in lengths)


def test_one_wave_and_events_agree() -> None:
    lengths = draw_lengths(ResponseLengths(300, 1000), 64, np.random.default_rng(2))
    one = rolled(lengths)
    events = roll_out(model_of(), lengths, 100.0, EngineLimits(64, 64 * 1000), 1, 1.0)
    again = rolled(lengths, sequences=64, tokens=int(64 * 101 + lengths.sum()))
    assert events.seconds == pytest.approx(one.seconds, rel=1e-6)
    assert again.seconds == pytest.approx(one.seconds, rel=0.02)


def test_fewer_slots_or_blocks_never_make_it_faster() -> None:
    lengths = draw_lengths(ResponseLengths(300, 1000), 200, np.random.default_rng(3))
    slots = [rolled(lengths, sequences=n).seconds for n in (200, 64, 16, 4)]
    assert slots == sorted(slots)
    blocks = [rolled(lengths, tokens=n) for n in (10_000_000, 40_000, 10_000, 2_000)]
    assert [b.seconds for b in blocks] == sorted(b.seconds for b in blocks)
    assert blocks[0].preempted == 0 < blocks[2].preempted
    assert all(b.batch > 0 for b in blocks)


def test_more_replicas_never_make_it_slower() -> None:
    lengths = draw_lengths(ResponseLengths(500, 4000), 512, np.random.default_rng(4))
    times = [rolled(lengths, replicas=n).seconds for n in (1, 2, 4, 8, 16, 512)]
    assert times == sorted(times, reverse=True)


# ---- steps


def test_on_policy_phases_add_up_and_off_policy_the_longer_counts() -> None:
    sync, off = step(**APART), step(staleness=1, **APART)
    assert np.allclose(sync.draws, sum(sync.by_phase.values()))
    assert off.by_phase.keys() == sync.by_phase.keys()
    longest = np.maximum(off.by_phase["rollout"], off.trainer_busy)
    assert (off.draws >= longest).all()
    assert (off.draws <= sum(off.by_phase.values())).all()
    assert off.seconds < sync.seconds
    assert min(off.waits["trainer, for the rollout"], off.waits["engine, for the trainer"]) < 0.2 * off.seconds


def test_batches_in_flight_hide_tails() -> None:
    whole = step(staleness=1, draws=8, **APART)
    hidden = step(staleness=1, in_flight=True, draws=8, **APART)
    assert hidden.breakdown["rollout"] < whole.breakdown["rollout"]


def test_a_colocated_engine_has_all_gpus() -> None:
    p = step()
    assert p.gpus == 8
    assert p.transfer.offload > 0
    assert step(offload=False).transfer.offload == 0
    assert step(**APART).gpus == 16
    assert step(**APART).transfer.wake == 0


def test_more_work_takes_longer() -> None:
    base = step()
    assert step(epochs=2).breakdown["training"] == pytest.approx(2 * base.breakdown["training"])
    assert step(response_mean=1000).seconds > base.seconds
    assert step(algorithm="ppo").seconds > base.seconds
    assert "reference" not in step(reference=False).breakdown
    assert step(reward_model="llama3-8b").breakdown["reward"] > 0
    assert step(reward_seconds=7.0).breakdown["reward"] == 7
    assert step(packing="padded").breakdown["training"] > base.breakdown["training"]


def test_packing_holds_all_tokens() -> None:
    found = parsed(microbatch_tokens=4096)
    lengths = draw_lengths(found.rl.lengths, found.rl.responses, np.random.default_rng(0))
    cut = cut_microbatches(found.job, found.rl, lengths)
    total = float((lengths + 100).sum())
    assert cut.tokens * cut.count * cut.updates * found.job.dp == pytest.approx(total)
    assert cut.tokens <= 4096
    assert cut.largest(1) == 1.0 <= cut.largest(8)


def test_weights_of_a_checkpoint_are_counted() -> None:
    """The tensors of published checkpoints, as their index files list them."""
    assert tensor_count(parsed("llama3-8b").job.model) == 291
    assert tensor_count(parsed("qwen3-30b-a3b").job.model) == pytest.approx(18_867, rel=0.01)


def test_a_sharded_trainer_gathers_before_it_hands_over() -> None:
    whole, sharded = parsed(), JobTable(Path("j"), SMALL | {"parallel": {"gpus": 8, "fsdp": True}, "rl": RL}).parse()
    assert sharded.rl is not None
    assert weight_transfer(whole.job, whole.rl).gather == 0
    assert weight_transfer(sharded.job, sharded.rl).gather > 0


# ---- memory


def test_the_kv_cache_as_vllm_reports_it() -> None:
    """Tokens that vLLM found room for on an H100 NVL with 0.9 of its memory (94 GB; batches of 4,096 tokens)."""
    for model, tokens in {"llama3-8b": 542_960, "qwen3-8b": 478_560, "qwen3-14b": 350_304, "qwen3-32b": 81_648}.items():
        table = SMALL | {"model": {"preset": model}, "cluster": {"platform": "8xh100-nvl"}, "parallel": {"gpus": 2}}
        engine = {"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 4096}
        found = JobTable(Path("j"), table | {"rl": RL | {"engine": engine}}).parse()
        assert found.rl is not None
        assert engine_memory(found.job, found.rl.engine, 4096).kv_tokens == pytest.approx(tokens, rel=0.06), model


def test_memory_grows_with_what_it_holds() -> None:
    def room(**engine: Any) -> float:
        found = parsed(engine=engine)
        return engine_memory(found.job, found.rl.engine, 2100).kv_tokens

    assert room(gpu_memory_utilization=0.5) < room(gpu_memory_utilization=0.7) < room(gpu_memory_utilization=0.9)
    assert room(max_num_seqs=2048) < room(max_num_seqs=256)
    assert room(kv_cache_precision="fp8") > 1.9 * room()
    assert room(tp=2) > 2 * room()
    assert not step("llama3-70b").fits
    assert step(engine={"gpu_memory_utilization": 0.99}, offload=False).engine_margin < 0


def test_a_critic_needs_memory_too() -> None:
    assert step(algorithm="ppo").trainer_margin < step().trainer_margin


# ---- splits, commands


def test_splits_are_ranked_and_the_best_is_no_slower_than_the_files() -> None:
    found = parsed()
    splits = search_splits(found.job, found.rl)
    fitting = [s.result.seconds for s in splits if s.fits]
    assert fitting == sorted(fitting)
    assert {s.result.gpus for s in splits} == {8}
    assert any(s.result.rl.colocated for s in splits)
    assert fitting[0] <= predict_post_training(found, draws=8).seconds * 1.05


def test_draws_repeat_with_their_seed() -> None:
    a, b, c = (predict_post_training(parsed(), draws=3, seed=seed).draws for seed in (1, 1, 2))
    assert (a == b).all()
    assert not (a == c).all()


def test_a_step_takes_less_than_a_second() -> None:
    predict_post_training(EXAMPLE)
    begun = time.perf_counter()
    predict_post_training(EXAMPLE, {"rl": {"response_mean": 2001}})
    assert time.perf_counter() - begun < 2.0  # one, on a machine that does nothing else


def test_the_command_shows_phases_memory_and_what_to_try(tmp_path: Path) -> None:
    out = runner(job_command.command)(EXAMPLE, "--report", tmp_path / "page.html", "--draws", "8")
    assert "rollout takes longest" in out
    assert all(word in out for word in ("Phases", "Who waits", "KV cache", "tail", "presage plan"))
    assert (tmp_path / "page.html").stat().st_size > 100_000
    data = json.loads(runner(job_command.command)(EXAMPLE, "--json", "-", "--draws", "8"))
    assert data["step_ms"]["p50"] == pytest.approx(sum(p["ms"] for p in data["phases"].values()), rel=0.05)
    assert data["step_ms"]["p5"] < data["step_ms"]["p50"] <= data["drawn_ms"]["p95"]
    assert data["fits"]
    assert data["engine_memory"]["kv_cache_tokens"] > 100_000


def test_options_of_training_alone_are_refused() -> None:
    for option in (("--tokens", "1T"), ("--noise", "production")):
        with pytest.raises(PresageError, match="does not go with a reinforcement-learning step"):
            runner(job_command.command)(EXAMPLE, *option)


def test_plan_searches_the_split() -> None:
    out = runner(plan_command.command)(EXAMPLE, "--top", "3")
    assert "Fastest:" in out
    assert "rl.engine.gpus=" in out or "rl.placement=colocated" in out
    with pytest.raises(PresageError, match="--keep does not go"):
        runner(plan_command.command)(EXAMPLE, "--keep", "tp=2")


def test_one_more_gpu_for_the_engine_never_slows_the_rollout() -> None:
    found = parsed(**APART)
    times = []
    for gpus in (1, 2, 4, 8):
        rl = replace(found.rl, engine=replace(found.rl.engine, gpus=gpus))
        times.append(predict_post_training(found._replace(rl=rl), draws=4).breakdown["rollout"])
    assert times == sorted(times, reverse=True)
