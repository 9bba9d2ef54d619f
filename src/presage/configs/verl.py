"""verl's settings (data.*, actor_rollout_ref.*, algorithm.*, trainer.*) as the sections of a job file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from presage.configs.rl_settings import LAYOUT, Settings, model_section, without_empty
from presage.configs.script_arguments import read_settings, resolve_settings
from presage.errors import InputError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# verl's own defaults (verl/trainer/config/ppo_trainer.yaml), where a script leaves them.
DEFAULTS = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512, f"{R}.n": 1,
    f"{A}.ppo_mini_batch_size": 256, f"{A}.ppo_epochs": 1, f"{R}.tensor_model_parallel_size": 2,
    f"{R}.gpu_memory_utilization": 0.5, f"{R}.max_num_seqs": 1024, f"{R}.max_num_batched_tokens": 8192,
    f"{R}.name": "vllm", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "algorithm.adv_estimator": "gae",
    f"{A}.strategy": "fsdp",
}  # fmt: skip
QUIET = re.compile(
    r"^(data\.(?!train_batch|max_)|reward_model\.(?!enable|model)|custom_reward|trainer\.(?!nnodes|n_gpus)|ray|critic\."
    r"(?!model\.path)|algorithm\.(?!adv|use_kl|filter)|global_profiler|hydra)"
    r"|\.(optim|checkpoint|profiler|val_kwargs|agent|trace|wrap_policy|override_config|engine_kwargs|kwargs)\."
    r"|(clip|coef|entropy|temperature|top_[kp]|lr|seed|shuffle|grad_norm|loss|path$|\.mode$|dtype|load_format|ignore_eos"
    r"|do_sample|log_prob_|use_torch_compile|use_liger|use_fused|trust|external|free_cache|chunked_prefill|disable_log"
    r"|prompt_length|response_length|swap_space|max_model_len|layered_summon|use_shm|update_weights|mbridge|dist_ckpt"
    r"|wandb|async_rollout|chat_)"
)


def read_verl(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sections of a job file, and what was not read."""
    path = Path(path)
    values = resolve_settings(read_settings(path))
    if not any(k.startswith(("actor_rollout_ref.", "data.", "algorithm.")) for k in values):
        raise InputError(
            path, "has none of verl's settings, such as data.train_batch_size or actor_rollout_ref.rollout.n"
        )
    get = Settings(values, path, DEFAULTS)
    _refuse(get)
    parallel, framework, notes = _trainer(get)
    rl, more = _step(get)
    model = model_section(get("actor_rollout_ref.model.path"))
    if not model:
        notes.append(f"model {get('actor_rollout_ref.model.path')} is not a preset: give [model] in the job file")
    checkpointed = get.flag("actor_rollout_ref.model.enable_gradient_checkpointing", default=True)
    micro = get.whole(f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size")
    training = {"recompute": "full" if checkpointed else "none", "micro_batch": micro or 1}
    sections = {"parallel": parallel, "framework": framework, "training": training, "rl": rl}
    return sections | ({"model": model} if model else {}), (*notes, *more, *get.unread(QUIET))


def _refuse(get: Settings) -> None:
    get.refuse(f"{R}.multi_turn.enable", "give one turn, with rl.response_lengths of all turns together")
    get.refuse(f"{R}.pipeline_model_parallel_size", f"use {R}.tensor_model_parallel_size")
    get.refuse("actor_rollout_ref.model.lora_rank", "full fine-tuning is: remove it")
    get.refuse("algorithm.filter_groups.enable", "multiply data.train_batch_size by the batches that a step samples")
    get.refuse(f"{R}.data_parallel_size", "replicas follow from the GPUs and tensor_model_parallel_size")
    if get(f"{R}.name") not in ("vllm", "sglang"):
        raise InputError(get.path, f"is {get(f'{R}.name')!r}, which is not modelled: use vllm or sglang", f"{R}.name")


def _trainer(get: Settings) -> tuple[dict[str, Any], str, list[str]]:
    """[parallel], the framework, notes."""
    gpus = (get.whole("trainer.nnodes") or 1) * (get.whole("trainer.n_gpus_per_node") or 1)
    strategy, notes = str(get(f"{A}.strategy")), list[str]()
    if strategy.startswith("megatron"):
        degrees = {k: get.whole(f"{A}.megatron.{name}") for k, name in LAYOUT.items()}
        virtual = get.whole(f"{A}.megatron.virtual_pipeline_model_parallel_size")
        return without_empty({**degrees, "virtual": virtual, "gpus": gpus, "zero": 1}), "megatron-core", notes
    if not strategy.startswith("fsdp"):
        raise InputError(
            get.path, f"is {strategy!r}, which is not modelled: use fsdp, fsdp2 or megatron", f"{A}.strategy"
        )
    ulysses = get.whole(f"{A}.ulysses_sequence_parallel_size") or 1
    if ulysses > 1:
        notes.append(f"Ulysses sequence parallelism over {ulysses} is taken as context parallelism")
    shard = get.whole(f"{A}.fsdp_config.fsdp_size") or -1
    return (
        without_empty({"fsdp": True, "gpus": gpus, "cp": ulysses, "shard": shard if shard > 0 else None}),
        "torchtitan-eager",
        notes,
    )


def _step(get: Settings) -> tuple[dict[str, Any], list[str]]:
    """[rl], and what is assumed in it."""
    samples = get.whole(f"{R}.n") or 1
    prompt = get.whole("data.max_prompt_length") or 1
    packed = get.flag(f"{A}.use_dynamic_bsz")
    unpadded = get.flag("actor_rollout_ref.model.use_remove_padding")
    offload = get.flag(f"{A}.fsdp_config.param_offload", f"{A}.megatron.param_offload")
    offload |= get.flag(f"{A}.fsdp_config.optimizer_offload", f"{A}.megatron.optimizer_offload")
    kl = get.flag(f"{A}.use_kl_loss"), get.flag("algorithm.use_kl_in_reward")
    apart_reference = get.flag(
        "actor_rollout_ref.ref.fsdp_config.param_offload", "actor_rollout_ref.ref.megatron.param_offload"
    )
    reward = get("reward_model.model.path") if get.flag("reward_model.enable") else None
    rl: dict[str, Any] = {
        "algorithm": str(get("algorithm.adv_estimator")),
        "prompts": get.whole("data.train_batch_size"),
        "samples": samples,
        "prompt_length": prompt / 2,
        "response_max": get.whole("data.max_response_length"),
        "mini_batch": (get.whole(f"{A}.ppo_mini_batch_size") or 1) * samples,
        "epochs": get.whole(f"{A}.ppo_epochs"),
        "packing": "packed" if packed else "unpadded" if unpadded else "padded",
        "microbatch_tokens": get.whole(f"{A}.ppo_max_token_len_per_gpu", default=16384) if packed else None,
        "reference": any(kl),
        "reference_offload": apart_reference or offload,
        "reward_model": model_section(reward).get("preset") if reward else None,
        "offload": offload,
        "engine": _engine(get),
    }
    apart = get.whole("rollout.n_gpus_per_node")
    if apart and not get.flag("actor_rollout_ref.hybrid_engine", default=True):
        rl["engine"]["gpus"] = apart * (get.whole("rollout.nnodes") or 1)
        rl |= {"placement": "disaggregated", "staleness": 1}
    return without_empty(rl), [
        f"prompts are taken to have {prompt / 2:g} tokens, half of the longest: rl.prompt_length"
    ]


def _engine(get: Settings) -> dict[str, Any]:
    kv = get(f"{R}.kv_cache_dtype", f"{R}.engine_kwargs.vllm.kv_cache_dtype")
    return without_empty(
        {
            "name": str(get(f"{R}.name")),
            "tp": get.whole(f"{R}.tensor_model_parallel_size"),
            "ep": get.whole(f"{R}.expert_parallel_size"),
            "max_num_seqs": get.whole(f"{R}.max_num_seqs"),
            "max_num_batched_tokens": get.whole(f"{R}.max_num_batched_tokens"),
            "gpu_memory_utilization": get.number(f"{R}.gpu_memory_utilization"),
            "enforce_eager": get.flag(f"{R}.enforce_eager"),
            "prefix_caching": get.flag(f"{R}.enable_prefix_caching", default=True),
            "precision": "fp8" if "fp8" in str(get(f"{R}.quantization")) else None,
            "kv_cache_precision": "fp8" if "fp8" in str(kv) else None,
        }
    )
