"""NeMo-RL's recipes (grpo.*, policy.*, loss_fn.*, cluster.*) as the sections of a job file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from presage.configs.models import preset
from presage.configs.rl_settings import LAYOUT, Settings, model_section, without_empty
from presage.configs.script_arguments import read_settings, resolve_settings
from presage.errors import InputError

P, M, D, V = "policy", "policy.megatron_cfg", "policy.dtensor_cfg", "policy.generation.vllm_cfg"
# NeMo-RL's own defaults (examples/configs/grpo_math_1B.yaml), where the file that a recipe builds on is not there.
DEFAULTS = {
    "grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, f"{P}.train_global_batch_size": 512,
    f"{P}.train_micro_batch_size": 4, f"{P}.max_total_sequence_length": 512, f"{P}.precision": "bfloat16",
    f"{P}.sequence_packing.enabled": True, "loss_fn.reference_policy_kl_penalty": 0.01,
    f"{V}.gpu_memory_utilization": 0.6, f"{V}.tensor_parallel_size": 1, f"{P}.generation.backend": "vllm",
    f"{P}.generation.colocated.enabled": True, "cluster.num_nodes": 1, "cluster.gpus_per_node": 1,
}  # fmt: skip
MEGATRON = {"name": "megatron-core", "gradient_bytes": 2, "reduce_bytes": 2}  # grad_reduce_in_fp32: false
DEEPEST = 8  # recipes that build on recipes
QUIET = re.compile(
    r"^(checkpointing|logger|data|env|defaults)\b|^grpo\.(val_|max_|normalize|use_leave|overlong|seed|seq_logprob|adv)"
    r"|^loss_fn\.(?!reference_policy|force)|\.(optimizer|scheduler|tokenizer|env_vars|hf_config|draft|lora_cfg)(\.|$)"
    r"|(temperature|top_[kp]|stop_|lr|converter_type|empty_unused|moe_|freeze|apply_rope|defer_fp32|bias_activation"
    r"|logprob_|divisible|max_grad|generation_batch_size|_v2|custom_parallel|clear_cache|distributed_data|use_gloo"
    r"|recipe|pipeline_dtype|layernorm_epsilon|skip_|load_format|deep_gemm|in_bf16|async_engine|max_model_len|importance"
    r"|sequence_length_round|algorithm$|max_new_tokens|recompute_kv|fp8_cfg|peft|track|refit|gradient_acc|_mb_tokens)"
)


def read_nemo_rl(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sections of a job file, and what was not read."""
    path = Path(path)
    values, notes = _inherited(path, DEEPEST)
    if not any(k.startswith(("policy.", "grpo.")) for k in values):
        raise InputError(path, "has none of NeMo-RL's settings, such as grpo.num_prompts_per_step or policy.model_name")
    get = Settings(resolve_settings(values), path, DEFAULTS)
    _refuse(get)
    gpus, engine_gpus = _gpus(get)
    model = model_section(get(f"{P}.model_name"))
    if not model:
        notes.append(f"model {get(f'{P}.model_name')} is not a preset: give [model] in the job file")
    megatron, _ = get.flag(f"{M}.enabled"), get.flag(f"{D}.enabled")
    parallel = (_megatron(get, model) if megatron else _dtensor(get)) | {"gpus": gpus}
    checkpointed = get.flag(f"{M if megatron else D}.activation_checkpointing")
    micro = get.whole(f"{P}.train_micro_batch_size") or 1
    sections = {
        "parallel": parallel,
        "framework": MEGATRON if megatron else "torchtitan-eager",
        "overlap": {"gradients": True, "parameters": True} if megatron else {},
        "training": {
            "recompute": "full" if checkpointed else "none", "micro_batch": micro,
            "sequence": get.whole(f"{P}.max_total_sequence_length"),
        },
        "rl": _step(get, engine_gpus),
    }  # fmt: skip
    return sections | ({"model": model} if model else {}), (*notes, *get.unread(QUIET))


def _inherited(path: Path, deepest: int) -> tuple[dict[str, Any], list[str]]:
    """A recipe's settings over those of the files it builds on, as far as they are there."""
    own, notes = read_settings(path), list[str]()
    bases = own.get("defaults", [])
    out: dict[str, Any] = {}
    for name in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []:
        base = path.parent / str(name)
        if base.is_file() and deepest:
            found, more = _inherited(base, deepest - 1)
            out, notes = out | found, notes + more
        else:
            notes.append(f"{name}, which {path.name} builds on, is not there: NeMo-RL's own defaults are taken")
    return out | own, notes


