"""Twins of compiled functions for programs too small for Numba to pay: lists and NumPy in place of loops over arrays.

Each returns what its compiled twin returns, to the bit. They know no meetings: a program with any runs the compiled
function's own Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def predecessors(
    lane: Array, gap: Array, before: Array, after: Array, delay: Array, from_start: Array
) -> tuple[Array, Array, Array, Array]:
    by_lane = np.argsort(lane, kind="stable")
    follows = np.flatnonzero(lane[by_lane[1:]] == lane[by_lane[:-1]])
    task, previous = by_lane[follows + 1], by_lane[follows].astype(np.int32)
    to = np.concatenate([after, task])
    order = np.argsort(to, kind="stable")  # the task before it on its lane comes last of a task's predecessors
    ptr = np.zeros(len(lane) + 1, np.int64)
    np.cumsum(np.bincount(to, minlength=len(lane)), out=ptr[1:])
    pred = np.concatenate([before, previous])[order]
    wait = np.concatenate([delay, gap[lane[task]]])[order]
    return ptr, pred, wait, np.concatenate([from_start, np.zeros(len(task), np.bool_)])[order]


def topological_order(ptr: Array, pred: Array, group: Array, groups: int) -> Array:
    del group, groups
    n = len(ptr) - 1
    task = np.repeat(np.arange(n), np.diff(ptr))
    succ = task[np.argsort(pred, kind="stable")].tolist()
    head = np.concatenate([[0], np.cumsum(np.bincount(pred, minlength=n))]).tolist()
    waits = np.diff(ptr).tolist()
    order = [t for t in range(n) if not waits[t]]
    for t in order:  # which grows as it is read
        for s in succ[head[t] : head[t + 1]]:
            waits[s] -= 1
            if not waits[s]:
                order.append(s)
    return np.array(order, np.int32)


def memory_slots(order: Array, group: Array, ptr: Array, pred: Array) -> tuple[Array, int]:
    del group
    n = len(order)
    left = np.bincount(pred, minlength=n).tolist()
    starts, sources = ptr.tolist(), pred.tolist()
    slot, used = [0] * n, 0
    free: list[int] = []
    for t in order.tolist():
        if free:
            slot[t] = free.pop()
        else:
            slot[t] = used
            used += 1
        for p in sources[starts[t] : starts[t + 1]]:
            left[p] -= 1
            if not left[p]:
                free.append(slot[p])
        if not left[t]:
            free.append(slot[t])
    return np.array(slot, np.int32), used


def forward(
    w: Any, seconds: Any, first: int, width: int, slot: Array, start: Array, end: Array, part: Array, latest: Array
) -> None:
    order, ptr, pred, delay, from_start, release = (
        x.tolist() for x in (w.order, w.ptr, w.pred, w.delay, w.from_start, w.release)
    )
    place, part_of, row, base = slot.tolist(), part.tolist(), seconds.row.tolist(), seconds.base.tolist()
    if width == 1:
        draws = [base[t] if row[t] < 0 else float(seconds.draws[row[t], first]) for t in range(len(order))]
        begins, ends = [0.0] * len(start), [0.0] * len(end)
        tops = latest[:, first].tolist()
        for t in order:
            at, ready = place[t], release[t]
            for k in range(ptr[t], ptr[t + 1]):
                offer = (begins if from_start[k] else ends)[place[pred[k]]] + delay[k]
                ready = offer if offer > ready else ready
            begins[at], ends[at] = ready, ready + draws[t]
            if part_of[t] >= 0 and ends[at] > tops[part_of[t]]:
                tops[part_of[t]] = ends[at]
        start[:, 0], end[:, 0], latest[:, first] = begins, ends, tops
        return
    begin, done = list(start[:, :width]), list(end[:, :width])
    top = list(latest[:, first : first + width])
    draws = list(seconds.draws[:, first : first + width])
    offer, add, raise_to = np.empty(width), np.add, np.maximum
    for t in order:
        ready, over = begin[place[t]], done[place[t]]
        ready.fill(release[t])
        for k in range(ptr[t], ptr[t + 1]):
            add((begin if from_start[k] else done)[place[pred[k]]], delay[k], offer)
            raise_to(ready, offer, out=ready)
        add(ready, base[t] if row[t] < 0 else draws[row[t]], over)
        if part_of[t] >= 0:
            raise_to(top[part_of[t]], over, out=top[part_of[t]])
