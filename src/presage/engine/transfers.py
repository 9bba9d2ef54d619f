"""Transfers of tasks' inputs and outputs in buckets, beside the tasks: how much of them nothing hides.

Each lane (a stage) has transfers of its own, one for each task, on a lane beside it. `unfolded` in
tests/engine/test_transfers.py has the same as a Program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.engine.compiled import compiled, inlined

Floats = NDArray[np.float64]


@inlined
def _total(values: Floats) -> float:
    """The sum in order: NumPy's own adds in pairs, which differs in the last bit from what is compiled."""
    total = 0.0
    for value in values:
        total += value
    return total


@compiled
def exposed_after(transfer: Floats, buckets: Floats, end: Floats, work: Floats, finish: float, overlap: bool) -> float:
    """Seconds from `finish` to the end of the last transfer of a task's output.

    By [lane, task]: seconds of the transfer and how many buckets it is cut into, when the task ends, how long it takes.
    With `overlap` a bucket leaves as soon as the task has filled it; else all leave after the lane's last task.
    """
    most = 0.0
    for s in range(len(transfer)):
        at = 0.0
        if not overlap:
            at = end[s].max() + _total(transfer[s])
        else:
            for c in np.argsort(end[s], kind="mergesort"):
                at = max(at, end[s, c] - work[s, c] * (1 - 1 / buckets[s, c])) + transfer[s, c]
                at = max(at, end[s, c] + transfer[s, c] / buckets[s, c])
        most = max(most, at - finish)
    return most


@compiled
def exposed_before(transfer: Floats, buckets: Floats, start: Floats, work: Floats, overlap: bool) -> float:
    """Seconds by which tasks start later because their inputs are still on the way.

    A task needs the first bucket to start, and the last but one to end when it should; without `overlap` all transfers
    of a lane come before its first task.
    """
    late = 0.0
    for s in range(len(transfer)):
        if not overlap:
            late = max(late, _total(transfer[s]))
            continue
        at = 0.0
        for c in np.argsort(start[s], kind="mergesort"):
            one, begin = transfer[s, c] / buckets[s, c], start[s, c]
            late = max(late, at + one - begin)
            at += transfer[s, c]
            late = max(late, at - one - begin - work[s, c])
    return late
