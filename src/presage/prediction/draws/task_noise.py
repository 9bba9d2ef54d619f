"""Drawn steps of a program of tasks (a captured step on one GPU or on several ranks, a replayed trace) under a noise
model: the same effects as a job's, by class of work, rank and step, through the same engine.

A task takes its seconds times exp(rank + step + own): `rank` is the same for all tasks of a class on a rank in a run,
`step` for all ranks in a step, `own` is each task's, and of a collective the same for all its members. A rank that
stands for many equal ones is as slow as the slowest of them. What is common to all GPUs comes on top of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, Program, latest_ends
from presage.errors import PresageError
from presage.noise.model import CLASSES, COMMUNICATION, NoiseModel
from presage.noise.sampling import RandomStreams
from presage.prediction.draws.draw import Draws, common_factors, stall_seconds
from presage.prediction.draws.replica_pools import STANDARD, TENSOR

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AT_ONCE = 4_000_000  # tasks x runs that are held
NODE = 8  # GPUs: rates of stalls are told by nodes of eight


@dataclass(frozen=True, eq=False)
class TaskClasses:
    """What noise has to know of a program's tasks."""

    program: Program
    seconds: Floats  # [task]
    kind: Ints  # [task]: place of its class in CLASSES; -1 where it takes no noise
    rank: Ints  # [task]
    alike: tuple[int, ...]  # by rank: GPUs that it stands for
    step: NDArray[np.int32]  # [task]
    group: Ints  # [task]: number of its collective, -1 where it is none
    across: bool = False  # transfers leave a node

    @property
    def steps(self) -> int:
        return int(self.step.max(initial=0)) + 1

    @property
    def gpus(self) -> int:
        return sum(self.alike)


def draw_tasks(tasks: TaskClasses, noise: NoiseModel, seed: int, count: int, skipped: int = 0) -> Draws:
    """Steps of runs of the program, of which the first `skipped` are left out."""
    kept = tasks.steps - skipped
    part = np.asarray(tasks.step, np.int32)

    def ends(factors: Floats) -> Floats:
        done = latest_ends(tasks.program, Durations.of(tasks.seconds[:, None] * factors), part, tasks.steps)
        return np.diff(done, axis=0, prepend=0.0)[skipped:].T

    return draw_runs(tasks, noise, seed, -(-count // kept), ends)


def draw_runs(
    tasks: TaskClasses, noise: NoiseModel, seed: int, runs: int, seconds: Callable[[Floats], Floats]
) -> Draws:
    """Draws of so many runs; `seconds` gives [runs, steps] from factors of the tasks [task, runs]."""
    if noise.load.sd > 0:
        raise PresageError("the noise file has a [load] of microbatches, which single tasks do not tell: remove it")
    quiet = seconds(np.ones((len(tasks.seconds), 1)))
    width = max(1, AT_ONCE // max(1, len(tasks.seconds)))
    lasting, passing = [], []
    for block, first in enumerate(range(0, runs, width)):
        streams, size = RandomStreams(seed, block, evenly=True), min(width, runs - first)
        found = seconds(task_factors(tasks, noise, streams, size))
        lasting.append(found * common_factors(noise, streams, found.shape, True))
        rate = noise.stalls.per_step(max(1.0, tasks.gpus / NODE), float(quiet.mean()))
        jitter = noise.common.jitter.sample(streams.even("jitter"), found.shape)
        passing.append(jitter + stall_seconds(noise, streams, found.shape, rate))
    steady, more = np.concatenate(lasting), np.concatenate(passing)
    return Draws(np.maximum(steady + more, 0.0), float(quiet.mean()), steady)


def task_factors(tasks: TaskClasses, noise: NoiseModel, streams: RandomStreams, runs: int) -> Floats:
    """[task, run]: how many times as long each takes."""
    log = np.zeros((len(tasks.seconds), runs))
    place = _places(tasks, streams, runs)
    for k, name in enumerate(CLASSES):
        at, s = np.flatnonzero(tasks.kind == k), noise.of(name)
        if not len(at):
            continue
        if s.rank and name not in COMMUNICATION:
            log[at] += s.rank * place[tasks.rank[at]]
        if s.step:
            log[at] += s.step * streams(f"step of {name}").standard_normal((tasks.steps, runs))[tasks.step[at]]
        if s.own:
            log[at] += s.own * _own(tasks.group[at], streams(f"own of {name}"), runs)
    factors = np.exp(log)
    _slow_gpus(factors, tasks, noise, streams)
    _network(factors, tasks, noise, streams)
    return factors


def _places(tasks: TaskClasses, streams: RandomStreams, runs: int) -> Floats:
    """[rank, run]: where its GPU is among the usual ones; of equal ranks the slowest's."""
    u = streams.even("gpus").random((len(tasks.alike), runs))
    return np.asarray(STANDARD.quantile(u ** (1 / np.array(tasks.alike)[:, None])))


def _own(group: Ints, rng: np.random.Generator, runs: int) -> Floats:
    """[task, run]: each task's, and of a collective one for all its members."""
    alone = np.where(group < 0, np.arange(len(group)) + group.max(initial=0) + 1, group)
    _, number = np.unique(alone, return_inverse=True)
    return np.asarray(rng.standard_normal((int(number.max(initial=0)) + 1, runs))[number])


def _slow_gpus(factors: Floats, tasks: TaskClasses, noise: NoiseModel, streams: RandomStreams) -> None:
    """Products and attention of slow GPUs take their factor at least."""
    if not noise.slow.share:
        return
    size = (len(tasks.alike), factors.shape[1])
    share = -np.expm1(np.array(tasks.alike)[:, None] * np.log1p(-noise.slow.share))
    some = streams.even("slow gpus").random(size) < share
    beyond = np.where(some, noise.slow.factor.sample(streams("slow factors"), size), 0.0)
    at = np.flatnonzero(np.isin(tasks.kind, TENSOR))
    factors[at] = np.maximum(factors[at], beyond[tasks.rank[at]])


def _network(factors: Floats, tasks: TaskClasses, noise: NoiseModel, streams: RandomStreams) -> None:
    """Transfers between nodes take as long as the network's state in their step makes them."""
    if not tasks.across or noise.network.factors == (1.0,):
        return
    states = noise.network.path(streams.even("network"), tasks.steps, factors.shape[1])
    at = np.flatnonzero(np.isin(tasks.kind, [CLASSES.index(k) for k in COMMUNICATION]))
    factors[at] *= np.array(noise.network.factors)[states][tasks.step[at]]
