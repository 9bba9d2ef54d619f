"""Deadlock: tasks that wait for each other in a circle, and which ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError

__all__ = ["Deadlock", "circle", "told"]

Ints = NDArray[Any]


class Deadlock(PresageError):
    """The tasks wait for each other in a circle, as when two ranks call their collectives in different orders."""


def circle(order: Ints, group: Ints, ptr: Ints, pred: Ints) -> list[int]:
    """Tasks each of which waits for the one before it, the first for the last, directly or by a mate of its meeting."""
    stuck = np.ones(len(group), np.bool_)
    stuck[order] = False
    members: dict[int, list[int]] = {}
    for t in np.flatnonzero(stuck & (group >= 0)).tolist():
        members.setdefault(int(group[t]), []).append(t)
    seen: dict[int, int] = {}  # node -> its place in the walk; meetings are numbered below zero
    walk: list[int] = []
    task = int(np.flatnonzero(stuck)[0])
    while (node := task if group[task] < 0 else -1 - int(group[task])) not in seen:
        seen[node] = len(walk)
        mates = members[int(group[task])] if group[task] >= 0 else [task]
        waiting, task = next((t, int(p)) for t in mates for p in pred[ptr[t] : ptr[t + 1]] if stuck[p])
        walk.append(waiting)
    return walk[seen[node] :][::-1]


def told(tasks: list[int], stuck: int, label: Callable[[int], str], show: int = 6) -> str:
    """One sentence on a circle: how many tasks it stops, and who waits for whom."""
    names = [label(t) for t in tasks[:show]] + ([f"{len(tasks) - show} more"] if len(tasks) > show else [])
    ring = " -> ".join([*names, names[0]])
    return f"{stuck} tasks can never start; each of these waits for the one before it, in a circle: {ring}"
