"""PostTrainingResult: a reinforcement-learning step, its phases, who waits for whom, and the memory of both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.configs.job_file import ParsedJob, read_job_file
from presage.configs.post_training import PostTraining
from presage.displayed import Displayed, share_rows
from presage.errors import PresageError
from presage.memory import JobMemory, job_memory
from presage.memory.buffers import COMMUNICATOR, LAZY_CONTEXT
from presage.memory.engine_memory import EngineMemory, engine_memory
from presage.memory.job_memory import StageMemory
from presage.prediction.jobs.job_detail import provenance_notes
from presage.prediction.post_training.decoding import DecodingModel, decoding_model
from presage.prediction.post_training.lengths import draw_lengths
from presage.prediction.post_training.phases import TrainerPhases, WeightTransfer, cut_microbatches, weight_transfer
from presage.prediction.post_training.rollout import EngineLimits, Rollout, roll_out
from presage.prediction.post_training.software import step_error
from presage.prediction.result import ModelError, Quantiles

Floats = NDArray[np.float64]
DRAWS, FEWEST, MOST_EVENTS = 64, 8, 150_000  # steps drawn where nobody says, and responses in all of them
PHASES = ("rollout", "reward", "old_log_probs", "reference", "values", "critic_training", "training", "transfer")


@dataclass(frozen=True, eq=False, repr=False)
class PostTrainingResult(Displayed):
    """A step of reinforcement learning. Times in seconds, memory in bytes."""

    job: Job  # the trainer's
    rl: PostTraining
    rollouts: tuple[Rollout, ...]  # of each drawn step
    responses: tuple[float, ...]  # mean tokens of a response in each
    phases: TrainerPhases
    transfer: WeightTransfer
    decoding: DecodingModel
    trainer_memory: JobMemory
    engine_memory: EngineMemory
    notes: tuple[str, ...] = ()

    # ---- the step

    @cached_property
    def by_phase(self) -> dict[str, Floats]:
        """Seconds of each phase in each drawn step; those of the trainer grow with the tokens."""
        p, mean = self.phases, self.rl.lengths.mean + self.rl.prompt_length
        more = (np.array(self.responses) + self.rl.prompt_length) / mean if self.rl.packing != "padded" else 1.0
        out = {
            "rollout": np.array([r.seconds for r in self.rollouts]) / self.rl.batches_ahead,
            "reward": np.full(len(self.rollouts), p.reward),
            "transfer": np.full(len(self.rollouts), self.transfer.seconds),
        }
        trained = ("old_log_probs", "reference", "values", "critic_training", "training")
        out |= {name: getattr(p, name) * more * np.ones(len(self.rollouts)) for name in trained}
        return {name: out[name] for name in PHASES if out[name].any()}

    @cached_property
    def trainer_busy(self) -> Floats:
        """Seconds of the trainer's own phases in each drawn step."""
        return np.asarray(sum(v for k, v in self.by_phase.items() if k not in ("rollout", "transfer")))

    @cached_property
    def draws(self) -> Floats:
        """Seconds of each drawn step."""
        rollout, transfer = self.by_phase["rollout"], self.transfer.seconds
        if self.rl.staleness:
            return np.maximum(rollout, self.trainer_busy) + transfer
        return rollout + self.trainer_busy + transfer

    @cached_property
    def step(self) -> Quantiles:
        """Median step and its 90% interval, presage's own error on published steps included."""
        drawn = Quantiles.of(self.draws)
        low, high = self.model_error.interval(drawn.p50)
        return Quantiles(drawn.mean, low, drawn.p50, high)

    @property
    def model_error(self) -> ModelError:
        return step_error()

    @property
    def seconds(self) -> float:
        return self.step.p50

    @property
    def jitter(self) -> float:
        """p95 of drawn steps over their p50, less one."""
        return float(np.quantile(self.draws, 0.95) / np.quantile(self.draws, 0.5)) - 1

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Mean seconds of each phase, whether it is waited for or not."""
        return {name: float(values.mean()) for name, values in self.by_phase.items()}

    @property
    def bound(self) -> str:
        """The phase that takes longest."""
        return max(self.breakdown, key=lambda name: self.breakdown[name])

    # ---- rates

    @property
    def gpus(self) -> int:
        return self.job.gpus + (0 if self.rl.colocated else self.rl.engine.gpus)

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts and responses."""
        return self.rl.responses * (self.rl.prompt_length + float(np.mean(self.responses)))

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step.p50 / self.gpus

    @property
    def decoded_per_second_per_gpu(self) -> float:
        """Response tokens a second of rollout and GPU of the engine."""
        return self.rl.responses * float(np.mean(self.responses)) / self.breakdown["rollout"] / self.rl.engine.gpus

    # ---- who waits for whom

    @cached_property
    def waits(self) -> dict[str, float]:
        """Mean seconds of a step in which each side has no work."""
        total, rollout = float(self.draws.mean()), self.breakdown["rollout"]
        straggling = rollout - float(np.mean([r.busy for r in self.rollouts])) / self.rl.batches_ahead
        if self.rl.colocated:
            return {"replicas, for the longest response": straggling}
        transfer = self.transfer.seconds
        return {
            "trainer, for the rollout": total - float(self.trainer_busy.mean()) - transfer,
            "engine, for the trainer": total - rollout - transfer,
            "replicas, for the longest response": straggling,
        }

    # ---- memory

    @property
    def left_on_gpu(self) -> float:
        """Bytes of the trainer that stay on a GPU while the engine decodes there."""
        if not self.rl.colocated:
            return 0.0
        worst = self.trainer_memory.worst
        return LAZY_CONTEXT + COMMUNICATOR + (0.0 if self.rl.offload else worst.weights + worst.optimizer)

    @property
    def engine_margin(self) -> float:
        """Bytes beyond what the engine needs beside the trainer; negative: missing."""
        free = self.trainer_memory.memory - self.left_on_gpu - self.engine_memory.allowed
        return min(self.engine_memory.margin, free)

    @property
    def trainer_margin(self) -> float:
        """Bytes left to the trainer, while an engine on its GPUs sleeps."""
        asleep = self.engine_memory.outside + self.engine_memory.graphs if self.rl.colocated else 0.0
        return self.trainer_memory.margin - asleep

    @property
    def fits(self) -> bool:
        return self.trainer_margin >= 0 and self.engine_margin >= 0

    @property
    def concurrent(self) -> int:
        """Sequences of mean length that a replica decodes at once, at most."""
        each = self.rl.prompt_length + self.rl.lengths.mean
        return min(self.rl.engine.max_num_seqs, int(self.engine_memory.kv_tokens / each))

    # ---- output

    def frame_rows(self) -> list[dict[str, Any]]:
        return share_rows(self.breakdown)

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        from presage.prediction.post_training.detail import post_training_json

        return post_training_json(self)


