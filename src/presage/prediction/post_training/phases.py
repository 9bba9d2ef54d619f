"""Phases of a step besides the rollout: log-probabilities, values, rewards, training, weights to the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.configs.post_training import PostTraining
from presage.configs.transformer import Transformer
from presage.costs.collectives import Collectives
from presage.costs.collectives.group import RankGroup
from presage.memory import job_memory
from presage.prediction.jobs.job_step import JobStep, job_step
from presage.prediction.post_training.software import software_costs

Floats = NDArray[np.float64]
SCALAR = 128  # outputs of a critic's or a reward model's head, as wide as a GEMM has them
# Host time of handing a tensor of weights over: 7 s for Qwen3-30B-A3B's 18,867 tensors once slime sent them in buckets
# (hebiao064.github.io/rl-weight-sync).
TENSOR = 7.0 / 18_867
WAKE = 0.4  # seconds to wake an engine, and as many to put it to sleep (vLLM's blog on sleep mode: 0.1-0.4 s)
REACHED = 0.8  # of PCIe's rate, by copies from pinned memory


@dataclass(frozen=True)
class Microbatches:
    """How a step's sequences are cut into microbatches of one replica."""

    count: int  # of one replica in one update
    updates: int  # of an epoch
    tokens: float  # of a microbatch
    samples: int  # of a microbatch, as the law of attention sees them
    spread: Floats  # tokens of each microbatch over their mean, sorted

    def largest(self, ranks: int) -> float:
        """Tokens of the largest of so many microbatches over the mean: ranks that meet in every layer wait for it."""
        return max(1.0, float(np.quantile(self.spread, ranks / (ranks + 1)))) if ranks > 1 else 1.0

    @property
    def sequence(self) -> float:
        return self.tokens / self.samples


