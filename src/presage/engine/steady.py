"""Steady state: the same step again and again, each lane going on where it was, until the period shows.

One cold step flatters nobody: it starts with an empty GPU queue and a host that has not run ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.durations import Durations
from presage.engine.program import Edges, Program
from presage.engine.timeline import latest_ends

__all__ = ["period", "repeat"]


def repeat(program: Program, steps: int, carried: Edges | None = None) -> Program:
    """`steps` copies, one after another on every lane; `carried` edges lead from a task to one of the next copy.

    Release times hold for the first copy only: what a later copy may start on, its edges must say.
    """
    if steps < 0:
        raise ValueError(f"{steps} steps")
    n, meets = len(program), int(program.group.max(initial=-1)) + 1
    edges = [program.edges.shifted(k * n) for k in range(steps)]
    if carried is not None and len(carried):
        _check_carried(carried, n)
        edges += [carried.shifted((k - 1) * n, k * n) for k in range(1, steps)]
    copy = np.repeat(np.arange(steps, dtype=np.int32), n)
    group = np.tile(program.group, steps)
    return Program.of(
        program.lanes,
        np.tile(program.lane, steps),
        Edges.joined(edges),
        group=np.where(group >= 0, group + copy * meets, -1),
        release=np.where(copy == 0, np.tile(program.release, steps), 0.0),
        name=np.tile(program.name, steps),
        names=program.names,
    )


def _check_carried(carried: Edges, tasks: int) -> None:
    for ends in (carried.before, carried.after):
        if ends.min() < 0 or ends.max() >= tasks:
            bad = ends.min() if ends.min() < 0 else ends.max()
            raise ValueError(f"a carried edge names task {bad}, but a step has {tasks} tasks")


def period(
    program: Program, durations: ArrayLike | Durations, carried: Edges | None = None, steps: int = 8
) -> NDArray[np.float64]:
    """Seconds per step once run-ahead has built up, per draw: the mean over the second half of `steps` steps."""
    if steps < 2:
        raise ValueError(f"a period needs at least 2 steps, not {steps}")
    many, half = repeat(program, steps, carried), steps // 2
    copy = np.repeat(np.arange(steps, dtype=np.int32), len(program))
    done = latest_ends(many, Durations.of(durations).repeated(steps), copy, steps)
    return np.asarray((done[-1] - done[half - 1]) / (steps - half))
