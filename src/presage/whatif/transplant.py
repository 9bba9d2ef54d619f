"""A what-if with measured numbers: one run's host with another run's kernels, op by op.

The other run may be of another batch size, GPU or precision: what must agree is the sequence of operators. Each
operator's kernels are stretched so that together they take as long as the same operator's kernels did there.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.traces.replay import NS, RankTasks, Replay
from presage.traces.trace import HostKind, Trace
from presage.traces.waits import launch_times

__all__ = ["LEAST_COVERED", "innermost_op", "kernels_of", "launching_ops"]

LEAST_COVERED = 0.8  # of the other run's kernel time: below it, the two do not run the same operators

Ints = NDArray[np.int64]


def innermost_op(trace: Trace) -> list[int]:
    """For each host event the innermost operator around it (itself included), or -1."""
    host = trace.host
    inner = [-1] * len(host)
    for i, parent in enumerate(host.parent):
        inner[i] = i if host.kind[i] == HostKind.OP else (inner[parent] if parent >= 0 else -1)
    return inner


def launching_ops(trace: Trace) -> list[tuple[str, Ints]]:
    """The operators that launched something, in the order the host ran them, each with its GPU events."""
    inner = innermost_op(trace)
    found: dict[int, list[int]] = {}
    for event in np.argsort(launch_times(trace.host, trace.gpu), kind="stable"):
        launch = int(trace.gpu.launch[event])
        if launch >= 0 and inner[launch] >= 0:
            found.setdefault(inner[launch], []).append(int(event))
    order = sorted(found, key=lambda op: int(trace.host.start[op]))
    return [(trace.host_name(op), np.array(found[op], np.int64)) for op in order]


def kernels_of(replay: Replay, other: Replay) -> tuple[Replay, float]:
    """The first replay with the second one's kernel times, and the share of those that found their place."""
    if len(replay.ranks) != len(other.ranks):
        raise PresageError(f"{len(replay.ranks)} ranks cannot take the kernels of {len(other.ranks)}")
    durations = replay.durations.astype(np.float64)
    given = whole = 0.0
    for mine, theirs in zip(replay.ranks, other.ranks, strict=True):
        placed, total = _transplant(durations, mine, theirs)
        given, whole = given + placed, whole + total
    covered = given / whole if whole else 0.0
    if covered < LEAST_COVERED:
        raise PresageError(
            f"only {covered:.0%} of the other trace's kernel time belongs to operators that this one runs in the same "
            "order: it must be of the same training step"
        )
    return replace(replay, durations=durations), covered


def _transplant(durations: NDArray[np.float64], mine: RankTasks, theirs: RankTasks) -> tuple[float, float]:
    """Change one rank's durations; (placed, total) seconds of the other's kernels."""
    ours, others = launching_ops(mine.trace), launching_ops(theirs.trace)
    took = (mine.trace.gpu.end - mine.trace.gpu.start) * NS
    took_there = (theirs.trace.gpu.end - theirs.trace.gpu.start) * NS
    placed = 0.0
    names, other_names = [name for name, _ in ours], [name for name, _ in others]
    for block in SequenceMatcher(None, names, other_names, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            events, there = ours[block.a + k][1], float(took_there[others[block.b + k][1]].sum())
            here = float(took[events].sum())
            durations[mine.gpu_task[events]] = mine.lead[events] * NS + took[events] * (there / here if here else 0.0)
            placed += there
    return placed, float(sum(took_there[events].sum() for _, events in others))