def cut_microbatches(job: Job, rl: PostTraining, responses: Floats) -> Microbatches:
    """The sequences of a step as microbatches: packed up to a number of tokens, or so many samples at a time."""
    updates = rl.responses // rl.mini_batch
    sequences = responses + rl.prompt_length
    mean = float(sequences.mean())
    if rl.packing != "packed":
        each = float(job.sequence) if rl.packing == "padded" else mean
        count = -(-rl.mini_batch // (job.micro_batch * job.dp))
        spread = sequences / mean if rl.packing == "unpadded" and job.micro_batch == 1 else np.ones(1)
        return Microbatches(count, updates, each * job.micro_batch, job.micro_batch, np.sort(spread))
    packs = _packed(sequences, rl.microbatch_tokens * job.parallel.cp)
    count = max(1, -(-len(packs) // (updates * job.dp)))
    tokens = float(sequences.sum()) / (count * updates * job.dp)
    seen = float((sequences**2).sum() / sequences.sum())  # tokens of the sequence that a token is in
    return Microbatches(count, updates, tokens, max(1, round(tokens / seen)), np.sort(packs / packs.mean()))


def _packed(sequences: Floats, room: float) -> Floats:
    """Tokens of the bins that hold all sequences, the longest first, each in the first bin with room for it."""
    bins = np.full(len(sequences), float(room))
    used = 0
    for length in -np.sort(-np.minimum(sequences, room)):
        at = int(np.argmax(bins >= length))
        bins[at] -= length
        used = max(used, at + 1)
    return room - bins[:used]


@dataclass(frozen=True)
class TrainerPhases:
    """Seconds of the trainer's phases of a step."""

    job: Job
    rl: PostTraining
    batches: Microbatches

    @cached_property
    def training_job(self) -> Job:
        """A job whose step is one update. Its loss is of log-probabilities in fp32, which no fused loss computes."""
        p, b = self.job.parallel, self.batches
        multiple = 2 * p.cp * p.tp
        sequence = max(multiple, round(b.sequence * b.largest(p.ep) / multiple) * multiple)
        return replace(
            self.job, sequence=sequence, micro_batch=b.samples, global_batch=b.samples * self.job.dp * b.count,
            framework=replace(self.job.framework, fused_loss=False),
        )  # fmt: skip

    @cached_property
    def update(self) -> JobStep:
        return job_step(self.training_job)

    @property
    def training(self) -> float:
        return self.update.seconds * self.batches.updates * self.rl.epochs * software_costs().trainer

    @cached_property
    def old_log_probs(self) -> float:
        return self._forward(self.job.model) if self.rl.old_log_probs else 0.0

    @cached_property
    def reference(self) -> float:
        return self._forward(self.job.model) if self.rl.reference else 0.0

    @cached_property
    def values(self) -> float:
        return self._forward(_scalar(self.rl.critic)) if self.rl.critic else 0.0

    @cached_property
    def critic_training(self) -> float:
        if self.rl.critic is None:
            return 0.0
        one = job_step(self._with(_scalar(self.rl.critic))).seconds
        return one * self.batches.updates * self.rl.epochs * software_costs().trainer

    @cached_property
    def reward(self) -> float:
        model = self.rl.reward_model
        return self.rl.reward_seconds + (self._forward(_scalar(model)) if model else 0.0)

    def _with(self, model: Transformer) -> Job:
        plan = self.training_job.parallel
        fitting = plan if model.layers == self.job.model.layers else replace(plan, layers_as=())
        return replace(self.training_job, model=model, parallel=fitting)

    def _forward(self, model: Transformer) -> float:
        """A forward pass over all sequences: a pipeline fills once."""
        step = self.update if model == self.job.model else job_step(self._with(model))
        stages = step.forward.sum(axis=1)
        passes = self.batches.count * self.batches.updates
        return float(stages.sum() + (passes - 1) * stages.max()) * software_costs().trainer


def _scalar(model: Transformer) -> Transformer:
    """A model with one output instead of a vocabulary."""
    return replace(model, vocab=SCALAR)


# ---- weights from the trainer to the engine


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Seconds between an update and the first token with its weights."""

    gather: float  # weights to the ranks of the engine
    tensors: float  # host time, tensor by tensor
    offload: float  # states of the trainer to host memory and back, where engines share GPUs
    wake: float

    @property
    def seconds(self) -> float:
        return self.gather + self.tensors + self.offload + self.wake


def weight_transfer(job: Job, rl: PostTraining) -> WeightTransfer:
    """Gathered within the trainer and handed over on each GPU, or broadcast to the engine's GPUs."""
    links, nbytes = Collectives.of(job.platform), 2.0 * job.model.parameters
    host = TENSOR * tensor_count(job.model)
    if not rl.colocated:
        group = RankGroup.of(job.platform, 1 + rl.engine.gpus)
        return WeightTransfer(float(links.seconds("broadcast", nbytes, group)), host, 0.0, 0.0)
    p = job.parallel
    shared = job.gpus if p.fsdp or p.zero >= 3 else p.tp * p.pp * max(1, p.ep // max(1, p.tp))
    group = RankGroup.of(job.platform, min(job.gpus, shared))
    gather = float(links.seconds("all_gather", nbytes, group)) if group.ranks > 1 else 0.0
    return WeightTransfer(gather, host, 2 * _offloaded(job, rl), 2 * WAKE)


def _offloaded(job: Job, rl: PostTraining) -> float:
    """Seconds of one way of the states that leave the GPU for the rollout."""
    if not rl.offload:
        return 0.0
    held = max(m.weights + m.optimizer for m in job_memory(job).stages)
    return held / (REACHED * job.platform.gpu.pcie)


def tensor_count(m: Transformer) -> int:
    """Tensors of the weights, as checkpoints have them: seven to nine a layer, three for each expert."""
    fixed = (9 if m.latent else 6) + (2 if m.bias else 0)
    each = 3 if m.gated else 2
    experts = m.experts
    moe = m.expert_layers
    blocks = (m.layers - moe) * each
    if experts is not None:
        blocks += moe * (1 + each * experts.experts + (each if experts.shared_ffn else 0))
    return m.layers * fixed + blocks + 2 + (0 if m.tied else 1)