def _refuse(get: Settings) -> None:
    get.refuse("grpo.use_dynamic_sampling", "multiply grpo.num_prompts_per_step by the batches that a step samples")
    get.refuse("grpo.max_rollout_turns", "give one turn, with rl.response_lengths of all turns together")
    for name in (f"{M}.fp8_cfg.enabled", f"{M}.peft.enabled", f"{D}.lora_cfg.enabled"):
        get.refuse(name, "full training in bf16 is: switch it off")
    get.refuse(f"{V}.pipeline_parallel_size", f"use {V}.tensor_parallel_size")
    get.refuse(f"{P}.generation.vllm_kwargs.speculative_config.num_speculative_tokens", "decode without a draft model")
    backend = get(f"{P}.generation.backend")
    if backend not in ("vllm", "sglang"):
        raise InputError(get.path, f"is {backend!r}, which is not modelled: use vllm", f"{P}.generation.backend")


def _gpus(get: Settings) -> tuple[int, int | None]:
    """GPUs of the trainer, and of an engine with its own."""
    nodes, each = get.whole("cluster.num_nodes") or 1, get.whole("cluster.gpus_per_node") or 1
    if get.flag(f"{P}.generation.colocated.enabled", default=True):
        return nodes * each, None
    resources = f"{P}.generation.colocated.resources"
    apart = (get.whole(f"{resources}.num_nodes") or 1) * (get.whole(f"{resources}.gpus_per_node") or each)
    if apart >= nodes * each:
        raise InputError(get.path, f"leaves the trainer none of {nodes * each} GPUs", f"{resources}.num_nodes")
    return nodes * each - apart, apart


def _megatron(get: Settings, model: dict[str, Any]) -> dict[str, Any]:
    degrees = {k: get.whole(f"{M}.{name}") for k, name in LAYOUT.items()}
    ends = [get.whole(f"{M}.num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    pp = degrees["pp"] or 1
    out = without_empty({**degrees, "sequence_parallel": get(f"{M}.sequence_parallel"), "zero": 1})
    if any(ends) and pp > 2 and model:
        first, last = (e or 0 for e in ends)
        rest, inner = preset(model["preset"]).layers - first - last, pp - 2
        out["layers_as"] = [first, *(rest // inner + (i < rest % inner) for i in range(inner)), last]
    return out


def _dtensor(get: Settings) -> dict[str, Any]:
    names = {"tp": "tensor_parallel_size", "cp": "context_parallel_size"}
    return without_empty({k: get.whole(f"{D}.{name}") for k, name in names.items()} | {"fsdp": True})


def _step(get: Settings, engine_gpus: int | None) -> dict[str, Any]:
    """[rl]."""
    longest = get.whole(f"{P}.max_total_sequence_length") or 1
    packed = get.flag(f"{P}.sequence_packing.enabled", f"{P}.dynamic_batching.enabled")
    stale = get.whole("grpo.async_grpo.max_trajectory_age_steps", default=1)
    micro = get.whole(f"{P}.train_micro_batch_size") or 1
    prompts, samples = get.whole("grpo.num_prompts_per_step") or 1, get.whole("grpo.num_generations_per_prompt") or 1
    rl = {
        "algorithm": "grpo",
        "prompts": prompts,
        "samples": samples,
        "response_max": get.whole(f"{P}.generation.max_new_tokens", default=longest),
        "mini_batch": min(get.whole(f"{P}.train_global_batch_size") or 1, prompts * samples),
        "packing": "packed" if packed else "padded",
        "microbatch_tokens": get.whole(f"{P}.sequence_packing.train_mb_tokens", default=longest * micro),
        "old_log_probs": not get.flag("loss_fn.force_on_policy_ratio"),
        "reference": bool(get.number("loss_fn.reference_policy_kl_penalty")),
        "placement": "disaggregated" if engine_gpus else "colocated",
        "staleness": stale if get.flag("grpo.async_grpo.enabled") else 0,
        "in_flight": get.flag("grpo.async_grpo.in_flight_weight_updates") and get.flag("grpo.async_grpo.enabled"),
        "engine": _engine(get, engine_gpus),
    }
    return without_empty(rl)


def _engine(get: Settings, gpus: int | None) -> dict[str, Any]:
    return without_empty(
        {
            "name": str(get(f"{P}.generation.backend")),
            "gpus": gpus,
            "tp": get.whole(f"{V}.tensor_parallel_size"),
            "ep": get.whole(f"{V}.expert_parallel_size"),
            "gpu_memory_utilization": get.number(f"{V}.gpu_memory_utilization"),
            "max_num_seqs": get.whole(f"{P}.generation.vllm_kwargs.max_num_seqs"),
            "enforce_eager": get.flag(f"{V}.enforce_eager"),
            "precision": "fp8" if "fp8" in str(get(f"{V}.precision")) else None,
            "kv_cache_precision": "fp8" if "fp8" in str(get(f"{V}.kv_cache_dtype")) else None,
        }
    )
