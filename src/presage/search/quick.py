"""The best of the usual plans: a search of a second, for jobs that come without a plan."""

from __future__ import annotations

from collections.abc import Mapping

from presage.configs.job import Job
from presage.errors import PresageError
from presage.parallel.schedules import ONE_CHUNK, SEVERAL_CHUNKS
from presage.search.plan_search import search
from presage.text import size

LONG, MANY = 32_768, 4096  # tokens of a sample, GPUs: from here on samples are split, too
TOKENS = 8192  # of a microbatch


def usual_knobs(job: Job) -> dict[str, frozenset[str]]:
    """What most plans choose from, by knob."""
    experts = job.model.experts
    micro = max(1, TOKENS // job.sequence)
    choices: dict[str, tuple[object, ...]] = {
        "tp": (1, 2, 4, 8),
        "cp": (1, 2, 4, 8) if job.sequence >= LONG else (1, 2) if job.gpus > MANY else (1,),
        "pp": (1, 2, 4, 8, 16),
        "virtual": (1, 2, 4, 8),
        "schedule": (ONE_CHUNK, SEVERAL_CHUNKS),
        "ep": (1, 8, 16, 32, 64) if experts else (1,),
        "expert_tp": (1,),
        "dispatcher": (job.dispatcher if experts else "",),
        "micro_batch": (micro, 2 * micro) if micro == 1 else (micro // 2, micro),
        "zero": (0, 1),
        "recompute": ("none", "full"),
    }
    return {name: frozenset(map(str, values)) for name, values in choices.items()}


def quick_plan(job: Job, keep: Mapping[str, frozenset[str]] | None = None) -> Job:
    """The job with the fastest of the usual plans that fits; `keep` fixes knobs, as in `search`."""
    found = search(job, job.gpus, keep=usual_knobs(job) | dict(keep or {}), top=1)
    if not found.best:
        where = f"{job.gpus:,} x {job.platform.gpu.name}"
        smallest = f"the smallest needs {size(found.counts.smallest)} per GPU"
        error = PresageError(f"no usual plan of {job.model.name} fits on {where} ({smallest}): give more --gpus")
        error.exit_code = 1
        raise error
    return found.best[0].job
