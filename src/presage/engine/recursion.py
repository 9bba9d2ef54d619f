"""The (max,+) recursion over tasks, forward and backward, compiled. Arrays in, arrays out.

Times are (tasks, draws) arrays; the inner loops run over draws, which lie next to each other in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.engine import plain
from presage.engine.compiled import compiled, compiled_or, inlined

Array = NDArray[Any]


class Wiring(NamedTuple):
    """Who waits for whom: task t waits for pred[ptr[t]:ptr[t + 1]], its release and the others of its group."""

    order: Array
    group: Array
    ptr: Array
    pred: Array
    delay: Array
    from_start: Array
    release: Array


class Seconds(NamedTuple):
    """What each task takes: draws[row] where row >= 0, else base."""

    base: Array
    row: Array
    draws: Array


@compiled_or(plain.forward, where=lambda w, *_: w.group.max(initial=-1) < 0)
def forward(
    w: Wiring, seconds: Seconds, first: int, width: int,
    slot: Array, start: Array, end: Array, part: Array, latest: Array,
) -> None:  # fmt: skip
    """Fill `start` and `end`, at slot[task], for draws first..first+width, and raise `latest`[part[task]] to the ends.

    `latest` has a column for every draw. Tasks with a negative part are left out of it.
    """
    common, longest = np.empty(width), np.empty(width)
    i = 0
    while i < len(w.order):
        stop = _meeting_stop(w, i)
        for m in range(i, stop):
            _ready(w, w.order[m], slot, start, end, width)
        if stop == i + 1:
            t = w.order[i]
            _copy(start[slot[t], :width], end[slot[t], :width])
            _add(seconds, t, first, end[slot[t], :width])
        else:
            _meet(w, seconds, first, i, stop, slot, start, common, longest)
            for m in range(i, stop):
                _copy(common, start[slot[w.order[m]], :width])
                _copy(longest, end[slot[w.order[m]], :width])
        for m in range(i, stop):
            t = w.order[m]
            if part[t] >= 0:
                _raise(latest[part[t], first : first + width], end[slot[t], :width], 0.0)
        i = stop


@inlined
def _later(a: float, b: float) -> float:
    """The larger; unlike `max` it does not check for NaN, and compiles to a select."""
    return a if a > b else b


@inlined
def _meeting_stop(w: Wiring, i: int) -> int:
    """One past the last place, in the order, of the meeting that begins at place i; i + 1 for a task of its own."""
    g, stop = w.group[w.order[i]], i + 1
    while g >= 0 and stop < len(w.order) and w.group[w.order[stop]] == g:
        stop += 1
    return stop


@inlined
def _ready(w: Wiring, t: int, slot: Array, start: Array, end: Array, width: int) -> None:
    """Put into `start` when task t could start by itself."""
    ready = start[slot[t], :width]
    ready[:] = w.release[t]
    for k in range(w.ptr[t], w.ptr[t + 1]):
        source = start if w.from_start[k] else end
        _raise(ready, source[slot[w.pred[k]], :width], w.delay[k])


@inlined
def _meet(
    w: Wiring, seconds: Seconds, first: int, i: int, stop: int, slot: Array, start: Array, common: Array, longest: Array
) -> None:
    """The common start of the members at places i..stop, and their common end."""
    common[:] = 0.0
    longest[:] = 0.0
    width = len(common)
    for m in range(i, stop):
        t = w.order[m]
        _raise(common, start[slot[t], :width], 0.0)
        if seconds.row[t] < 0:
            for j in range(width):
                longest[j] = _later(longest[j], seconds.base[t])
        else:
            _raise(longest, seconds.draws[seconds.row[t], first : first + width], 0.0)
    for j in range(width):
        longest[j] = common[j] + longest[j]


@inlined
def _add(durations: Seconds, t: int, first: int, to: Array) -> None:
    if durations.row[t] < 0:
        seconds = durations.base[t]
        for j in range(len(to)):
            to[j] += seconds
    else:
        draws = durations.draws[durations.row[t], first : first + len(to)]
        for j in range(len(to)):
            to[j] += draws[j]


@inlined
def _raise(to: Array, offer: Array, delay: float) -> None:
    for j in range(len(to)):
        to[j] = _later(to[j], offer[j] + delay)


@inlined
def _copy(source: Array, to: Array) -> None:
    for j in range(len(to)):
        to[j] = source[j]


@compiled
def forward_one(w: Wiring, seconds: Array, start: Array, end: Array) -> None:
    """`forward` for a single draw, where loops over draws would cost more than the work in them."""
    i = 0
    while i < len(w.order):
        stop = _meeting_stop(w, i)
        common, longest = 0.0, 0.0
        for m in range(i, stop):
            common = _later(common, _can_start(w, start, end, w.order[m]))
            longest = _later(longest, seconds[w.order[m]])
        for m in range(i, stop):
            start[w.order[m]] = common
            end[w.order[m]] = common + longest
        i = stop


@compiled
def ready_times(w: Wiring, start: Array, end: Array, ready: Array) -> None:
    """When each task could have started by itself, from (tasks, draws) times that are known."""
    for t in range(len(w.release)):
        ready[t, :] = w.release[t]
        for k in range(w.ptr[t], w.ptr[t + 1]):
            source = start if w.from_start[k] else end
            _raise(ready[t], source[w.pred[k]], w.delay[k])


@compiled
def backward(w: Wiring, start: Array, end: Array, slack: Array) -> None:
    """Lower `slack` (per task, preset to finish - end) to what delays no later task.

    It adds up how long each offer lies before the start it allows: never negative, and exactly zero where that offer
    set the start, which differences of latest and earliest times would miss by a rounding.
    """
    i = len(w.order) - 1
    while i >= 0:
        first = i
        g = w.group[w.order[i]]
        while g >= 0 and first > 0 and w.group[w.order[first - 1]] == g:
            first -= 1
        least = np.inf
        for m in range(first, i + 1):
            least = min(least, slack[w.order[m]])
        for m in range(first, i + 1):
            t = w.order[m]
            slack[t] = least
            for k in range(w.ptr[t], w.ptr[t + 1]):
                p = w.pred[k]
                slack[p] = min(slack[p], least + (start[t] - _offer(w, k, start, end)))
        i = first - 1


@inlined
def _offer(w: Wiring, k: int, start: Array, end: Array) -> float:
    """The start that edge k allows."""
    begin, done = start[w.pred[k]], end[w.pred[k]]  # both read, so that the choice is a select and not a branch
    return float((begin if w.from_start[k] else done) + w.delay[k])


@compiled
def chain(w: Wiring, start: Array, end: Array, last: int) -> Array:
    """The tasks that held up `last`, from it backwards: of each meeting, the member it started for."""
    n = len(w.order)
    place, path = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        place[w.order[i]] = i
    t, steps = last, 0
    while t >= 0:
        t = _last_member(w, place, start, end, t)
        path[steps] = t
        steps += 1
        t = _holder(w, start, end, t)
    return path[:steps]


@inlined
def _last_member(w: Wiring, place: Array, start: Array, end: Array, t: int) -> int:
    """The member of t's meeting that was ready last: t itself if no other was later."""
    if w.group[t] < 0:
        return t
    latest, last, i = _can_start(w, start, end, t), t, place[t]
    while i > 0 and w.group[w.order[i - 1]] == w.group[t]:
        i -= 1
    for m in range(i, _meeting_stop(w, i)):
        ready = _can_start(w, start, end, w.order[m])
        if ready > latest:
            latest, last = ready, int(w.order[m])
    return last


@inlined
def _can_start(w: Wiring, start: Array, end: Array, t: int) -> float:
    ready = float(w.release[t])
    for k in range(w.ptr[t], w.ptr[t + 1]):
        ready = _later(ready, _offer(w, k, start, end))
    return ready


@inlined
def _holder(w: Wiring, start: Array, end: Array, t: int) -> int:
    """The task whose end (or start) let task t start, or -1 if its release did."""
    best, holder = w.release[t], -1
    for k in range(w.ptr[t], w.ptr[t + 1]):
        offer = _offer(w, k, start, end)
        if offer > best or (holder < 0 and offer == best):
            best, holder = offer, w.pred[k]
    return holder
