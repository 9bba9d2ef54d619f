"""Arguments of Megatron-LM, Megatron-DeepSpeed and NeMo as the sections of a job file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from presage.configs.given_arguments import QUIET, argument_flag
from presage.configs.given_arguments import GivenArguments as _Given
from presage.configs.megatron_layers import check_refused, hybrid_model, recipe
from presage.configs.models import find_preset
from presage.configs.script_arguments import Arguments, expert_layers, pipeline_layout, read_script

Table = dict[str, Any]
VOCABULARIES = {"gpt2bpetokenizer": 50257, "bertwordpiecelowercase": 30522, "llama2tokenizer": 32000}
GPUS = ("nproc_per_node", "gpus_per_node", "devices")
NODES = ("nnodes", "num_nodes", "nodes")
SET_GPUS = ("GPUS_PER_NODE", "NPROC_PER_NODE", "GPN", "SLURM_GPUS_ON_NODE")
SET_NODES = ("NNODES", "NUM_NODES", "NODES", "SLURM_NNODES")
NATIVE_LOSS, PLAIN_LOSS = 10, 6  # bytes a logit: in 16 bits, in fp32, and (native) their exponentials beside
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_arguments(path: str | Path) -> tuple[Table, tuple[str, ...]]:
    """The sections of a job file, and the arguments that were not read."""
    arguments, variables, unsure = read_script(path)
    sections, notes = arguments_sections(arguments, variables, path)
    taken = [f"{argument_flag(a)} ({v})" for a, v in unsure.items() if not QUIET.match(a)]
    return sections, (*notes, f"set more than once, the last taken: {', '.join(taken)}") if taken else notes


def arguments_sections(
    arguments: Arguments, variables: dict[str, str] | None = None, path: str | Path = "arguments"
) -> tuple[Table, tuple[str, ...]]:
    a = _Given(arguments, path)
    check_refused(a)
    model = _model(a)
    parallel = _parallel(a, model, variables or {})
    sections = {
        "model": model,
        "training": _training(a, model, parallel),
        "parallel": parallel,
        "overlap": _overlap(a, parallel),
        "framework": _framework(a),
    }
    return {k: v for k, v in sections.items() if v}, a.notes()


# ---- the model


def _model(a: _Given) -> Table:
    out: Table = {
        "layers": a.whole("num_layers", "encoder_num_layers"),
        "hidden": a.whole("hidden_size"),
        "heads": a.whole("num_attention_heads"),
        "ffn": a.whole("ffn_hidden_size"),
        "head_dim": a.whole("kv_channels"),
        "vocab": _vocab(a),
        "predicted": a.whole("mtp_num_layers"),
    }
    groups = a.whole("num_query_groups", "num_key_value_heads")
    if (a.flag("group_query_attention") or "group_query_attention" not in a.found) and groups:
        out["kv_heads"] = groups
    out |= _style(a) | _window(a) | hybrid_model(a)
    if a.flag("multi_latent_attention"):
        out["latent"] = _latent(a)
    if (a.whole("num_experts", "num_moe_experts") or 1) > 1:
        out["experts"] = _experts(a, out["layers"])
        if "pattern" in out:
            out["experts"] = {k: v for k, v in out["experts"].items() if k not in ("dense_layers", "every")}
    return {k: v for k, v in out.items() if v is not None} if out["layers"] else {}


def _vocab(a: _Given) -> int | None:
    given = a.whole("padded_vocab_size", "vocab_size", "pad_vocab_size_to", "override_vocab_size")
    kind = a.text("tokenizer_type", "type") or ("gpt2bpetokenizer" if "merge_file" in a else "")
    like = find_preset(kind)  # tokenizers go by the names of models
    return given or VOCABULARIES.get(kind.lower()) or (like.vocab if like else None)


def _style(a: _Given) -> Table:
    positions = a.text("position_embedding_type") or "learned_absolute"
    rope = a.flag("use_rotary_position_embeddings") or "rope" in positions or "yarn" in positions
    learned = not rope and "learned" in positions
    norm = (a.text("normalization") or "LayerNorm").lower()
    out: Table = {
        "activation": _activation(a),
        "norm": "rmsnorm" if "rmsnorm" in norm else "layernorm",
        "bias": not (a.flag("disable_bias_linear") or a.off("bias")),
        "tied": not (a.flag("untie_embeddings_and_output_weights") or a.off("share_embeddings_and_output_weights")),
        "positions": "rope" if rope else "learned" if learned else "none",
    }
    if learned:
        out["max_positions"] = a.whole("max_position_embeddings")
    else:
        a.whole("max_position_embeddings")
    return out


def _activation(a: _Given) -> str:
    named = (a.text("activation", "activation_func") or "").lower()
    if a.flag("swiglu") or "swiglu" in named:
        return "swiglu"
    if a.flag("quick_geglu", "geglu") or "geglu" in named:
        return "geglu"
    return "relu2" if a.flag("squared_relu") or "squared" in named else "gelu"


def _window(a: _Given) -> Table:
    """--window-size 127,0: that many tokens back; --window-attn-skip-freq 2: in every layer but each second."""
    width = a.several("window_size")
    numbers = re.findall(r"-?\d+", " ".join(width))
    if not numbers or int(numbers[0]) < 0:
        return {}
    skip = a.whole("window_attn_skip_freq")
    return {"window": int(numbers[0]) + 1, "window_every": 2 if skip == 2 else 1}


def _latent(a: _Given) -> Table:
    return {
        "query_rank": a.whole("q_lora_rank") or 0,
        "key_rank": a.whole("kv_lora_rank") or 512,
        "nope": a.whole("qk_head_dim") or 128,
        "rope": a.whole("qk_pos_emb_head_dim") or 64,
        "value": a.whole("v_head_dim") or 128,
    }


def _experts(a: _Given, layers: int | None) -> Table:
    out: Table = {
        "experts": a.whole("num_experts", "num_moe_experts"),
        "top_k": a.whole("moe_router_topk", "topk") or 2,
        "ffn": a.whole("moe_ffn_hidden_size"),
        "shared_ffn": a.whole("moe_shared_expert_intermediate_size"),
        "capacity": a.number("moe_expert_capacity_factor"),
        "groups": a.whole("moe_router_num_groups"),
        "group_top_k": a.whole("moe_router_group_topk"),
        "latent": a.whole("moe_latent_size"),
    }
    pattern = " ".join(a.several("moe_layer_freq"))
    if pattern:
        out["dense_layers"], out["every"] = expert_layers(pattern, layers or 1, a.path)
    return {k: v for k, v in out.items() if v is not None and v != -1}


# ---- how it is trained


def _training(a: _Given, model: Table, parallel: Table) -> Table:
    out = {
        "sequence": a.whole("seq_length", "encoder_seq_length", "sequence_length"),
        "micro_batch": a.whole("micro_batch_size", "batch_size"),
        "global_batch": a.whole("global_batch_size"),
        "precision": _precision(a),
        "optimizer": a.text("optimizer"),
        "recompute": _recompute(a, model, parallel),
    }
    return {k: v for k, v in out.items() if v is not None} | recipe(a)


def _precision(a: _Given) -> str:
    if "fp4_format" in a:
        return "nvfp4"
    bf16, fp16 = a.flag("bf16"), a.flag("fp16")
    named = (a.text("precision") or "").lower()
    if a.flag("fp8_format", "fp8") or (a.flag("fp8_hybrid", "fp8_e4m3") and "fp8" not in a):
        return "mxfp8" if (a.text("fp8_recipe") or "") == "mxfp8" else "fp8"
    if bf16 or "bf16" in named:
        return "bf16"
    return "fp16" if fp16 or named.startswith("16") else "fp32"


def _recompute(a: _Given, model: Table, parallel: Table) -> str | Table:
    kind = a.text("recompute_granularity", "activations_checkpoint_granularity")
    old = a.flag("checkpoint_activations", "deepspeed_activation_checkpointing") or "activations_checkpoint_method" in a
    method = a.text("recompute_method", "activations_checkpoint_method") or "uniform"
    count = a.whole("recompute_num_layers", "activations_checkpoint_num_layers", "checkpoint_num_layers") or 1
    modules = [*a.several("recompute_modules"), *(["moe"] if a.flag("moe_layer_recompute") else [])]
    if kind == "full" or (kind is None and old):
        stage = (model.get("layers") or 1) / (parallel.get("pp", 1) * parallel.get("virtual", 1))
        return {"mode": "full", "share": min(1.0, count / stage) if method == "block" else 1.0}
    away = a.whole("cpu_offloading_num_layers") if a.flag("cpu_offloading") else None
    if away:
        share = away / max(1.0, (model.get("layers") or 1) / parallel.get("pp", 1))
        return {"mode": "none", "offload": min(1.0, share)}
    if kind == "selective" or a.flag("recompute_activations") or modules:
        return "selective:" + "+".join(modules) if modules else "selective"
    return "none"


# ---- how it is spread


def _parallel(a: _Given, model: Table, variables: dict[str, str]) -> Table:
    tp = a.whole("tensor_model_parallel_size", "model_parallel_size") or 1
    pp = a.whole("pipeline_model_parallel_size", "pipe_parallel_size") or 1
    out: Table = {"tp": tp, "pp": pp, "cp": a.whole("context_parallel_size") or 1}
    out["sequence_parallel"] = a.flag("sequence_parallel") and tp > 1
    out["ep"] = a.whole("expert_model_parallel_size") or 1
    if "experts" in model:
        out["expert_tp"] = a.whole("expert_tensor_parallel_size") or (1 if "expert_tensor_parallel_size" in a else tp)
    out |= _stages(a, model, pp) | _sharding(a)
    gpus = _gpus(a, variables)
    return out | ({"gpus": gpus} if gpus else {})


def _gpus(a: _Given, variables: dict[str, str]) -> int | None:
    """GPUs per node times nodes, from the launcher's arguments or variables of the usual names."""
    world = a.whole("world_size")
    if world:
        return world

    def given(arguments: tuple[str, ...], names: tuple[str, ...]) -> int | None:
        values = [a.found[n][-1][0] for n in arguments if n in a and a.found[n][-1]]
        values += [variables[n] for n in names if n in variables]
        return next((int(v) for v in values if v.isdecimal() and len(v) < 16), None)

    each, nodes = given(GPUS, SET_GPUS), given(NODES, SET_NODES)
    return each * nodes if each and nodes else None


