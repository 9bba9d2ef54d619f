"""How much longer a step takes for every further group of microbatches, known for certain from a step with few of them.

Once all stages are at work, a schedule does the same again and again. Take a step in which, over the last `rounds`
rounds of that, no task fell further behind than `pace` seconds: then none ever will, whatever comes after, because a
step's times only depend on earlier ones by sums and maxima. And if what held up the end of the step runs through a task
and the one `rounds` rounds later, `pace` seconds apart, that stretch can be repeated in a longer step, which so takes
no less. Both together: each further `rounds` rounds take exactly `pace` seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.engine.compiled import compiled
from presage.engine.pairs import Pairs, forward_pairs, holder

__all__ = ["Stretch", "settled"]

Array = NDArray[Any]
TIE = 1e-15  # of the step: what is nearer than this ended at the same time
SAME = 1e-12  # of the step: sums in another order differ by less


class Stretch(NamedTuple):
    """Where a structure repeats itself: see `Structure`."""

    round: int
    regular: Array
    window: Array
    lane: Array
    cascade: bool


@compiled
def settled(
    w: Pairs, seconds: Array, delay: Array, end: Array, by: Stretch, last: Array, left: int, patient: bool, more: Array
) -> bool:
    """Fill `end`, and `more`: how much later the tasks `last` end in a step with `left` rounds more; False if unsure.

    Patient, it goes on round by round until it is sure, in the same places: the last round takes the first one's.
    """
    n, batch, valid = len(w.first), 1, 0
    fits = _rounds(by)
    forward_pairs(w, seconds, delay, end, 0, n)
    rounds = _paces(w, delay, end, by, last, left, valid, more) if left else 1
    while left and (rounds == 0 or left % rounds):
        if fits == 0 or not (patient or rounds):
            return False
        further = fits + (left - fits) % rounds if rounds else fits * batch
        further = min(further, left)
        valid = _go_on(w, seconds, delay, end, by, further, fits)
        left -= further
        batch *= 2
        rounds = _paces(w, delay, end, by, last, left, valid, more) if left else 1
    for i in range(len(last)):
        more[i] *= left // rounds
    return True


@compiled
def _rounds(by: Stretch) -> int:
    """Rounds that the regular stretch holds besides its window; 0 where it has phases that would all have to grow."""
    if len(by.regular) != 1:
        return 0
    return int(max((by.regular[0, 1] - by.regular[0, 0] - by.window[0]) // by.round, 0))


@compiled
def _go_on(w: Pairs, seconds: Array, delay: Array, end: Array, by: Stretch, further: int, fits: int) -> int:
    """Run `further` rounds more, and what follows them; the first task whose end is of the same step as the last's."""
    stop, window, valid = by.regular[0, 1], by.window[0], 0
    while further:
        step = further % fits or fits
        valid = stop - step * by.round
        for i in range(window):
            end[valid - window + i] = end[stop - window + i]
        forward_pairs(w, seconds, delay, end, valid, stop)
        further -= step
    forward_pairs(w, seconds, delay, end, stop, len(w.first))
    return valid


@compiled
def _paces(w: Pairs, delay: Array, end: Array, by: Stretch, last: Array, most: int, valid: int, pace: Array) -> int:
    """Fill `pace`, how much later the tasks `last` end for every so many rounds more as are given back; 0 if unsure."""
    pace[:] = 0.0
    top = last[np.argmax(end[last])]
    of = np.zeros((len(by.regular), by.lane.max() + 2))
    seen, known = np.zeros(len(w.first), np.int32), np.zeros(len(w.first), np.bool_)
    for rounds in range(1, most + 1):
        step = rounds * by.round
        if not _grown(end, step, by, valid, of):
            return 0
        if not _held(w, delay, end, step, by, of, top, seen, -rounds, known, valid):
            continue
        for i in range(len(last)):
            if not _held(w, delay, end, step, by, of, last[i], seen, i + 1, known, valid):
                return 0
            pace[i] = of[:, by.lane[last[i]]].sum()
        return rounds
    return 0


@compiled
def _grown(end: Array, step: int, by: Stretch, valid: int, of: Array) -> bool:
    """Put into of[phase, lane] how much later than the one `step` tasks before it a task ends at most."""
    of[:] = 0.0
    for k in range(len(by.regular)):
        stop = by.regular[k, 1]
        begin = stop - by.window[k]
        if begin - step < max(by.regular[k, 0], valid - by.window[k]):
            return False
        for t in range(begin, stop):
            of[k, by.lane[t]] = max(of[k, by.lane[t]], end[t] - end[t - step])
        if by.cascade and k == 1:  # a lane waits for those after it only, and so keeps the pace of the slowest of them
            for s in range(of.shape[1] - 2, -1, -1):
                of[k, s] = max(of[k, s], of[k, s + 1])
        else:
            of[k, :] = of[k].max()
    return len(by.regular) > 0


@compiled
def _held(
    w: Pairs, delay: Array, end: Array, step: int, by: Stretch, of: Array, task: int, seen: Array, stamp: int,
    known: Array, valid: int,
) -> bool:  # fmt: skip
    """Whether what held up a task runs, in every phase, through two tasks `step` apart that kept the phase's pace."""
    n, tie, same, lane = len(w.first), TIE * end[task], SAME * end[task], by.lane[task]
    t, k, remembers = task, len(by.regular) - 1, len(by.regular) == 1
    while valid <= t < n and k >= 0 and not (remembers and known[t]):
        seen[t] = stamp
        later = t + step
        if by.regular[k, 0] <= t and later < by.regular[k, 1] and seen[later] == stamp:
            k -= end[later] - end[t] >= of[k, lane] - same
        t = holder(w, delay, end, t, tie)
    sure = k < 0 or (valid <= t < n and known[t])
    if sure and remembers:
        t = task
        while t < n and seen[t] == stamp and not known[t]:
            known[t] = True
            t = holder(w, delay, end, t, tie)
    return sure
