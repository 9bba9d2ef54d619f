"""A Job: a model, how it is spread over GPUs, how it is trained, and on what. Values only; `check` judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from presage.configs.framework import Framework, Overlap
from presage.configs.transformer import Transformer
from presage.hardware import Platform

__all__ = ["PRECISIONS", "SCHEDULES", "Job", "Overlap", "Parallel", "Recompute"]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")  # of the large products
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero-bubble")


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a model is spread. Data-parallel replicas are what the other degrees leave over: see `Job.dp`."""

    tp: int = 1  # tensor parallel
    sequence: bool = False  # activations between tensor-parallel blocks are split by sequence
    pp: int = 1  # pipeline stages
    virtual: int = 1  # chunks of layers on each stage
    schedule: str = "1f1b"  # with chunks: interleaved
    cp: int = 1  # context parallel: sequences split over ranks
    ep: int = 1  # experts spread over so many ranks
    expert_tp: int = 1  # and each expert cut over so many
    zero: int = 0  # 0 none, 1 optimizer, 2 and gradients, 3 and parameters sharded (3 with `fsdp` is FSDP)
    fsdp: bool = False  # gathers by layer as PyTorch's FSDP, else as DeepSpeed or Megatron
    shard: int = 0  # ranks that share one copy of what is sharded (HSDP, ZeRO groups); 0: all data-parallel ranks
    layers_as: tuple[int, ...] = ()  # layers of each (stage, chunk), chunk by chunk: empty for as even as can be
    ends_as_layers: bool = False  # embedding and head count as a layer each where layers are dealt out


@dataclass(frozen=True, slots=True)
class Recompute:
    """What the backward pass computes again rather than keeps."""

    mode: str = "none"  # none, selective, full
    modules: tuple[str, ...] = ()  # of selective: core_attn, norm, mlp, moe, moe_act, mla_up_proj, op (PyTorch's SAC)
    share: float = 1.0  # of the layers it is done in (every second: 0.5)
    offload: float = 0.0  # of the layers whose activations wait in the host's memory instead


@dataclass(frozen=True)
class Job:
    """One training job."""

    model: Transformer
    platform: Platform
    gpus: int
    sequence: int  # tokens of a sample
    micro_batch: int  # samples a replica handles at a time
    global_batch: int  # samples a step
    parallel: Parallel = field(default_factory=Parallel)
    precision: str = "bf16"
    recompute: Recompute = field(default_factory=Recompute)
    overlap: Overlap = field(default_factory=Overlap)
    framework: Framework = field(default_factory=Framework)
    optimizer: str = "adam"
    name: str = ""

    @property
    def dp(self) -> int:
        """Data-parallel replicas: gpus / (tp x pp x cp)."""
        p = self.parallel
        return self.gpus // (p.tp * p.pp * p.cp)

    @property
    def microbatches(self) -> int:
        """That each replica handles in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence

    @property
    def rank_tokens(self) -> int:
        """Of a microbatch on one context-parallel rank."""
        return self.micro_batch * self.sequence // self.parallel.cp

    @property
    def sharding(self) -> int:
        """Ranks that share one copy of the optimizer's state (ZeRO): context-parallel ranks hold the same weights, so
        they are part of it."""
        return self.parallel.shard or self.dp * self.parallel.cp

    @property
    def expert_dp(self) -> int:
        """Copies of an expert."""
        p = self.parallel
        return self.dp * p.cp * p.tp // (p.ep * p.expert_tp)

    def stage_layers(self) -> tuple[tuple[int, ...], ...]:
        """How many layers each chunk of each stage has, by stage and chunk."""
        p = self.parallel
        return _stages(self.model.layers, self.model.predicted, p.pp, p.virtual, p.layers_as, p.ends_as_layers)


@lru_cache(4096)
def _stages(
    layers: int, predicted: int, pp: int, virtual: int, layers_as: tuple[int, ...], ends: bool
) -> tuple[tuple[int, ...], ...]:
    counts = list(layers_as) or _dealt(layers, predicted, pp * virtual, ends)
    return tuple(tuple(counts[chunk * pp + stage] for chunk in range(virtual)) for stage in range(pp))


def _dealt(layers: int, predicted: int, slots: int, ends: bool) -> list[int]:
    """As even as can be, the later slots with one less; embedding and head (with layers of its own, where further
    tokens are predicted) may take layers' places."""
    last = 1 + predicted if ends else 0
    total = layers + last + (1 if ends else 0)
    counts = [total // slots + (i < total % slots) for i in range(slots)]
    counts[0] -= 1 if ends else 0
    for i in reversed(range(slots)):  # from the end, where the last slot alone is too small
        taken = min(last, counts[i])
        counts[i], last = counts[i] - taken, last - taken
    return counts
