"""Operation tables of made-up jobs whose random effects are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from made_up_ops import MadeUpJob
from presage.engine import Timeline, simulate
from presage_fit.optable import OpTable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Planted:
    """Standard deviations of logarithms; a microbatch's length moves forward by `forward`, backward by `backward`.

    Lengths are even between two ends, as where sequences are cut at a largest length.
    """

    replicas: int = 32
    stages: int = 2
    microbatches: int = 8
    chunks: int = 1
    schedule: str = "1f1b"
    forward: float = 0.22
    backward: float = 0.36
    own: float = 0.014
    rank: float = 0.01
    step: float = 0.005
    jitter: float = 0.02  # of all that no microbatch causes
    together: int = 1  # neighbouring replicas that run the same microbatches
    slow: tuple[int, float] | None = None  # a worker, and how many times as long it takes
    balanced: bool = False  # a replica's lengths of a step add up to the same

    def job(self) -> MadeUpJob:
        return MadeUpJob([self.microbatches] * self.replicas, self.stages, self.chunks, self.schedule, False)


def durations(plan: Planted, job: MadeUpJob, steps: int, rng: np.random.Generator, ranks: Floats) -> Floats:
    """(tasks, steps)."""
    shape = (plan.replicas // plan.together, plan.microbatches, steps)
    length = rng.uniform(-(3**0.5), 3**0.5, shape)
    if plan.balanced:
        length -= length.mean(axis=1, keepdims=True)
    length = np.repeat(length, plan.together, axis=0)
    common = plan.step * rng.standard_normal(steps)
    out = np.repeat(job.build.durations[:, None], steps, axis=1)
    for task, (dp, stage, _, name, _, _, microbatch, _) in enumerate(job.rows):
        if str(name).endswith("-compute"):
            by = plan.forward if str(name).startswith("f") else plan.backward
            logs = by * length[int(dp), int(microbatch)] + common + plan.own * rng.standard_normal(steps)
            out[task] *= np.exp(logs + ranks[int(dp), int(stage)])
        else:
            out[task] *= np.exp(plan.jitter * rng.standard_normal(steps))
    return out


def ranks_of(plan: Planted, rng: np.random.Generator) -> Floats:
    out = plan.rank * rng.standard_normal((plan.replicas, plan.stages))
    if plan.slow is not None:
        out[divmod(plan.slow[0], plan.stages)] += np.log(plan.slow[1])
    return out


def table_of(plan: Planted, steps: int, seed: int = 0) -> OpTable:
    """A table of so many steps, and of no file."""
    rng = np.random.default_rng(seed)
    job = plan.job()
    line = simulate(job.build.build(), durations(plan, job, steps, rng, ranks_of(plan, rng)))
    return as_table(job, line, np.arange(steps))


def true_times(plan: Planted, steps: int, seed: int = 0) -> Floats:
    """Seconds of many more steps of the same job on the same ranks."""
    ranks, rng = ranks_of(plan, np.random.default_rng(seed)), np.random.default_rng([seed, 1])
    job = plan.job()
    program = job.build.build()
    pieces = [simulate(program, durations(plan, job, 250, rng, ranks)).finish for _ in range(-(-steps // 250))]
    return np.concatenate([np.asarray(p) for p in pieces])


def as_table(job: MadeUpJob, line: Timeline, ids: NDArray[np.int64]) -> OpTable:
    tasks, steps = line.start.shape
    ops, op = np.unique([str(r[3]) for r in job.rows], return_inverse=True)
    whole = [np.repeat(np.array([int(r[k]) for r in job.rows]), steps) for k in (0, 1, 2, 4, 5, 6, 7)]
    dp, stage, rank, seq, chunk, microbatch, model_chunk = whole
    return OpTable(
        path="trace-PLANTED.csv",
        ops=tuple(ops.tolist()),
        op=np.repeat(op.astype(np.int64), steps),
        dp=dp,
        stage=stage,
        rank=rank,
        step=np.tile(ids, tasks),
        seq=seq,
        chunk=chunk,
        microbatch=microbatch,
        model_chunk=model_chunk,
        start=line.ready.ravel(),
        duration=(line.end - line.ready).ravel(),
    )
