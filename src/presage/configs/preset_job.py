"""A job from nothing but a model's name: what a job file would say, with usual values for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from presage.configs.job_file import JobTable
from presage.configs.models import preset

SEQUENCE = 8192  # tokens of a sample, where the model has no fewer positions
BATCH_TOKENS = 4 << 20  # tokens of a step, at least
MODEL_PARALLEL = (512, 8)  # on more GPUs than this, that many share a replica


def preset_job(name: str, gpus: int, cluster: dict[str, Any]) -> JobTable:
    """The job of a known model on so many GPUs of a cluster; its plan is left open."""
    sequence = min(SEQUENCE, preset(name).max_positions or SEQUENCE)
    training = {"sequence": sequence, "global_batch": usual_batch(gpus, sequence)}
    table = {"model": {"preset": name}, "training": training, "parallel": {"gpus": gpus}, "cluster": cluster}
    return JobTable(Path(name), table)


def usual_batch(gpus: int, sequence: int) -> int:
    """Samples per step: a few million tokens, divisible by the replicas of most plans."""
    many, shared = MODEL_PARALLEL
    replicas = gpus // shared if gpus > many and not gpus % shared else gpus
    return replicas * -(-BATCH_TOKENS // (sequence * replicas))
