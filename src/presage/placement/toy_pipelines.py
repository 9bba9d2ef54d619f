"""Pipelines without a model: stages told by their seconds, for studies of placement and tests of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.configs.job import Job
from presage.configs.models import preset
from presage.hardware import platform
from presage.noise.model import CLASSES, NoiseModel, WorkSpread
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import run_pipeline
from presage.parallel.plan import ParallelPlan
from presage.prediction.draws.step_model import PASSES, StepModel

__all__ = ["own_noise", "toy_shape"]

Floats = NDArray[np.float64]
MODEL, PLATFORM = "llama3.1-8b", "dgx-h100"  # whose, does not matter: nothing of them is used


def toy_shape(schedule: Schedule, heavy: ArrayLike = 1.0, replicas: int = 1, backward: float = 2.0) -> StepModel:
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


def own_noise(sd: float) -> NoiseModel:
    """Every operation's compute varies by itself."""
    return NoiseModel(spread={k: WorkSpread(own=sd) for k in ("products", "attention")})
