"""Reference values of Megatron-LM's functional tests: each row's flags as a Job, and the bytes its allocator counted.

A row tells of the last rank, so of the last pipeline stage: the peak of PyTorch's allocator since the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from presage.configs.frameworks import generation
from presage.configs.job import Job
from presage.configs.job_file import job_from_sections
from presage.configs.megatron import arguments_sections
from presage.configs.script_arguments import Arguments
from presage.errors import PresageError
from presage.hardware.names import gpu_by_name
from presage.memory import job_memory
from presage.memory.job_memory import StageMemory
from presage_validation.public_table import count, number

GOLDEN_COLUMNS = ("suite", "case", "config", "env", "gpu", "n_gpus", "mem_max_allocated_bytes", "golden_date")
MIB = 1024 * 1024
VOCABULARIES = {"nemotron_2_256k": 256000, "Llama2Tokenizer": 32000, "GPT2 BPE": 50257, "vocab.txt": 28996}
NULL_TOKENIZER = "NullTokenizer"  # whose end of a document is one more than it says
# TransformerEngine picks FlashAttention-2 where cuDNN's attention has no deterministic backward pass: everywhere but on
# Hopper. FlashAttention has had one since 2.4.1, which the older container got in November 2025.
OLD_CONTAINER, RENEWED = "lts", "2025-11"
WORKSPACE = {":4096:8": 32 * MIB}  # CUBLAS_WORKSPACE_CONFIG: so many KiB, so many times
REFUSED = {
    "fine-grained-activation-offloading": "activations offloaded by module",
    "flextron": "elastic layers (flextron)",
    "microbatch-group-size-per-virtual-pipeline-stage": "another number of microbatches a virtual stage than of stages",
    "perform-rl-step": "a reinforcement-learning step with a decoding engine",
    "encoder-num-layers": "an encoder beside the decoder (T5)",
    "img-h": "a vision encoder before the decoder",
    "model-provider": "a vision encoder before the decoder",
}
OF_TIME = ("cp-comm-type",)  # flags that a reader may refuse, but change no bytes
MOST_GPUS = 1 << 20  # where the number is not known yet


def golden_job(row: Mapping[str, str], gpus: int = 0) -> Job:
    """The job a row tells of; `gpus` where it does not say how many."""
    flags = _flags(row)
    sections, _ = arguments_sections(_arguments(flags), path=row["case"])
    if "model" not in sections:
        raise PresageError("its flags do not say how many layers there are")
    parallel, model = sections["parallel"], sections["model"]
    parallel["gpus"] = gpus or count(row, "n_gpus")
    model["vocab"] = _vocabulary(row, flags, parallel["tp"])
    if not row["gpu"]:
        raise PresageError("its GPU is not stated")
    chip = gpu_by_name(row["gpu"])
    sections["cluster"] = {"gpu": chip.key}
    chosen = _attention(row, flags, generation(chip))
    sections["framework"] |= {"attention": chosen} if chosen else {}
    job, _ = job_from_sections(sections, row["case"])
    said = json.loads(row["env"] or "{}").get("CUBLAS_WORKSPACE_CONFIG")
    size = WORKSPACE.get(said or "", chip.cublas_workspace)
    return replace(job, platform=replace(job.platform, gpu=replace(job.platform.gpu, cublas_workspace=size)))


def _flags(row: Mapping[str, str]) -> dict[str, Any]:
    """Launch flags; raises for those that make another job than a decoder's or an encoder's training."""
    flags: dict[str, Any] = json.loads(row["config"])
    for name, what in REFUSED.items():
        if flags.get(name):
            raise PresageError(f"not modelled: {what}")
    if flags.get("fp8-format") and not (flags.get("bf16") or flags.get("fp16")):
        raise PresageError("not modelled: fp8 products of weights and activations in fp32")
    return flags


def _arguments(flags: Mapping[str, Any]) -> Arguments:
    """Flags as a script gives them. Models of Megatron-Core have been the default since before these tests."""
    out: Arguments = {"use_mcore_models": [[]]}
    for name, value in flags.items():
        if value is not False and name not in OF_TIME:
            words = [] if value is True else str(value).replace("\\", "").strip("[]").split()
            out[name.replace("-", "_")] = [words]
    return out


def _vocabulary(row: Mapping[str, str], flags: Mapping[str, Any], tp: int) -> int:
    """Rows of the embedding: as stated, or the tokenizer's, padded."""
    if number(row, "vocab_padded"):
        return count(row, "vocab_padded")
    tokenizer = row["tokenizer"]
    size = next((n for name, n in VOCABULARIES.items() if name in tokenizer), 0)
    if tokenizer == NULL_TOKENIZER and flags.get("vocab-size"):
        size = int(flags["vocab-size"]) + 1
    if not size:
        raise PresageError(f"the vocabulary of {tokenizer or 'its tokenizer'} is not known")
    multiple = int(flags.get("make-vocab-size-divisible-by") or 128) * tp
    return -(-size // multiple) * multiple


def _attention(row: Mapping[str, str], flags: Mapping[str, Any], capability: float) -> str:
    """The kernels Transformer Engine picks; empty where the flags say, or another implementation runs."""
    backend = flags.get("attention-backend")
    if flags.get("transformer-impl") == "local" or backend in ("unfused", "local"):
        return ""
    if backend in ("flash", "fused"):
        return "flash2" if backend == "flash" else "flash3"
    if flags.get("deterministic-mode"):
        if row["environment"] == OLD_CONTAINER and row["golden_date"] < RENEWED:
            return "unfused"
        return "flash3" if 9 <= capability < 10 else "flash2"
    return "flash3" if capability >= 9 else "flash2"


# ---- bytes


def golden_bytes(row: Mapping[str, str]) -> tuple[float, Job, bool]:
    """The predicted peak of a row, its job, and whether its number of GPUs had to be found first."""
    if row.get("n_gpus", "").strip():
        job = golden_job(row)
        return _peak(row, job), job, False
    job = min(_candidates(row), key=lambda j: abs(_between_steps(_last(j)) - (number(row, "mem_allocated_bytes") or 0)))
    return _peak(row, job), job, True


def _candidates(row: Mapping[str, str]) -> Iterator[Job]:
    """The job on every number of GPUs that is a power of two times a replica's, and divides its batch."""
    one = golden_job(row, MOST_GPUS)
    step = one.parallel.replica_gpus
    for replicas in (1 << i for i in range(12)):
        job = replace(one, gpus=step * replicas)
        if job.expert_dp and job.global_batch % (job.micro_batch * replicas) == 0:
            yield job


def _last(job: Job) -> StageMemory:
    return job_memory(job).stages[-1]


def _between_steps(s: StageMemory) -> float:
    return s.weights + s.gradients + s.optimizer + s.buffers


def _peak(row: Mapping[str, str], job: Job) -> float:
    """Bytes of the last stage. Where a single step was run, its passes had no Adam moments yet."""
    s = _last(job)
    if row.get("steps", "").strip() not in ("1", "1.0"):
        return s.allocated
    return max(_between_steps(s), s.allocated - s.optimizer * 2 / 3)
