"""A job's step as a timeline of the engine: every microbatch on every stage, then replicas, optimizer, slow ranks."""

from __future__ import annotations

import numpy as np

from presage.engine import Program, Timeline, simulate
from presage.errors import PresageError
from presage.parallel.pipeline_run import pipeline_program
from presage.prediction.jobs.job_step import JobStep

MOST = 1_000_000  # tasks: more than a browser draws
TAIL = {"dp": "gradients and parameters between replicas", "optimizer": "optimizer"}


def job_timeline(step: JobStep) -> Timeline:
    """The timeline, one lane per stage; tasks after the pipeline last as long as they are exposed."""
    run = step.pipeline
    count = run.schedule.stages * run.schedule.virtual * run.schedule.microbatches * 2
    if count > MOST:
        raise PresageError(f"a timeline of {count:,} tasks is too long to draw: try a smaller training.global_batch")
    made, kind = pipeline_program(run.schedule, run.durations)
    seconds, _ = run.durations.kinds(run.schedule.meets)
    tail = [(name, float(step.parts.get(part, 0.0))) for part, name in TAIL.items() if step.parts.get(part, 0.0) > 0]
    return simulate(_with_tail(made, [name for name, _ in tail], run.total), _durations(made, seconds[kind], tail))


def _with_tail(made: Program, tail: list[str], begin: float) -> Program:
    """The same tasks on all lanes, from `begin` on."""
    stages, more = len(made.lanes), len(made.lanes) * len(tail)
    name = np.repeat(len(made.names) + np.arange(len(tail)), stages)
    return Program.of(
        made.lanes,
        np.concatenate([made.lane, np.tile(np.arange(stages), len(tail))]),
        made.edges,
        group=np.concatenate([made.group, np.full(more, -1)]),
        release=np.concatenate([made.release, np.full(more, begin)]),
        name=np.concatenate([made.name, name]),
        names=(*made.names, *tail),
    )


def _durations(made: Program, seconds: np.ndarray, tail: list[tuple[str, float]]) -> np.ndarray:
    return np.concatenate([seconds, np.repeat([took for _, took in tail], len(made.lanes))])
