"""Flags: a change of a job in the words of its training software, as one would give it on a command line or in a file.

Sources: Megatron-LM's arguments.py, NeMo and Megatron-Bridge's model configs, TorchTitan's config files, Hugging Face's
TrainingArguments, DeepSpeed's configuration. Software without such words gets presage's own keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from presage.configs.job import Job

MEGATRON = {
    "tp": "--tensor-model-parallel-size {}", "sequence_parallel": "--sequence-parallel",
    "pp": "--pipeline-model-parallel-size {}", "virtual": "--num-virtual-stages-per-pipeline-rank {}",
    "cp": "--context-parallel-size {}", "ep": "--expert-model-parallel-size {}",
    "expert_tp": "--expert-tensor-parallel-size {}", "micro_batch": "--micro-batch-size {}",
    "zero1": "--use-distributed-optimizer",
    "zero2": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    "zero3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective --recompute-modules {}",
    "fused_loss": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "attention": "--attention-backend flash",
    "shard": "--num-distributed-optimizer-instances 1",
}  # fmt: skip
NEMO = {
    "tp": "tensor_model_parallel_size={}", "sequence_parallel": "sequence_parallel=true",
    "pp": "pipeline_model_parallel_size={}", "virtual": "virtual_pipeline_model_parallel_size={}",
    "cp": "context_parallel_size={}", "ep": "expert_model_parallel_size={}",
    "expert_tp": "expert_tensor_parallel_size={}", "micro_batch": "micro_batch_size={}",
    "zero1": "use_distributed_optimizer=true", "zero2": "data_parallel_sharding_strategy=optim_grads",
    "zero3": "data_parallel_sharding_strategy=optim_grads_params",
    "full": "recompute_granularity=full recompute_method=uniform recompute_num_layers=1",
    "selective": "recompute_granularity=selective recompute_modules=[{}]",
    "fused_loss": "cross_entropy_loss_fusion=true cross_entropy_fusion_impl=te", "attention": "attention_backend=flash",
    "shard": "num_distributed_optimizer_instances=1",
}  # fmt: skip
OLD_MEGATRON = MEGATRON | {"full": "--checkpoint-activations", "attention": "--use-flash-attn"}
MEGATRON_DEEPSPEED = OLD_MEGATRON | {f"zero{i}": f"--zero-stage {i}" for i in (1, 2, 3)}
TITAN = {
    "sequence_parallel": "",  # goes with the former
    "tp": "--parallelism.tensor_parallel_degree {}", "pp": "--parallelism.pipeline_parallel_degree {}",
    "cp": "--parallelism.context_parallel_degree {}", "ep": "--parallelism.expert_parallel_degree {}",
    "expert_tp": "--parallelism.expert_tensor_parallel_degree {}", "micro_batch": "--training.local_batch_size {}",
    "zero3": "--parallelism.data_parallel_shard_degree -1", "shard": "--parallelism.data_parallel_shard_degree -1",
    "full": "--activation_checkpoint.mode full", "selective": "--activation_checkpoint.mode selective",
}  # fmt: skip
TRAINER = {
    "micro_batch": "per_device_train_batch_size={}", "zero2": 'fsdp="shard_grad_op auto_wrap"',
    "zero3": 'fsdp="full_shard auto_wrap"', "full": "gradient_checkpointing=True",
    "fused_loss": "use_liger_kernel=True",
    "attention": 'attn_implementation="flash_attention_2"', "tp": "tp_size={}", "cp": "cp_size={}",
}  # fmt: skip
DEEPSPEED = TRAINER | {f"zero{i}": f"zero_optimization.stage={i}" for i in (1, 2, 3)}
DEEPSPEED |= {"micro_batch": "train_micro_batch_size_per_gpu={}"}
PRESAGE = {
    **{name: f"parallel.{name}={{}}" for name in ("tp", "pp", "virtual", "cp", "ep", "expert_tp")},
    **{f"zero{i}": f"parallel.zero={i}" for i in (1, 2, 3)}, "sequence_parallel": "parallel.sequence_parallel=true",
    "shard": "parallel.shard={}", "micro_batch": "training.micro_batch={}", "full": "training.recompute=full",
    "selective": "training.recompute=selective:{}", "fused_loss": "framework.fused_loss=true",
    "attention": "framework.attention=flash2",
}  # fmt: skip
SOFTWARE: dict[str, dict[str, str]] = {
    "megatron-core": MEGATRON, "megatron-2021": OLD_MEGATRON, "megatron-deepspeed": MEGATRON_DEEPSPEED, "nemo": NEMO,
    "torchtitan": TITAN, "torchtitan-eager": TITAN, "hf-trainer": TRAINER, "hf-fused": TRAINER,
    "hf-accelerate": TRAINER, "deepspeed": DEEPSPEED,
}  # fmt: skip
ALIKE = {"norm": "layernorm"}  # modules that Megatron calls otherwise


DEGREES = ("tp", "pp", "virtual", "cp", "ep", "expert_tp")


def change_flags(before: Job, after: Job) -> str:
    """What to say to the job's software for one job to become the other."""
    words = PRESAGE | SOFTWARE.get(before.framework.key, {})
    said = (words[key].format(_value(key, after)) for key in _keys(before, after))
    return " ".join(text for text in said if text)


def _keys(before: Job, after: Job) -> Iterator[str]:
    """Keys of the words above for what differs."""
    p, q = before.parallel, after.parallel
    yield from (key for key in DEGREES if getattr(p, key) != getattr(q, key))
    if after.micro_batch != before.micro_batch:
        yield "micro_batch"
    if q.sequence_parallel and not p.sequence_parallel:
        yield "sequence_parallel"
    if q.zero > p.zero:
        yield f"zero{q.zero}"
    if q.shard != p.shard:
        yield "shard"
    if after.recompute != before.recompute and after.recompute.mode != "none":
        yield after.recompute.mode
    f, g = before.framework, after.framework
    if (g.fused_loss, g.logit_bytes) != (f.fused_loss, f.logit_bytes):
        yield "fused_loss"
    if g.attention != f.attention:
        yield "attention"


def _value(key: str, job: Job) -> object:
    if key == "selective":
        named = job.framework.key in ("megatron-core", "nemo")
        return " ".join(ALIKE.get(m, m) if named else m for m in job.recompute.modules or ("core_attn",))
    return job.micro_batch if key == "micro_batch" else getattr(job.parallel, key, "")
