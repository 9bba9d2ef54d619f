"""Drawn steps of a predicted step, on one GPU or on several ranks, under a noise model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.costs.kernel_model import OpTime
from presage.graph.work import collective
from presage.noise.model import CLASSES
from presage.noise.work_classes import family_class, transfer_class
from presage.prediction.draws.distribution import StepDistribution, noise_of_gpus
from presage.prediction.draws.task_noise import TaskClasses, draw_tasks
from presage.prediction.rank_program import Member, rank_program
from presage.prediction.rank_set import RankBasis
from presage.prediction.step import StepProgram, StepResult
from presage.prediction.step_program import STREAM, WARM_UP, program

Ints = NDArray[np.int64]
HOST = CLASSES.index("host")


def noisy_step(p: StepResult, noise: str | Path | None, count: int = 2_000, seed: int = 0) -> StepDistribution:
    """`count` steps of a predicted step: a noise file, or a preset for its GPUs."""
    tasks = step_classes(p)
    belief, source = noise_of_gpus(p.basis.gpu, tasks.gpus, p.step.p50, None if noise is None else str(noise))
    draws = draw_tasks(tasks, belief.noise, seed, count, min(WARM_UP, tasks.steps - 1))
    return StepDistribution(draws, (), source, seed)


def step_classes(p: StepResult) -> TaskClasses:
    """Tasks of a predicted step with their classes of work and ranks."""
    if isinstance(p.basis, RankBasis):
        return _of_ranks(p.basis, p.steps)
    built, steps = p.basis.program, p.steps
    many = program(built.tasks, steps, built.host.calls, [op.name for op in built.graph.ops])
    kind, step = task_kinds(built, p.basis.times), np.arange(steps, dtype=np.int32)
    size = len(built.tasks)
    alone = np.full(steps * size, -1, np.int64)
    ranks = np.zeros(steps * size, np.int64)
    seconds = np.tile(built.tasks.seconds, steps)
    return TaskClasses(many, seconds, np.tile(kind, steps), ranks, (1,), np.repeat(step, size), alone)


def _of_ranks(basis: RankBasis, steps: int) -> TaskClasses:
    team = basis.team
    ranks = rank_program(team.ranks.members, steps)
    kinds = [_member_kinds(m, team.times) for m in ranks.members]
    return TaskClasses(
        ranks.program,
        ranks.seconds,
        np.concatenate([np.tile(k, steps) for k in kinds]),
        ranks.member.astype(np.int64),
        tuple(m.fold.ranks for m in ranks.members),
        ranks.step,
        np.asarray(ranks.program.group, np.int64),
        team.layout.ranks > team.platform.domain,
    )


def _member_kinds(m: Member, times: Sequence[Sequence[OpTime]]) -> Ints:
    """Of a rank's own step; ranks of one step share its times."""
    mine = next((t for t in times if len(t) == len(m.step.graph.ops)), times[0])
    return task_kinds(m.step, mine)


def task_kinds(step: StepProgram, times: Sequence[OpTime]) -> Ints:
    """[task]: the place of its class of work; the host's own tasks are the host's."""
    tasks, groups = step.tasks, dict(step.tasks.meetings)
    of_op = np.array([CLASSES.index(family_class(t.family)) for t in times] + [HOST])
    kind = np.where(tasks.lane < STREAM, HOST, of_op[tasks.op])
    for task in np.flatnonzero(tasks.lane >= STREAM):
        op = int(tasks.op[task])
        if op >= 0 and (task in groups or times[op].family == "communication"):
            name = collective(step.graph.ops[op]) or step.graph.ops[op].name
            kind[task] = CLASSES.index(transfer_class(name, groups.get(int(task), "")))
    return np.asarray(kind, np.int64)