def predict_post_training(
    job: ParsedJob | str | Path, overrides: Mapping[str, Any] | None = None, draws: int = 0, seed: int = 0
) -> PostTrainingResult:
    """Predict a reinforcement-learning step: a job file with [rl], or that file parsed."""
    parsed = job if isinstance(job, ParsedJob) else read_job_file(job, overrides)
    if parsed.rl is None:
        raise PresageError(f"{parsed.path}: has no [rl]: predict_job predicts training alone")
    return post_training_step(parsed.job, parsed.rl, draws, seed, (*parsed.notes, *provenance_notes(parsed.job)))


def post_training_step(
    job: Job, rl: PostTraining, draws: int = 0, seed: int = 0, notes: tuple[str, ...] = ()
) -> PostTrainingResult:
    """The step of a trainer's job and the engine of [rl]."""
    memory = engine_memory(job, rl.engine, rl.prompt_length + rl.lengths.longest)
    rng = np.random.default_rng(seed)
    usual = draw_lengths(rl.lengths, rl.responses, rng)
    phases = TrainerPhases(job, rl, cut_microbatches(job, rl, usual))
    drawn, model = _draw(job, rl, memory, draws, rng)
    largest = replace(phases.training_job, sequence=_most_tokens(job, rl, usual), micro_batch=1)
    return PostTrainingResult(
        job, rl, tuple(r for r, _ in drawn), tuple(mean for _, mean in drawn), phases, weight_transfer(job, rl), model,
        _with_others(job_memory(largest), job, rl), memory, notes,
    )  # fmt: skip


def _draw(
    job: Job, rl: PostTraining, memory: EngineMemory, asked: int, rng: np.random.Generator
) -> tuple[list[tuple[Rollout, float]], DecodingModel]:
    """Rollouts of drawn steps: as many as asked for, or as a second has room for."""
    count = asked or DRAWS
    model, ahead = decoding_model(job, rl.engine), rl.batches_ahead
    limits = EngineLimits(rl.engine.max_num_seqs, max(memory.kv_tokens, int(memory.sequence) + 1))
    prefilled = 1 / rl.samples if rl.engine.prefix_caching else 1.0
    out: list[tuple[Rollout, float]] = []
    events = 0
    while len(out) < count and (asked or len(out) < FEWEST or events < MOST_EVENTS):
        lengths = draw_lengths(rl.lengths, rl.responses * ahead, rng)
        done = roll_out(model, lengths, rl.prompt_length, limits, rl.engine.replicas, prefilled)
        out.append((done, float(lengths.mean())))
        events += rl.responses * ahead + 4 * done.preempted
    return out, model


def _most_tokens(job: Job, rl: PostTraining, responses: Floats) -> int:
    """Tokens of the largest microbatch, which memory has to hold: of unpadded ones, three deviations above the mean."""
    if rl.packing == "packed":
        return max(1, rl.microbatch_tokens * job.parallel.cp)
    most = job.sequence * job.micro_batch
    if rl.packing == "padded":
        return most
    usual = (rl.prompt_length + float(responses.mean())) * job.micro_batch
    return int(min(most, usual + 3 * float(responses.std()) * math.sqrt(job.micro_batch)))


def _with_others(memory: JobMemory, job: Job, rl: PostTraining) -> JobMemory:
    """The trainer's memory with the reference's weights, and with a critic's weights and states, where they stay."""
    stages = []
    for s in memory.stages:
        weights = s.weights * (1 + (rl.reference and not rl.reference_offload))
        grown = replace(s, weights=weights)
        stages.append(_add_critic(grown, rl, job) if rl.critic else grown)
    return replace(memory, stages=tuple(stages))


def _add_critic(s: StageMemory, rl: PostTraining, job: Job) -> StageMemory:
    """Critic and policy train one after the other: states of both stay, activations are of one."""
    assert rl.critic is not None
    share = rl.critic.parameters / job.model.parameters
    return replace(
        s, weights=s.weights * (1 + share), gradients=s.gradients * (1 + share), optimizer=s.optimizer * (1 + share)
    )
