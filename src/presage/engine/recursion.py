"""The (max,+) recursion over tasks, forward and backward, compiled. Arrays in, arrays out; nothing else knows Numba.

`start` and `end` are (tasks, draws) arrays; the inner loops run over draws, which lie next to each other in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["backward", "forward", "topological_order"]

Array = NDArray[Any]


@njit(cache=True)  # type: ignore[untyped-decorator]
def topological_order(ptr: Array, pred: Array, group: Array, groups: int) -> Array:
    """Tasks so that predecessors come first and the members of a meeting stand together; shorter if there is a circle.

    A meeting is one node: it is ready when every member's predecessors are done.
    """
    n = len(group)
    node = np.empty(n, np.int32)  # task -> node: tasks without a meeting keep their number, meetings come after
    for t in range(n):
        node[t] = t if group[t] < 0 else n + group[t]
    waits = np.zeros(n + groups, np.int64)
    count = np.zeros(n + groups, np.int64)
    head = np.zeros(n + 1, np.int64)  # successors by task, as a counting sort of the edges
    for t in range(n):
        waits[node[t]] += ptr[t + 1] - ptr[t]
        count[node[t]] += 1
        for k in range(ptr[t], ptr[t + 1]):
            head[pred[k] + 1] += 1
    for t in range(n):
        head[t + 1] += head[t]
    succ = np.empty(len(pred), np.int32)
    fill = head[:-1].copy()
    for t in range(n):
        for k in range(ptr[t], ptr[t + 1]):
            succ[fill[pred[k]]] = t
            fill[pred[k]] += 1
    first = np.zeros(groups + 1, np.int64)  # members by meeting
    for g in range(groups):
        first[g + 1] = first[g] + count[n + g]
    members = np.empty(first[groups], np.int32)
    put = first[:-1].copy()
    for t in range(n):
        if group[t] >= 0:
            members[put[group[t]]] = t
            put[group[t]] += 1
    order = np.empty(n, np.int32)
    tail = 0
    for t in range(n):
        if group[t] < 0 and waits[t] == 0:
            order[tail] = t
            tail += 1
    for g in range(groups):
        if waits[n + g] == 0:
            for m in range(first[g], first[g + 1]):
                order[tail] = members[m]
                tail += 1
    done = 0
    while done < tail:
        t = order[done]
        done += 1
        for k in range(head[t], head[t + 1]):
            s = succ[k]
            waits[node[s]] -= 1
            if waits[node[s]] == 0:
                if group[s] < 0:
                    order[tail] = s
                    tail += 1
                else:
                    for m in range(first[group[s]], first[group[s] + 1]):
                        order[tail] = members[m]
                        tail += 1
    return order[:tail]


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def forward(
    order: Array,
    group: Array,
    ptr: Array,
    pred: Array,
    delay: Array,
    from_start: Array,
    release: Array,
    base: Array,
    row: Array,
    draws: Array,
    first: int,
    start: Array,
    end: Array,
) -> None:
    """Fill `start` and `end` for draws first..first+width. A task's duration is draws[row] where row >= 0, else base."""
    n = len(order)
    width = start.shape[1]
    common = np.empty(width)
    longest = np.empty(width)
    i = 0
    while i < n:
        g = group[order[i]]
        stop = i + 1
        while g >= 0 and stop < n and group[order[stop]] == g:
            stop += 1
        for m in range(i, stop):
            t = order[m]
            ready = start[t]
            ready[:] = release[t]
            for k in range(ptr[t], ptr[t + 1]):
                source = start[pred[k]] if from_start[k] else end[pred[k]]
                d = delay[k]
                for j in range(width):
                    ready[j] = max(ready[j], source[j] + d)
        if stop == i + 1:
            t = order[i]
            if row[t] < 0:
                for j in range(width):
                    end[t, j] = start[t, j] + base[t]
            else:
                for j in range(width):
                    end[t, j] = start[t, j] + draws[row[t], first + j]
        else:
            common[:] = 0.0
            longest[:] = 0.0
            for m in range(i, stop):
                t = order[m]
                for j in range(width):
                    common[j] = max(common[j], start[t, j])
                    longest[j] = max(longest[j], base[t] if row[t] < 0 else draws[row[t], first + j])
            for m in range(i, stop):
                t = order[m]
                for j in range(width):
                    start[t, j] = common[j]
                    end[t, j] = common[j] + longest[j]
        i = stop


@njit(cache=True)  # type: ignore[untyped-decorator]
def backward(
    order: Array, group: Array, ptr: Array, pred: Array, delay: Array, from_start: Array, took: Array, latest: Array
) -> None:
    """Lower `latest` (per task, preset to the allowed finish) to the latest end that delays nothing after it."""
    i = len(order) - 1
    while i >= 0:
        g = group[order[i]]
        stop = i - 1
        while g >= 0 and stop >= 0 and group[order[stop]] == g:
            stop -= 1
        soonest = np.inf
        for m in range(stop + 1, i + 1):
            soonest = min(soonest, latest[order[m]])
        for m in range(stop + 1, i + 1):
            t = order[m]
            latest[t] = soonest
            for k in range(ptr[t], ptr[t + 1]):
                p = pred[k]
                bound = soonest - took[t] - delay[k]
                latest[p] = min(latest[p], bound + took[p] if from_start[k] else bound)
        i = stop
