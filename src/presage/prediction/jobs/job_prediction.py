"""JobResult: step time, memory, MFU and cost of a training job; `predict_job` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from presage.configs.job import Job
from presage.configs.job_file import ParsedJob, read_job_file, training_alone
from presage.costs.closed_form import ClosedFormKernels
from presage.engine import Timeline
from presage.files.memo import remembered
from presage.memory import SAFETY, JobMemory, MemorySaving, job_memory, memory_by_module, memory_savings
from presage.noise.priors import CONDITIONS
from presage.parallel.plan import LAYER_AXES
from presage.prediction.breakdown import RooflinePoint
from presage.prediction.jobs.cost import CostTerms, TrainingCost, cost_terms
from presage.prediction.jobs.job_detail import (
    HELPS,
    WorkClassSensitivity,
    job_roofline,
    job_timeline,
    job_to_json,
    perturb,
    provenance_notes,
)
from presage.prediction.jobs.job_flops import DEFAULT, JobFlops, job_flops, peak_of
from presage.prediction.jobs.job_step import JobStep, job_step
from presage.prediction.result import Floats, ModelError, Quantiles, Result, ResultKind, model_error

if TYPE_CHECKING:
    from presage.prediction.draws.distribution import StepDistribution

# Parts of a step, in the order they are listed; any others follow.
COMPUTE = ("products", "attention", "streams")
TRANSFERS = (*(axis.value for axis in LAYER_AXES), "pp", "dp", "sharding")
OTHERS = ("bubble", "host", "optimizer")
AT_WORK = (*COMPUTE, "optimizer")
BOUNDS = {
    "compute": ("products", "attention"), "memory bandwidth": ("streams", "optimizer"), "communication": TRANSFERS,
    "pipeline": ("bubble",), "host": ("host",),
}  # fmt: skip
LOW = ("fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A pipeline stage: seconds of one microbatch through all its chunks, then of the step."""

    number: int
    layers: int
    forward: float
    backward: float
    busy: float
    bubble: float
    memory: float  # bytes it cannot run without


