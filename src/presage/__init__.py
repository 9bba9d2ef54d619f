"""presage: how long machine-learning training will take, and how sure you can be."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from presage import edits, engine
    from presage.configs.job import Job
    from presage.configs.job_file import read_transformer_job
    from presage.errors import InputError, PresageError
    from presage.measure.monitor import lightning_callback, trainer_callback, watch
    from presage.noise.files import read_noise, write_noise
    from presage.noise.model import NoiseModel
    from presage.placement import place, place_job
    from presage.prediction.api import model_step, predict, predict_ranks, register_op, step_graph
    from presage.prediction.draws.distribution import StepDistribution, predict_distribution
    from presage.prediction.draws.sensitivity import Sensitivity, job_sensitivity
    from presage.prediction.jobs.job_prediction import JobResult, predict_job
    from presage.prediction.post_training.step import PostTrainingResult, predict_post_training
    from presage.prediction.result import Quantiles, Result
    from presage.prediction.step import StepResult, predict_step
    from presage.runs.whole import RunResult, predict_run
    from presage.traces import explain
    from presage.traces.replay import Replay, measured_steps, replay_of
    from presage.traces.trace_set import TraceSet, read_run, run_of
    from presage.whatif.before_after import WhatIf, what_if
    from presage.whatif.suggest import suggest

own_process = False  # whether only presage's code runs in this process, but for what it captures: set by the command

# Names are loaded when first used, so that `import presage` costs nothing.
_HOMES = {
    "presage.errors": "InputError PresageError",
    "presage.prediction.draws.distribution": "StepDistribution predict_distribution",
    "presage.prediction.draws.sensitivity": "Sensitivity job_sensitivity",
    "presage.configs.job_file": "read_transformer_job",
    "presage.configs.job": "Job",
    "presage.prediction.jobs.job_prediction": "JobResult predict_job",
    "presage.measure.monitor": "lightning_callback trainer_callback watch",
    "presage.noise.files": "read_noise write_noise",
    "presage.noise.model": "NoiseModel",
    "presage.whatif.suggest": "suggest",
    "presage.whatif.before_after": "WhatIf what_if",
    "presage.placement": "place place_job",
    "presage.prediction.api": "model_step predict predict_ranks register_op step_graph",
    "presage.prediction.post_training.step": "PostTrainingResult predict_post_training",
    "presage.prediction.result": "Quantiles Result",
    "presage.prediction.step": "StepResult predict_step",
    "presage.runs.whole": "RunResult predict_run",
    "presage.traces.replay": "Replay measured_steps replay_of",
    "presage.traces.trace_set": "TraceSet read_run run_of",
}
# Names of 0.1, until the next release: old -> new.
_DEPRECATED = {
    "JobPrediction": "JobResult",
    "Noise": "NoiseModel",
    "Prediction": "StepResult",
    "Run": "TraceSet",
    "RunPrediction": "RunResult",
    "Sure": "StepDistribution",
    "sure": "predict_distribution",
}
# Names of presage.engine, until the next release here too.
_ENGINE = {
    "Builder", "Durations", "Edges", "Lane", "LaneKind", "Program", "Timeline", "period", "repeat", "simulate",
}  # fmt: skip
_MODULES = {"edits": "presage.edits", "engine": "presage.engine", "explain": "presage.traces.explain"}

__all__ = [
    "InputError",
    "Job",
    "JobResult",
    "NoiseModel",
    "PostTrainingResult",
    "PresageError",
    "Quantiles",
    "Replay",
    "Result",
    "RunResult",
    "Sensitivity",
    "StepDistribution",
    "StepResult",
    "TraceSet",
    "WhatIf",
    "edits",
    "engine",
    "explain",
    "job_sensitivity",
    "lightning_callback",
    "measured_steps",
    "model_step",
    "place",
    "place_job",
    "predict",
    "predict_distribution",
    "predict_job",
    "predict_post_training",
    "predict_ranks",
    "predict_run",
    "predict_step",
    "read_noise",
    "read_run",
    "read_transformer_job",
    "register_op",
    "replay_of",
    "run_of",
    "step_graph",
    "suggest",
    "trainer_callback",
    "watch",
    "what_if",
    "write_noise",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("presage")
    if name in _DEPRECATED or name in _ENGINE:
        from warnings import warn

        new = _DEPRECATED.get(name, f"engine.{name}")
        warn(f"presage.{name} is now presage.{new}; the old name goes with the next release", DeprecationWarning, 2)
        return getattr(import_module("presage.engine"), name) if name in _ENGINE else __getattr__(new)
    if name in _MODULES:
        return import_module(_MODULES[name])
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'presage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
