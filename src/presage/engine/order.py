"""What follows from a program's structure alone, compiled: predecessors, an order to visit tasks in, memory slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine import plain
from presage.engine.compiled import compiled, compiled_or
from presage.errors import PresageError

Array = NDArray[Any]


@compiled_or(plain.predecessors, where=lambda *_: True)
def predecessors(
    lane: Array, gap: Array, before: Array, after: Array, delay: Array, from_start: Array
) -> tuple[Array, Array, Array, Array]:
    """Edges by the task they lead to, then the task before it on its lane: (ptr, pred, delay, from_start).

    A counting sort: with a million tasks, several times faster than sorting the edges.
    """
    n = len(lane)
    previous = _previous_on_lane(lane, len(gap))
    ptr = _starts(after, previous)
    fill = ptr[:-1].copy()
    pred, wait, begin = np.empty(ptr[n], np.int32), np.empty(ptr[n], np.float64), np.zeros(ptr[n], np.bool_)
    for e in range(len(after)):
        k = fill[after[e]]
        pred[k], wait[k], begin[k] = before[e], delay[e], from_start[e]
        fill[after[e]] += 1
    for t in range(n):
        if previous[t] >= 0:
            pred[fill[t]], wait[fill[t]] = previous[t], gap[lane[t]]
    return ptr, pred, wait, begin


@compiled
def _previous_on_lane(lane: Array, lanes: int) -> Array:
    """The task before each one on its lane, or -1: what makes every lane a queue."""
    last = np.full(lanes, -1, np.int32)
    previous = np.empty(len(lane), np.int32)
    for t in range(len(lane)):
        previous[t] = last[lane[t]]
        last[lane[t]] = t
    return previous


@compiled
def _starts(after: Array, previous: Array) -> Array:
    ptr = np.zeros(len(previous) + 1, np.int64)
    for a in after:
        ptr[a + 1] += 1
    for t in range(len(previous)):
        ptr[t + 1] += ptr[t] + (previous[t] >= 0)
    return ptr


@compiled_or(plain.topological_order, where=lambda ptr, pred, group, groups: not groups)  # noqa: ARG005
def topological_order(ptr: Array, pred: Array, group: Array, groups: int) -> Array:
    """Tasks so that predecessors come first and the members of a meeting stand together; shorter if there is a circle.

    A meeting is one node: it is ready when every member's predecessors are done.
    """
    n = len(group)
    head, succ = _successors(ptr, pred)
    first, members, waits = _nodes(ptr, group, groups)
    order = np.empty(n, np.int32)
    tail = _sources(group, waits, first, members, order)
    done = 0
    while done < tail:
        t = order[done]
        done += 1
        for k in range(head[t], head[t + 1]):
            s = succ[k]
            node = s if group[s] < 0 else n + group[s]
            waits[node] -= 1
            if waits[node] == 0:
                tail = _append(s, group[s], first, members, order, tail)
    return order[:tail]


@compiled
def _successors(ptr: Array, pred: Array) -> tuple[Array, Array]:
    n = len(ptr) - 1
    head = np.zeros(n + 1, np.int64)
    for p in pred:
        head[p + 1] += 1
    for t in range(n):
        head[t + 1] += head[t]
    succ = np.empty(len(pred), np.int32)
    fill = head[:-1].copy()
    for t in range(n):
        for k in range(ptr[t], ptr[t + 1]):
            succ[fill[pred[k]]] = t
            fill[pred[k]] += 1
    return head, succ


@compiled
def _nodes(ptr: Array, group: Array, groups: int) -> tuple[Array, Array, Array]:
    """Members by meeting (first, members), and how many edges each node waits for: tasks, then meetings."""
    n = len(group)
    first = np.zeros(groups + 1, np.int64)
    waits = np.zeros(n + groups, np.int64)
    for t in range(n):
        waits[t if group[t] < 0 else n + group[t]] += ptr[t + 1] - ptr[t]
        if group[t] >= 0:
            first[group[t] + 1] += 1
    for g in range(groups):
        first[g + 1] += first[g]
    members = np.empty(first[groups], np.int32)
    fill = first[:-1].copy()
    for t in range(n):
        if group[t] >= 0:
            members[fill[group[t]]] = t
            fill[group[t]] += 1
    return first, members, waits


@compiled
def _sources(group: Array, waits: Array, first: Array, members: Array, order: Array) -> int:
    """Put the nodes that wait for nothing first in `order`; how many tasks that makes."""
    n, tail = len(group), 0
    for t in range(n):
        if group[t] < 0 and waits[t] == 0:
            tail = _append(t, -1, first, members, order, tail)
    for g in range(len(first) - 1):
        if waits[n + g] == 0:
            tail = _append(-1, g, first, members, order, tail)
    return tail


@compiled
def _append(task: int, meeting: int, first: Array, members: Array, order: Array, tail: int) -> int:
    if meeting < 0:
        order[tail] = task
        return tail + 1
    for m in range(first[meeting], first[meeting + 1]):
        order[tail] = members[m]
        tail += 1
    return tail


@compiled_or(plain.memory_slots, where=lambda order, group, ptr, pred: group.max(initial=-1) < 0)  # noqa: ARG005
def memory_slots(order: Array, group: Array, ptr: Array, pred: Array) -> tuple[Array, int]:
    """A place in memory for each task's times, used again once nobody waits for them; how many places that takes.

    A pass over many draws then works in a few rows that stay in the cache, however long the program is.
    """
    n = len(order)
    left = np.zeros(n, np.int64)
    for p in pred:
        left[p] += 1
    slot, free = np.empty(n, np.int32), np.empty(n, np.int32)
    spare, used, i = 0, 0, 0
    while i < n:
        stop = i + 1
        while group[order[i]] >= 0 and stop < n and group[order[stop]] == group[order[i]]:
            stop += 1
        for m in range(i, stop):  # members write while the others' predecessors are still read: no slot is freed before
            spare -= 1
            slot[order[m]] = free[spare] if spare >= 0 else used
            used += spare < 0
            spare = max(spare, 0)
        for m in range(i, stop):
            spare = _give_back(order[m], ptr, pred, left, slot, free, spare)
        i = stop
    return slot, used


@compiled
def _give_back(t: int, ptr: Array, pred: Array, left: Array, slot: Array, free: Array, spare: int) -> int:
    for k in range(ptr[t], ptr[t + 1]):
        left[pred[k]] -= 1
        if left[pred[k]] == 0:
            free[spare] = slot[pred[k]]
            spare += 1
    if left[t] == 0:
        free[spare] = slot[t]
        spare += 1
    return spare


# ---- Deadlock: tasks that wait for each other in a circle, and which ones.

Ints = NDArray[Any]


class Deadlock(PresageError):
    """The tasks wait for each other in a circle, as when two ranks call their collectives in different orders."""

    def __init__(self, sentence: str, tasks: list[int] | None = None) -> None:
        self.tasks = tasks or []
        super().__init__(sentence)


def find_circle(order: Ints, group: Ints, ptr: Ints, pred: Ints) -> list[int]:
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


def describe_circle(tasks: list[int], stuck: int, label: Callable[[int], str], show: int = 6) -> str:
    """One sentence on a circle: how many tasks it stops, and who waits for whom."""
    names = [label(t) for t in tasks[:show]] + ([f"{len(tasks) - show} more"] if len(tasks) > show else [])
    ring = " -> ".join([*names, names[0]])
    return f"{stuck} tasks can never start; each of these waits for the one before it, in a circle: {ring}"
