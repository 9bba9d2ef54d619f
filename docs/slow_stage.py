"""One slow stage, moved through a pipeline without a model: what it costs by where it is. See make_placement.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.configs.job import Job
from presage.configs.models import preset
from presage.hardware import platform
from presage.noise.model import CLASSES, NoiseModel, WorkSpread
from presage.noise.sampling import RandomStreams
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import run_pipeline
from presage.parallel.plan import ParallelPlan
from presage.placement.placement_score import PlacementScore, ReplicaTimes
from presage.placement.placement_search import assign_groups
from presage.prediction.draws.step_model import PASSES, StepModel

Floats = NDArray[np.float64]
DRAWS = 4_000
MODEL, PLATFORM = "llama3.1-8b", "dgx-h100"  # whose, does not matter: nothing of them is used


def toy_step_model(schedule: Schedule, heavy: ArrayLike = 1.0, replicas: int = 1, backward: float = 2.0) -> StepModel:
    """Stages whose forwards take `heavy` seconds, backwards `backward` times as long, all of it matrix products."""
    s = schedule
    each = np.broadcast_to(np.asarray(heavy, np.float64), (s.stages,))[:, None] / s.virtual * np.ones((1, s.virtual))
    work = np.zeros((len(CLASSES), len(PASSES), s.stages, s.virtual))
    back = [backward, 0.0] if not s.splits_backward else [backward / 2] * 2
    for i, times in enumerate((1.0, *back)):
        work[CLASSES.index("products"), i] = each * times
    total = work.sum(axis=0)
    found = run_pipeline(s, total[0], total[1], total[2] if s.splits_backward else None)
    gpus = s.stages * replicas
    parallel = ParallelPlan(pp=s.stages, virtual=s.virtual, schedule=s.kind)
    job = Job(preset(MODEL), platform(PLATFORM), gpus, 1, 1, s.microbatches * replicas, parallel, name="pipeline")
    return StepModel(job, found.total, found, work, replicas, 1, gpus / 8, frozenset())


def operation_noise(sd: float) -> NoiseModel:
    """Every operation's compute varies by itself."""
    return NoiseModel(spread={k: WorkSpread(own=sd) for k in ("products", "attention")})


@dataclass(frozen=True, eq=False)
class MovedStage:
    """p95 of a step relative to the healthy pipeline's, [stage]; `chosen`: where the optimiser puts the slow one."""

    schedule: Schedule
    slow: float
    heavy: float
    p95: Floats
    chosen: int

    @property
    def first(self) -> float:
        return float(self.p95[0])

    @property
    def middle(self) -> float:
        return float(self.p95[len(self.p95) // 2])

    @property
    def last(self) -> float:
        return float(self.p95[-1])

    @cached_property
    def spread(self) -> float:
        """The worst place against the best."""
        return float(self.p95.max() / self.p95.min())

    @property
    def found(self) -> float:
        """What the optimiser's choice costs."""
        return float(self.p95[self.chosen])


def move_slow_stage(
    schedule: Schedule, slow: float = 1.2, heavy: float = 1.0, cv: float = 0.02, draws: int = DRAWS, seed: int = 0
) -> MovedStage:
    """Stages alike but for the last, `heavy` times as heavy; backwards twice as long as forwards."""
    weights = np.ones(schedule.stages)
    weights[-1] = heavy
    pipeline = ReplicaTimes(toy_step_model(schedule, weights), operation_noise(cv), most=1 << 30)
    factors = np.ones((schedule.stages + 1, schedule.stages))
    factors[np.arange(schedule.stages), np.arange(schedule.stages)] = slow
    noises = pipeline.noises(RandomStreams(seed)("own"), draws)
    seconds = pipeline.quiet(factors)[:, None] * pipeline.ratios(factors, noises)
    p95 = np.quantile(seconds, 0.95, axis=1)
    values = factors[0]
    found = assign_groups(PlacementScore(pipeline, 1, seed=seed), values)
    chosen = int(np.flatnonzero(found.groups[0] == values.argmax())[0])
    return MovedStage(schedule, slow, heavy, p95[:-1] / p95[-1], chosen)
