"""Drawn steps of a replayed run under a noise model: its measured durations, each times what noise does to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.engine import simulate
from presage.errors import PresageError
from presage.hardware import gpu_by_name
from presage.noise.model import CLASSES
from presage.noise.work_classes import kernel_class, transfer_class
from presage.prediction.draws.distribution import StepDistribution, noise_of_gpus
from presage.prediction.draws.task_noise import TaskClasses, draw_runs
from presage.traces.replay import RankTasks, Replay

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
UNKNOWN_GPU = "h100_sxm"
HOST, STREAMS = CLASSES.index("host"), CLASSES.index("streams")


def noisy_replay(replay: Replay, noise: str | None, count: int = 200, seed: int = 0) -> StepDistribution:
    """`count` steps of the run on GPUs like its own. The ranks of the trace keep what makes them differ in it."""
    durations = np.asarray(replay.durations, np.float64)
    tasks, per_run = replay_classes(replay), _steps(replay, durations)
    if not len(per_run):
        raise PresageError("the trace has no complete step to draw")
    gpu = _gpu(replay)
    belief, source = noise_of_gpus(gpu or UNKNOWN_GPU, tasks.gpus, float(per_run.mean()), noise)
    if gpu is None:
        source += f" (the trace's GPU is not known: noise of {UNKNOWN_GPU} is taken)"

    def seconds(factors: Floats) -> Floats:
        return np.array([_steps(replay, durations * column) for column in factors.T])

    draws = draw_runs(tasks, belief.noise, seed, -(-count // len(per_run)), seconds)
    return StepDistribution(draws, (), source, seed)


def _gpu(replay: Replay) -> str | None:
    names = replay.run.traces[0].gpus
    try:
        return gpu_by_name(names[0]).key
    except (IndexError, PresageError):
        return None


def _steps(replay: Replay, durations: Floats) -> Floats:
    """[step]: seconds of the slowest rank."""
    timeline = simulate(replay.program, durations)
    each = [[s.seconds for s in replay.steps(timeline, i)] for i in range(len(replay.ranks))]
    count = min(map(len, each))
    slowest: Floats = np.array([row[:count] for row in each], np.float64).max(axis=0)
    return slowest


def replay_classes(replay: Replay) -> TaskClasses:
    """Tasks of a run with their classes of work and ranks."""
    many = len(replay.durations)
    kind, rank, step = np.full(many, HOST), np.zeros(many, np.int64), np.zeros(many, np.int32)
    for i, r in enumerate(replay.ranks):
        rank[r.first_task : r.end_task] = i
        kind[r.gpu_task] = _kinds(r)
        _mark_steps(r, step)
    across = len(replay.ranks) > 8
    alike = (1,) * len(replay.ranks)
    group = np.asarray(replay.program.group, np.int64)
    seconds = np.asarray(replay.durations, np.float64)
    return TaskClasses(replay.program, seconds, kind, rank, alike, step, group, across)


def _kinds(r: RankTasks) -> Ints:
    trace = r.trace
    out = np.full(len(trace.gpu), STREAMS)
    for e in range(len(trace.gpu)):
        if trace.is_collective[e]:
            meta = trace.collectives.get(e)
            out[e] = CLASSES.index(transfer_class(meta.name if meta else trace.gpu_name(e), meta.group if meta else ""))
        elif trace.gpu.kind[e] == 0:
            out[e] = CLASSES.index(kernel_class(trace.gpu_name(e)))
    return out


def _mark_steps(r: RankTasks, step: NDArray[np.int32]) -> None:
    """The step that each GPU event was launched in."""
    launched = np.where(r.trace.gpu.launch >= 0, r.trace.host.start[r.trace.gpu.launch], -1)
    for k, window in enumerate(r.trace.steps):
        step[r.gpu_task[launched >= window.start]] = k
