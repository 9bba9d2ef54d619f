"""[rl] of job files, verl's and NeMo-RL's settings: what is read, assumed, refused."""

from pathlib import Path
from typing import Any

import pytest

from presage.configs.job_file import JobTable, ParsedJob, read_transformer_job
from presage.configs.nemo_rl import read_nemo_rl
from presage.configs.post_training import SIGMA, PostTraining
from presage.configs.script_arguments import read_settings, resolve_settings
from presage.configs.verl import read_verl
from presage.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples/jobs/grpo_qwen3-8b.toml"
VERL = """
# data.train_batch_size=7
gen_tp=2
n_resp=5
max_response=$((1024 * 2))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/train.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 \\
    data.max_response_length=${max_response} \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$gen_tp \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=$n_resp \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm=True \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=20 $@
"""
NEMO = """
defaults: base.yaml
grpo:
  num_generations_per_prompt: 32
  async_grpo: {enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true}
loss_fn: {reference_policy_kl_penalty: 0}
policy:
  model_name: Qwen/Qwen3-235B-A22B
  train_micro_batch_size: 2
  max_total_sequence_length: 8192
  sequence_packing:
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    sequence_parallel: true
    pipeline_model_parallel_size: 8
    context_parallel_size: 2
    expert_model_parallel_size: 16
    num_layers_in_first_pipeline_stage: 11
    num_layers_in_last_pipeline_stage: 11
  generation:
    colocated: {enabled: false, resources: {num_nodes: 16, gpus_per_node: 8}}
    vllm_cfg: {tensor_parallel_size: 16, gpu_memory_utilization: 0.8}
cluster: {gpus_per_node: 8, num_nodes: 32}
"""
BASE = {"model": {"preset": "llama3-8b"}, "parallel": {"gpus": 8}, "cluster": {"platform": "dgx-h100"}}


def parse(**rl: Any) -> ParsedJob:
    return JobTable(Path("job.toml"), BASE | {"rl": {"prompts": 32, "response_max": 1024} | rl}).parse()


def step(**rl: Any) -> PostTraining:
    found = parse(**rl).rl
    assert found is not None
    return found


def test_what_a_file_leaves_open_is_assumed_and_said() -> None:
    parsed = parse(samples=4)
    assert parsed.rl is not None
    assert parsed.rl.responses == parsed.rl.mini_batch == 128
    assert parsed.rl.colocated
    assert parsed.rl.engine.gpus == 8
    assert parsed.rl.lengths.sigma == SIGMA
    said = " ".join(parsed.notes)
    assert all(key in said for key in ("rl.prompt_length", "rl.response_mean", "rl.response_lengths", "reward_seconds"))
    assert not any("sigma" in note for note in parse(response_sigma=0.4).notes)


def test_the_sequence_follows_from_prompt_and_response() -> None:
    assert parse(prompt_length=100).job.sequence == 1152
    assert step(prompt_length=100).lengths.longest == 1024


def test_lengths_from_a_histogram_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length,count\n100,3\n# more\n500,1\n9000,1\n")
    table = BASE | {"rl": {"prompts": 8, "response_lengths": "lengths.csv", "response_max": 1024}}
    rl = JobTable(tmp_path / "job.toml", table).parse().rl
    assert rl is not None
    assert sorted(rl.lengths.seen) == [100, 100, 100, 500, 1024]
    assert rl.lengths.mean == pytest.approx(364.8)


def test_ppo_has_a_critic_and_dapo_no_reference() -> None:
    assert step(algorithm="gae").critic is not None
    assert step(algorithm="grpo").critic is None
    assert step(algorithm="grpo").reference
    assert not step(algorithm="dapo").reference