def _stages(a: _Given, model: Table, pp: int) -> Table:
    """Virtual stages, and how layers are assigned to stages."""
    layers = model.get("layers") or 0
    each = a.whole("num_layers_per_virtual_pipeline_stage")
    chunks = a.whole("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    out: Table = {}
    layout = a.text("pipeline_model_parallel_layout")
    ends = a.flag("account_for_embedding_in_pipeline_split"), a.flag("account_for_loss_in_pipeline_split")
    kinds = "transformer|embedding" in (a.text("pp_partition_method") or "")
    if pp == 1:
        return out
    total = layers + sum(ends)
    if each and total:
        chunks = max(1, total // (pp * each))
    if layout:
        out["layers_as"] = pipeline_layout(layout, a.path)
        chunks = len(out["layers_as"]) // pp
    elif all(ends) or kinds:
        out["ends_as_layers"] = True
    first, last = (a.whole(f"decoder_{w}_pipeline_num_layers") for w in ("first", "last"))
    if layers and (first is not None or last is not None or sum(ends) == 1):
        edge = (first, last) if sum(ends) != 1 else (_one_end(total, pp, ends[0]), _one_end(total, pp, ends[1]))
        out["layers_as"] = _uneven(layers, pp, chunks or 1, *edge)
    out["virtual"] = chunks or 1
    if a.flag("enable_zero_bubble", "zero_bubble"):
        out["schedule"] = "zero-bubble"
    return out


def _one_end(total: int, pp: int, counts: bool) -> int | None:
    """Layers of a stage where the embedding, or the head, takes one's place."""
    return total // pp - 1 if counts else None


def _uneven(layers: int, pp: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    """Layers by chunk and stage, the first and the last stage with numbers of their own."""
    free = pp - (first is not None) - (last is not None)
    rest = (layers - (first or 0) - (last or 0)) // max(1, free)
    stages = [first if first is not None else rest, *[rest] * (pp - 2), last if last is not None else rest]
    return [n // chunks for _ in range(chunks) for n in stages]


def _sharding(a: _Given) -> Table:
    stage = a.whole("zero_stage")
    fsdp = a.flag("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "fsdp")
    strategy = a.text("data_parallel_sharding_strategy")
    distributed = a.flag("use_distributed_optimizer") or a.any("name", "distributed")  # NeMo's optim.name
    if fsdp:
        zero = SHARDING.get(strategy or "", 3)
        return {"fsdp": zero >= 2, "zero": zero}
    out: Table = {"zero": stage if stage is not None else 1 if distributed else 0}
    if stage == 0 and a.flag("bf16") and a.flag("deepspeed"):
        out["zero"] = 1  # DeepSpeed's bf16 optimizer shards its state by itself
    copies = a.whole("num_distributed_optimizer_instances")
    return out | ({"replicate": copies} if copies and copies > 1 else {})


def _overlap(a: _Given, parallel: Table) -> Table:
    chunks = parallel.get("virtual", 1) > 1
    return {
        "tensor": a.flag("tp_comm_overlap", "ub_tp_comm_overlap"),
        "gradients": a.flag("overlap_grad_reduce", "overlap_grad_sync"),
        "parameters": a.flag("overlap_param_gather", "overlap_param_sync"),
        "pipeline": not (a.flag("no_overlap_p2p_communication") or a.off("overlap_p2p_comm")) and chunks,
        "experts": a.flag("overlap_moe_expert_parallel_comm"),
        "shared_experts": a.flag("moe_shared_expert_overlap"),
        "weight_gradients": a.flag("delay_wgrad_compute"),
    }


# ---- the software


def _framework(a: _Given) -> Table:
    out: Table = {"name": _software(a)}
    flash = a.flag("use_flash_attn", "use_flash_attn_v2")
    if a.text("transformer_impl") == "local" and out["name"] == "megatron-core":
        out["attention"] = "fused-softmax"
    elif a.text("attention_backend") in ("unfused", "local") and not flash:
        out["attention"] = "unfused"
    elif flash and out["name"] != "megatron-core":
        out["attention"] = "flash2"
    out["dropout"] = any(
        (0.1 if (v := a.number(n)) is None else v) > 0 for n in ("attention_dropout", "hidden_dropout")
    )
    if a.flag("grad_reduce_in_bf16") or a.any("grad_sync_dtype", "bf16") or a.off("grad_reduce_in_fp32"):
        out |= {"gradient_bytes": 2, "reduce_bytes": 2}
    elif a.flag("accumulate_allreduce_grads_in_fp32", "bf16"):
        out |= {"gradient_bytes": 4, "reduce_bytes": 4}
    elif a.flag("fp16"):
        out |= {"gradient_bytes": 2, "reduce_bytes": 2}
    if a.flag("fp8_param_gather", "fp8_params"):
        out["gather_bytes"] = 1
    out |= _loss(a) | _extras(a, out["name"])
    if a.flag("enable_cuda_graph", "external_cuda_graph") or a.text("cuda_graph_impl") not in (None, "none"):
        scope = [part for part in a.several("cuda_graph_scope") if part not in ("full", "full_iteration")]
        out |= {"graphs": scope} if scope else {"host": "graph"}
    kind, backend = a.text("moe_token_dispatcher_type"), a.text("moe_flex_dispatcher_backend")
    name = backend or "deepep" if kind == "flex" or a.flag("moe_enable_deepep") else kind
    out |= {"dispatcher": name} if name else {}
    elements = a.number("ddp_bucket_size")
    return out | ({"bucket_MB": elements * out.get("gradient_bytes", 4) / 1e6} if elements else {})


def _loss(a: _Given) -> Table:
    """Its own fused cross entropy (native) computes in fp32 beside the logits; Transformer Engine's (te) in place."""
    fused = a.flag("cross_entropy_loss_fusion")
    native = (a.text("cross_entropy_fusion_impl") or "native") == "native"
    kept = 2 * (a.whole("wgrad_deferral_limit") or 0) if a.flag("defer_embedding_wgrad_compute") else 0
    size = NATIVE_LOSS if fused and native else PLAIN_LOSS if kept else 0
    return {"fused_loss": fused} | ({"logit_bytes": size + kept} if size else {})


def _extras(a: _Given, software: str) -> Table:
    """What of Megatron-Core takes memory alone: gradients in the weights' precision, masks, an expert at a time."""
    if software != "megatron-core":
        return {}
    return {
        "fused_accumulation": not a.flag("no_gradient_accumulation_fusion"),
        "attention_masks": not a.flag("no_create_attention_mask_in_dataloader"),
        "grouped_experts": a.flag("moe_grouped_gemm"),
    }


def _software(a: _Given) -> str:
    if "deepspeed_config" in a or a.flag("deepspeed") or "zero_stage" in a:
        return "megatron-deepspeed"
    old = a.text("transformer_impl") == "local" and not a.flag("use_mcore_models")
    if "DDP_impl" in a or "checkpoint_activations" in a.found or old:
        return "megatron-2021"
    return "megatron-core"
