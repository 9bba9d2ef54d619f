"""What fills a GPU's memory, by the names its training software has for the parts."""

from __future__ import annotations

from collections.abc import Mapping

from presage.configs.job import Job
from presage.memory.activations import LayerActivations, layer_parts
from presage.memory.buffers import workspaces
from presage.memory.job_memory import JobMemory, layer_counts

ATTENTION = ("norm_out", "latent", "heads", "core", "out")
BLOCK = ("mlp_norm", "up", "act")
EXPERTS = ("router", "sorted", "expert_up", "expert_act")
PARTS = ("input", *LayerActivations._fields)
STREAM = tuple(name for name in PARTS if name not in (*ATTENTION, *BLOCK, *EXPERTS))

COMMON = {
    "weights": "parameters", "gradients": "gradients", "optimizer": "optimizer states", "attention": "self-attention",
    "block": "MLP", "experts": "experts", "stream": "layer inputs and norms", "ends": "embedding and final norm",
    "working": "working memory of a layer", "loss": "logits and cross entropy",
    "workspace": "cuBLAS workspaces", "buffers": "communication buffers and gathered parameters",
    "outside": "CUDA context and NCCL",
}  # fmt: skip
MEGATRON = {
    "weights": "parameters (param buffer)", "gradients": "gradients (main_grad buffer)",
    "optimizer": "optimizer states (main params, exp_avg, exp_avg_sq)", "attention": "self_attention", "block": "mlp",
    "experts": "moe_layer", "workspace": "cuBLAS and Transformer Engine workspaces",
}  # fmt: skip
TORCH = {
    "optimizer": "optimizer states (exp_avg, exp_avg_sq)", "attention": "self_attn", "block": "mlp",
    "buffers": "communication buffers, gathered parameters, optimizer's temporaries",
}  # fmt: skip
NAMES: Mapping[str, Mapping[str, str]] = {
    "megatron-core": COMMON | MEGATRON, "graph": COMMON | MEGATRON, "megatron-2021": COMMON | MEGATRON,
    "torch": COMMON | TORCH, "torch-gpt": COMMON | TORCH, "compiled": COMMON | TORCH,
    "deepspeed": COMMON | {"optimizer": "optimizer states (fp32 partitions, exp_avg, exp_avg_sq)"},
}  # fmt: skip


def memory_by_module(job: Job, found: JobMemory) -> dict[str, float]:
    """Bytes of the fullest stage at its worst moment, by name; they add up to what it needs."""
    stage, names = found.worst, NAMES[job.framework.host]
    out = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    out |= _activations(job, found)
    space = min(workspaces(job), stage.buffers)
    out |= {"working": stage.working, "loss": stage.loss, "workspace": space, "buffers": stage.buffers - space}
    out["outside"] = stage.outside
    held = {"attention", "block", "experts", "stream", "ends"}
    return {("activations: " if k in held else "") + names[k]: v for k, v in out.items() if v > 0}


def _activations(job: Job, found: JobMemory) -> dict[str, float]:
    """What is kept for backward passes, by module; layers of a pattern are not told apart."""
    stage, number = found.worst, found.stages.index(found.worst)
    if job.model.pattern or not stage.activations:
        return {"stream": stage.activations}
    times = float(job.rank_tokens) * stage.microbatches / job.parallel.virtual
    if job.framework.foreach and job.tuning.frozen and job.parallel.fsdp and stage.working:
        times *= 2  # with their gradients
    out = dict.fromkeys(("attention", "block", "experts", "stream"), 0.0)
    for count, experts in zip(layer_counts(job)[number], (False, True), strict=True):
        if count:
            parts = layer_parts(job, experts)
            for key, some in (("attention", ATTENTION), ("block", BLOCK), ("experts", EXPERTS), ("stream", STREAM)):
                out[key] += count * times * sum(parts.get(name, 0.0) for name in some)
    return out | {"ends": stage.activations - sum(out.values())}
