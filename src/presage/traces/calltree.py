"""The call tree of host threads, by containment, and who owns each stretch of a thread's time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine.compiled import compiled

Array = NDArray[Any]

# A child may overrun its parent by this much: clocks are rounded to the microsecond in some traces.
TOLERANCE_NS = 1000


@compiled
def parents(thread: Array, start: Array, end: Array, tolerance: int = TOLERANCE_NS) -> Array:
    """The innermost event around each, or -1. Events come sorted by thread, start, longest first."""
    n = len(start)
    parent = np.full(n, -1, np.int32)
    stack = np.empty(n, np.int32)
    depth = 0
    for i in range(n):
        if i and thread[i] != thread[i - 1]:
            depth = 0
        while depth:
            top = stack[depth - 1]
            if start[i] < end[top] and end[i] <= end[top] + tolerance:
                break
            depth -= 1
        if depth:
            parent[i] = stack[depth - 1]
        stack[depth] = i
        depth += 1
    return parent


@compiled
def calls_inside(thread: Array, start: Array, end: Array, is_call: Array, tolerance: int = TOLERANCE_NS) -> Array:
    """Starts of events, those of runtime calls moved so that no operator begins inside a call.

    Calls are stamped by another clock than operators, tens of microseconds off in some traces. A call makes no
    operators: one that seems to was made after them, inside the operator that outlasts it.
    """
    moved = start.copy()
    n = len(start)
    for i in range(n):
        if not is_call[i]:
            continue
        j = i + 1
        while j < n and thread[j] == thread[i] and start[j] < end[i]:
            if not is_call[j]:
                if end[j] >= end[i] - tolerance:
                    moved[i] = max(moved[i], start[j])
                else:
                    moved[i] = max(moved[i], min(end[j], end[i]))
            j += 1
    return moved


@compiled
def stretches(thread: Array, start: Array, end: Array, parent: Array) -> tuple[Array, Array, Array]:
    """Every thread's time as consecutive stretches (from, to, owner): the innermost event there, or -1 between events.

    Each event has at least one stretch, if of no length, so that whatever hangs on the event has a place.
    """
    n = len(start)
    lo = np.empty(4 * n + 4, np.int64)
    hi = np.empty(4 * n + 4, np.int64)
    owner = np.empty(4 * n + 4, np.int32)
    k = 0
    stack = np.empty(n + 1, np.int32)
    depth = 0
    now = 0
    for i in range(n + 1):
        new_thread = i == 0 or i == n or thread[i] != thread[i - 1]
        while depth and (new_thread or stack[depth - 1] != parent[i]):
            top = stack[depth - 1]
            if end[top] > now:
                lo[k], hi[k], owner[k] = now, end[top], top
                k += 1
                now = end[top]
            depth -= 1
        if i == n:
            break
        if new_thread:
            now = start[i]
        if start[i] > now:
            lo[k], hi[k], owner[k] = now, start[i], stack[depth - 1] if depth else -1
            k += 1
            now = start[i]
        # a leaf of no length, or one that a neighbour's rounding has overtaken, still gets its stretch
        if i + 1 == n or parent[i + 1] != i:
            lo[k], hi[k], owner[k] = now, max(now, end[i]), i
            k += 1
            now = max(now, end[i])
        stack[depth] = i
        depth += 1
    return lo[:k], hi[:k], owner[:k]