@dataclass(frozen=True, eq=False, repr=False)
class JobResult(Result):
    """The step of a training job."""

    job: Job
    job_step: JobStep
    memory: JobMemory
    terms: CostTerms = field(default_factory=CostTerms)
    convention: str = DEFAULT
    notes: tuple[str, ...] = ()
    noise: str | None = None  # a file or a preset: what makes steps differ
    spread: StepDistribution | None = None  # drawn steps; by default few are drawn when needed
    drawn: bool = True  # False: the step time is `seconds`, nothing is drawn (searches compare thousands of plans)

    # ---- what every result has

    @property
    def kind(self) -> ResultKind:
        return "job"

    @property
    def title(self) -> str:
        return self.job.name

    @property
    def hardware(self) -> str:
        return self.job.platform.name

    @cached_property
    def distribution(self) -> StepDistribution:
        """Drawn steps under the noise given, or else the noise assumed of such GPUs."""
        from presage.prediction.draws.distribution import quick_distribution

        return self.spread or quick_distribution(self, noise=self.noise)

    @property
    def model_error(self) -> ModelError:
        """presage's own error for such jobs."""
        return model_error("moe" if self.job.model.experts else "dense")

    @cached_property
    def _drawn_figures(self) -> list[float]:
        """Mean, p50, p95 of drawn steps, p50 and p95 of run means; kept on disk where the noise is a preset."""
        if self.spread or "distribution" in self.__dict__ or (self.noise and self.noise not in CONDITIONS):
            return self.distribution.figures
        return remembered(f"steps {self.noise} {self.job!r} {self.seconds!r}", lambda: self.distribution.figures)

    @cached_property
    def step(self) -> Quantiles:
        if not self.drawn:
            return Quantiles.constant(self.seconds)
        mean, median, _, run_median, run_late = self._drawn_figures
        low, high = self.model_error.interval(median, max(run_late / run_median, 1.0))
        return Quantiles(mean, low, median, high)

    @property
    def jitter(self) -> float:
        return self._drawn_figures[2] / self._drawn_figures[1] - 1 if self.drawn else 0.0

    @property
    def draws(self) -> Floats:
        """Seconds of the drawn steps."""
        return self.distribution.draws.seconds.ravel() if self.drawn else np.empty(0)

    @property
    def memory_bytes(self) -> float:
        return self.memory.needed

    @property
    def gpu_memory(self) -> float:
        return self.memory.memory

    @cached_property
    def timeline(self) -> Timeline:
        return job_timeline(self.job_step)

    @property
    def timeline_names(self) -> dict[int, str]:
        """The name of each stage of the timeline."""
        return {s.number: f"stage {s.number} ({s.layers} layers)" for s in self.stages}

    # ---- speed

    @property
    def seconds(self) -> float:
        """Step time of the model without draws: what searches compare plans by. `step` is the prediction."""
        return float(self.job_step.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs together, in a median step."""
        return self.job.tokens / self.step.p50

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.job.gpus

    @property
    def samples_per_second(self) -> float:
        return self.job.global_batch / self.step.p50

    # ---- efficiency

    @cached_property
    def flops(self) -> JobFlops:
        return job_flops(self.job, self.convention)

    @property
    def peak(self) -> tuple[str, float]:
        """Name and FLOP/s of the peak that MFU and HFU refer to: one GPU at the job's precision."""
        return peak_of(self.job.platform.gpu, self.job.precision)

    @property
    def mfu(self) -> float:
        return self._use(self.flops.model, self.peak[1])

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputation counts."""
        return self._use(self.flops.hardware, self.peak[1])

    @property
    def mfu_by_peak(self) -> dict[str, float]:
        """MFU by the peak it refers to; low precisions also refer to the bf16 peak, as is common."""
        kinds = (self.job.precision, "bf16") if self.job.precision in LOW else (self.job.precision,)
        peaks = dict(peak_of(self.job.platform.gpu, kind) for kind in kinds)
        return {name: self._use(self.flops.model, peak) for name, peak in peaks.items()}

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one GPU."""
        return self.flops.model / self.step.p50 / self.job.gpus

    def _use(self, flops: float, peak: float) -> float:
        return flops / (self.step.p50 * self.job.gpus * peak)

    # ---- breakdown

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by part on the busiest stage; they add up to the step."""
        parts = {name: float(value) for name, value in self.job_step.parts.items()}
        sends = float(self.job_step.pipeline.exposed_send.max()) if self.job.parallel.pp > 1 else 0.0
        sends = min(sends, parts["bubble"])
        parts |= {"pp": parts.get("pp", 0.0) + sends, "bubble": parts["bubble"] - sends}
        first = [name for name in (*COMPUTE, *TRANSFERS, *OTHERS) if name in parts]
        return {name: parts[name] for name in (*first, *(n for n in parts if n not in first))}

    @property
    def step_parts(self) -> dict[str, float]:
        """Parts that add up to the median step: `breakdown`, and what stragglers and jitter add to it."""
        return self.breakdown | ({"jitter": self.step.p50 - self.seconds} if self.drawn else {})

    @property
    def compute(self) -> float:
        return sum(self.breakdown[name] for name in COMPUTE)

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.breakdown.get(name, 0.0) for name in TRANSFERS)

    @property
    def bound(self) -> str:
        """The resource that most of the step is spent on."""
        parts = self.breakdown
        return max(BOUNDS, key=lambda name: sum(parts.get(part, 0.0) for part in BOUNDS[name]))

    @property
    def loss(self) -> tuple[str, float]:
        """The largest part that is not compute, and its seconds."""
        rest = {name: seconds for name, seconds in self.breakdown.items() if name not in COMPUTE}
        name = max(rest, key=lambda n: rest[n])
        return name, rest[name]

    @cached_property
    def stages(self) -> tuple[StageSummary, ...]:
        s, layers = self.job_step, [sum(chunks) for chunks in self.job.stage_layers()]
        columns = (s.forward.sum(1), s.backward.sum(1), s.pipeline.busy, s.pipeline.bubble)
        times = [[float(x) for x in column] for column in columns]
        memory = [m.needed for m in self.memory.stages]
        return tuple(StageSummary(*row) for row in zip(range(len(layers)), layers, *times, memory, strict=True))

    @cached_property
    def roofline(self) -> tuple[RooflinePoint, ...]:
        """How near the GPU's limits each block of a layer runs, on the busiest stage."""
        return job_roofline(self.job, self.job_step)

    @cached_property
    def perturbed(self) -> tuple[WorkClassSensitivity, ...]:
        """The step with each kind of work faster or slower."""
        return perturb(self.job)

    @cached_property
    def helps(self) -> tuple[MemorySaving, ...]:
        """Changes that save memory, largest saving first."""
        return memory_savings(self.job)

    @cached_property
    def memory_parts(self) -> dict[str, float]:
        """Bytes of the fullest stage, by what they are, as the job's software names it."""
        return memory_by_module(self.job, self.memory)

    @cached_property
    def help_costs(self) -> tuple[float, ...]:
        """What the first of these changes cost in time: the step's, as a share of what it takes now."""
        return tuple(float(job_step(h.job).seconds / self.seconds - 1) for h in self.helps[:HELPS])

    # ---- energy and cost

    @cached_property
    def watts(self) -> float:
        """Average power of all GPUs, PUE included: a computing GPU draws its power limit (or `terms.power`), a waiting
        one the base power of a busy GPU."""
        limit = self.job.platform.gpu.power_limit
        work = limit if self.terms.power is None else self.terms.power
        rest = ClosedFormKernels.of(self.job.platform.gpu).power.base * work / limit
        share = sum(self.breakdown.get(name, 0.0) for name in AT_WORK) / self.seconds
        return (share * work + (1 - share) * rest) * self.terms.pue * self.job.gpus

    def spent(self, tokens: float | None = None) -> TrainingCost:
        """Time, energy and cost of one step, or of training on `tokens` tokens: from the mean step."""
        job = self.job
        steps = 1.0 if tokens is None else tokens / job.tokens
        return TrainingCost.of(tokens or job.tokens, steps, self.step.mean, job.gpus, self.watts, self.terms.price)

    def to_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        return job_to_json(self, tokens)


def predict_job(
    job: Job | ParsedJob | str | Path,
    overrides: Mapping[str, Any] | None = None,
    terms: CostTerms | None = None,
    convention: str = DEFAULT,
) -> JobResult:
    """Predict step time, breakdown and memory of a training job.

    `job`: a Job, a job file's path or that file parsed. `overrides` of the file's values, by section:
    {"parallel": {"tp": 8}}.
    """
    parsed = ParsedJob(job) if isinstance(job, Job) else job
    if not isinstance(parsed, ParsedJob):
        parsed = read_job_file(parsed, overrides)
    job, notes = training_alone(parsed).job, parsed.notes
    terms = terms or cost_terms(parsed.cluster, parsed.path)
    memory = job_memory(job)
    notes = (*notes, *memory_notes(memory), *provenance_notes(job))
    return JobResult(job, job_step(job), memory, terms, convention, notes)


def memory_notes(memory: JobMemory) -> tuple[str, ...]:
    """What to know of a job that fits, but not surely."""
    if not memory.fits or memory.surely_fits:
        return ()
    return (f"it may run out of memory: with idle blocks of the allocator less than {SAFETY:.0%} would be left",)
