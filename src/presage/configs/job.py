"""A Job: a model, how it is spread over GPUs, how it is trained, and on what. Values only; `check` judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from presage.configs.frameworks import Framework, Overlap
from presage.configs.lengths import packed_documents
from presage.configs.recipes import USUAL, Recipe
from presage.configs.transformer import Transformer
from presage.configs.tuning import FULL, Tuning
from presage.hardware import Platform
from presage.parallel.plan import ParallelPlan, SplitSizes

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")  # of the large products


@dataclass(frozen=True, slots=True)
class Recompute:
    """What the backward pass computes again rather than keeps."""

    mode: str = "none"  # none, selective, full
    modules: tuple[str, ...] = ()  # of selective: core_attn, norm, mlp, moe, moe_act, mla_up_proj, op (PyTorch's SAC)
    share: float = 1.0  # of the layers it is done in (every second: 0.5)
    offload: float = 0.0  # of the layers whose activations wait in the host's memory instead


def activation_bytes(job: Job) -> int:
    """Bytes of a number between layers."""
    return 4 if job.precision in ("fp32", "tf32") else 2


@dataclass(frozen=True)
class Job:
    """One training job."""

    model: Transformer
    platform: Platform
    gpus: int
    sequence: int  # tokens of a sample
    micro_batch: int  # samples a replica handles at a time
    global_batch: int  # samples a step
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    precision: str = "bf16"
    recompute: Recompute = field(default_factory=Recompute)
    overlap: Overlap = field(default_factory=Overlap)
    framework: Framework = field(default_factory=Framework)
    optimizer: str = "adam"
    name: str = ""
    host: str = ""  # a known host's name, or a file; the H200's where there is none
    tuning: Tuning = FULL
    recipe: Recipe = USUAL
    lengths: tuple[int, ...] = ()  # of documents that sequences are packed of, each as likely; empty: one a sequence
    balanced: bool = True  # context-parallel ranks have an early and a late part each; not: one part after the other

    def changed(self, **values: Any) -> Job:
        """As `dataclasses.replace`, a tenth of its time: searches make hundreds of thousands of jobs."""
        other = object.__new__(Job)
        other.__dict__.update(self.__dict__, **values)
        return other

    @property
    def dp(self) -> int:
        """Data parallel replicas: gpus / (tp x pp x cp)."""
        return self.parallel.dp(self.gpus)

    @property
    def microbatches(self) -> int:
        """Microbatches of each replica in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence

    @property
    def rank_tokens(self) -> int:
        """Tokens of a microbatch on one context parallel rank."""
        return self.micro_batch * self.sequence // self.parallel.cp

    @property
    def documents(self) -> tuple[int, ...]:
        """What a usual sequence is packed of; empty where each is one document."""
        return packed_documents(self.lengths, self.sequence) if self.lengths else ()

    @property
    def sharding(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        return self.parallel.sharding(self.gpus)

    @property
    def dispatcher(self) -> str:
        """The name of the token dispatcher: the plan's, or its framework's."""
        return self.parallel.dispatcher or self.framework.dispatcher

    @property
    def expert_dp(self) -> int:
        """Copies of an expert."""
        return self.parallel.expert_dp(self.gpus)

    @property
    def passes(self) -> int:
        """Microbatches that go through each chunk of a stage."""
        return self.microbatches // self.parallel.pipeline_kind.route.copies

    @property
    def hides_dispatch(self) -> bool:
        """Whether exchanges with experts run beside another microbatch's pass."""
        return self.overlap.experts or (self.parallel.pp > 1 and self.parallel.pipeline_kind.pairs)

    def stage_layers(self) -> tuple[tuple[int, ...], ...]:
        """How many layers each chunk of each stage has, by stage and chunk."""
        return self.parallel.stage_layers(self.model.layers, self.model.predicted)

    @property
    def split_sizes(self) -> SplitSizes:
        """What the parallel plan divides."""
        m, e = self.model, self.model.experts
        kv_heads = 0 if m.latent else m.kv_heads
        experts = (e.experts, e.ffn) if e else (0, 0)
        batch = self.sequence, self.micro_batch, self.global_batch
        return SplitSizes(self.gpus, *batch, m.layers, m.heads, kv_heads, m.ffn, *experts)