@pytest.mark.parametrize(
    ("rl", "said"),
    [
        ({"respons_mean": 3}, "did you mean 'response_mean'"),
        ({"algorithm": "sarsa"}, "choose from grpo"),
        ({"staleness": 1}, "rl.engine.gpus"),
        ({"in_flight": True}, "staleness"),
        ({"mini_batch": 33}, "32 is no multiple of 33"),
        ({"response_mean": 4000.0}, "response_mean"),
        ({"engine": {"tp": 3}}, "no multiple of 3"),
        ({"engine": {"gpus": 4}, "placement": "colocated"}, "disaggregated"),
        ({"engine": {"name": "tgi"}}, "choose from vllm, sglang"),
        ({"engine": {"ep": 4, "tp": 2}}, "ep = tp"),
        ({"engine": {"gpu_memory_utilization": 1.2}}, "between 0 and 1"),
        ({"prompts": 0}, "1 or more"),
        ({"critic": "no-such-model"}, "no model"),
    ],
)
def test_wrong_values_are_one_sentence(rl: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse(**rl)


def test_other_readers_refuse_it() -> None:
    with pytest.raises(InputError, match="presage job and presage plan take it"):
        read_transformer_job(EXAMPLE)
    with pytest.raises(InputError, match="mini_batch"):
        JobTable.read(EXAMPLE).parse({"training": {"global_batch": 8}})


def test_a_script_of_verl(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    (tmp_path / "job.toml").write_text('verl = "run.sh"\n[cluster]\nplatform = "dgx-h100"\n')
    parsed = JobTable.read(tmp_path / "job.toml").parse({"rl": {"response_mean": 700}})
    rl, job = parsed.rl, parsed.job
    assert rl is not None
    assert (rl.prompts, rl.samples, rl.mini_batch) == (1024, 5, 1280)  # verl counts mini batches in prompts
    assert (rl.engine.tp, rl.engine.gpu_memory_utilization, rl.lengths.longest) == (2, 0.6, 2048)
    assert (rl.packing, rl.microbatch_tokens, rl.reference) == ("packed", 24000, True)
    assert (job.gpus, job.parallel.fsdp, job.recompute.mode, job.model.name) == (16, True, "full", "qwen3-8b")
    assert any("half of the longest" in note for note in parsed.notes)
    assert not any("not read" in note for note in parsed.notes)


def test_a_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    script = VERL.replace("model.path=Qwen/Qwen3-8B", "model.path=$MODEL")
    (tmp_path / "run.sh").write_text('MODEL=${MODEL:-"${HOME}/models/Qwen3-14B"}\n' + script)
    (tmp_path / "job.toml").write_text('verl = "run.sh"\n[cluster]\nplatform = "dgx-h100"\n')
    assert JobTable.read(tmp_path / "job.toml").parse().job.model.name == "qwen3-14b"
    (tmp_path / "run.sh").write_text("MODEL=acme/secret-9b\n" + script)
    with pytest.raises(InputError, match=r"acme/secret-9b is not a preset: give \[model\]"):
        JobTable.read(tmp_path / "job.toml").parse()
    own = {"model": {"preset": "qwen3-8b"}}
    assert JobTable(tmp_path / "job.toml", JobTable.read(tmp_path / "job.toml").table | own).parse().rl is not None


def test_yaml_of_verl_with_megatron_and_an_engine_apart(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text(
        "actor_rollout_ref:\n  hybrid_engine: false\n  actor:\n    strategy: megatron\n"
        "    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 8}\nrollout: {nnodes: 1, n_gpus_per_node: 4}\n"
    )
    sections, _ = read_verl(tmp_path / "v.yaml")
    assert sections["parallel"] == {"tp": 2, "pp": 2, "gpus": 8, "zero": 1}
    assert sections["rl"]["engine"]["gpus"] == 4
    assert sections["rl"]["staleness"] == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("actor_rollout_ref.rollout.n=", "actor_rollout_ref.rollout.nn=", "did you mean 'actor_rollout_ref.rollout.n'"),
        ("trainer.nnodes=2", "actor_rollout_ref.rollout.multi_turn.enable=True", "not modelled"),
        ("trainer.nnodes=2", "actor_rollout_ref.model.lora_rank=32", "not modelled"),
        ("trainer.nnodes=2", "actor_rollout_ref.rollout.name=hf", "use vllm or sglang"),
        ("trainer.nnodes=2", "trainer.nnodes=two", "whole number"),
    ],
)
def test_what_is_not_modelled_of_verl_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace(old, new))
    with pytest.raises(InputError, match=said):
        read_verl(tmp_path / "run.sh")


def test_a_recipe_of_nemo_rl_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(NEMO)
    (tmp_path / "base.yaml").write_text("grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 2}\n")
    (tmp_path / "job.toml").write_text('nemo_rl = "recipe.yaml"\n[cluster]\nplatform = "dgx-h100"\n')
    parsed = JobTable.read(tmp_path / "job.toml").parse()
    rl, job = parsed.rl, parsed.job
    assert rl is not None
    assert (rl.prompts, rl.samples, rl.responses) == (16, 32, 512)
    assert (rl.staleness, rl.in_flight, rl.reference, rl.placement) == (1, True, False, "disaggregated")
    assert (job.gpus, rl.engine.gpus, rl.engine.tp) == (128, 128, 16)
    assert (job.parallel.tp, job.parallel.cp, job.parallel.ep, job.parallel.pp) == (2, 2, 16, 8)
    assert job.parallel.layers_as == (11, 12, 12, 12, 12, 12, 12, 11)
    assert rl.microbatch_tokens == 2 * 8192


def test_a_recipe_without_its_base_takes_nemo_rls_defaults(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(NEMO)
    sections, notes = read_nemo_rl(tmp_path / "recipe.yaml")
    assert sections["rl"]["prompts"] == 32
    assert any("not there" in note for note in notes)


@pytest.mark.parametrize(
    ("before", "setting", "name"),
    [
        ("num_generations", "use_dynamic_sampling: true\n  ", "grpo.use_dynamic_sampling"),
        ("activation_ch", "fp8_cfg: {enabled: true, fp8: hybrid}\n    ", "policy.megatron_cfg.fp8_cfg.enabled"),
        ("activation_ch", "peft: {enabled: true, dim: 8}\n    ", "policy.megatron_cfg.peft.enabled"),
        ("megatron_cfg", "dtensor_cfg: {lora_cfg: {enabled: true}}\n  ", "policy.dtensor_cfg.lora_cfg.enabled"),
    ],
)
def test_what_is_not_modelled_of_nemo_rl_is_refused(tmp_path: Path, before: str, setting: str, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(NEMO.replace(before, setting + before, 1))
    with pytest.raises(InputError, match=f"{name}: is True, which is not modelled"):
        read_nemo_rl(path)
    path.write_text(NEMO.replace(before, setting.replace("true", "false") + before, 1))
    read_nemo_rl(path)


def test_settings_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {b: 4, c: '${a.b}', d: '${mul:${a.b}, 3}', e: '${no.such}'}\n")
    found = resolve_settings(read_settings(tmp_path / "a.yaml"))
    assert (found["a.c"], found["a.d"], found["a.e"]) == (4, 12, "${no.such}")
