"""Steady state: the same step again and again, each lane going on where it was, until the period shows.

One cold step flatters nobody: it starts with an empty GPU queue and a host that has not run ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.durations import Durations
from presage.engine.program import Edges, Program
from presage.engine.timeline import finish_times

__all__ = ["period", "repeat"]


def repeat(program: Program, steps: int, carried: Edges | None = None) -> Program:
    """`steps` copies, one after another on every lane; `carried` edges lead from a task to one of the next copy.

    Release times hold for the first copy only: what a later copy may start on, its edges must say.
    """
    n, meets = len(program), int(program.group.max(initial=-1)) + 1
    edges = Edges.none()
    for k in range(steps):
        edges = edges + program.edges.shifted(k * n)
        if carried is not None and k:
            edges = edges + Edges(
                carried.before + np.int32((k - 1) * n),
                carried.after + np.int32(k * n),
                carried.delay,
                carried.from_start,
            )
    group = [np.where(program.group >= 0, program.group + k * meets, -1) for k in range(steps)]
    return Program.of(
        program.lanes,
        np.tile(program.lane, steps),
        edges,
        group=np.concatenate(group) if steps else None,
        release=np.concatenate([program.release, np.zeros(n * (steps - 1))]),
        name=np.tile(program.name, steps),
        names=program.names,
    )


def period(
    program: Program, durations: ArrayLike | Durations, carried: Edges | None = None, steps: int = 8
) -> NDArray[np.float64]:
    """Seconds per step once run-ahead has built up, per draw: the mean over the second half of `steps` steps."""
    if steps < 2:
        raise ValueError(f"a period needs at least 2 steps, not {steps}")
    many = repeat(program, steps, carried)
    n, half = len(program), steps // 2
    ends = finish_times(many, Durations.of(durations).repeated(steps), np.arange(len(many)))
    done = ends.reshape(steps, n, -1).max(axis=1)
    done = np.maximum.accumulate(done, axis=0)
    return np.asarray((done[-1] - done[half - 1]) / (steps - half))
