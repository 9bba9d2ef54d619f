"""What waits for what on a worker, read off the times at which its operations started and ended.

Two readings of one table:

- `traced`: an operation waits for all those of its worker that had ended when it started, in nearly every step. This
  is what the host did, so a blocking send holds up the next computation. Replays use it.
- `streams`: computation and each direction of each point-to-point kind run on streams of their own; a computation
  waits for its receive, a send for its computation, a receive for the computation before its own. Host order among
  streams is dropped. Published straggler analyses use it.

`joins` finds waits that the table has no operation for: starts that several workers hold back until the last of them
has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage_fit.opsteps import CLOCK, MOST, Messages, Steps
from presage_fit.optable import BACKWARD, COMMUNICATION, FORWARD

__all__ = ["Order", "arrivals", "joins", "streams", "traced"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Shorter gaps than this are host time: nobody looks for a missing wait in them.
GAP = 1e-3
# Times are single precision in the files: good to this many seconds in a step of a minute.
ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class Order:
    """after[k] waits for before[k], on the same worker; `lane` numbers the queues that this order allows."""

    before: Ints
    after: Ints
    lane: Ints


def traced(steps: Steps) -> Order:
    edges: list[tuple[Ints, Ints]] = []
    lane = np.zeros(len(steps), np.int64)
    for ops in _workers(steps):
        edges.append(_in_turn(steps, ops, lane))
    return _order(edges, lane)


def streams(steps: Steps, sent: Messages) -> Order:
    edges: list[tuple[Ints, Ints]] = []
    lane = np.zeros(len(steps), np.int64)
    on_the_wire = steps.named("forward-send", "forward-recv", "backward-send", "backward-recv")
    for ops in _workers(steps):
        edges.append(_in_turn(steps, ops[~on_the_wire[ops]], lane))
        for kind in np.unique(steps.op[ops[on_the_wire[ops]]]):
            queue = ops[steps.op[ops] == kind]
            edges.append((queue[:-1], queue[1:]))
            lane[queue] = lane.max() + 1
    return _order(edges + _data(steps, sent), lane)


def _in_turn(steps: Steps, ops: Ints, lane: Ints) -> tuple[Ints, Ints]:
    """The waits among a worker's operations as their times show them; fills in their lanes."""
    first = _ended_before(steps, ops)
    communicates = steps.named(*COMMUNICATION)[ops]
    for kind in (False, True):
        mine = np.flatnonzero(communicates == kind)
        lane[ops[mine]] = lane.max() + 1 + _queues(first[np.ix_(mine, mine)])
    return _needed(first, ops)


def _order(edges: list[tuple[Ints, Ints]], lane: Ints) -> Order:
    before, after = (np.concatenate([e[k] for e in edges]) for k in (0, 1))
    return Order(before, after, np.unique(lane, return_inverse=True)[1])


def _workers(steps: Steps) -> Iterator[Ints]:
    cuts = np.flatnonzero(np.diff(steps.worker)) + 1
    yield from np.split(np.arange(len(steps)), cuts)


def _data(steps: Steps, sent: Messages) -> list[tuple[Ints, Ints]]:
    """Computation before its send, receive before its computation and after the one before that."""
    send = np.flatnonzero(steps.named("forward-send", "backward-send") & (sent.compute >= 0))
    receive = np.flatnonzero(steps.named("forward-recv", "backward-recv") & (sent.compute >= 0))
    works = np.flatnonzero(steps.named(FORWARD, BACKWARD))
    by_kind = works[np.lexsort((works, steps.op[works], steps.worker[works]))]
    same = (np.diff(steps.op[by_kind]) == 0) & (np.diff(steps.worker[by_kind]) == 0)
    previous = np.full(len(steps), -1)
    previous[by_kind[1:][same]] = by_kind[:-1][same]
    posted = previous[sent.compute[receive]]
    has = posted >= 0
    return [(sent.compute[send], send), (receive, sent.compute[receive]), (posted[has], receive[has])]


def _ended_before(steps: Steps, ops: Ints) -> Bools:
    """[i, j]: operation i had ended when j started, in nearly every step.

    Clocks may show an overlap where there was none, but hardly of more than half of an operation.
    """
    start, end = steps.start[ops], steps.end[ops]
    count = np.zeros((len(ops), len(ops)), np.int32)
    for s, e in zip(start.T, end.T, strict=True):
        slack = np.clip((e - s) / 2, ROUNDING, CLOCK)
        count += (s[:, None] < s) & (e[:, None] - s <= np.minimum(slack[:, None], slack))
    # operations come sorted by mean start, so keeping the upper triangle rules out circles among odd steps
    return np.triu(count >= MOST * start.shape[1], 1)


def _needed(first: Bools, ops: Ints) -> tuple[Ints, Ints]:
    """The waits that no chain of other waits implies."""
    ways = first.astype(np.float32)
    before, after = np.nonzero(first & (ways @ ways == 0))
    return ops[before], ops[after]


def _queues(first: Bools) -> Ints:
    """A queue number per operation so that the operations of a queue wait for each other in turn."""
    out = np.zeros(len(first), np.int64)
    last: list[int] = []
    for i in range(len(first)):
        out[i] = next((q for q, tail in enumerate(last) if first[tail, i]), len(last))
        last[out[i] : out[i] + 1] = [i]
    return out


def arrivals(steps: Steps, order: Order) -> Floats:
    """When everything that each operation waits for on its worker had ended; 0 for a worker's first operations."""
    out = np.zeros_like(steps.end)
    np.maximum.at(out, order.after, steps.end[order.before])
    return out


def joins(steps: Steps, order: Order) -> list[Ints]:
    """Operations that start only when all of them could have, though the table shows nothing that makes them wait.

    Such as the loss averaged over the replicas of the last stage. Looked for among the replicas of each stage and the
    stages of each replica. The signs: nobody starts before the last has arrived, and those who arrive early wait longer
    by about as much as they were early (a host's own gap would not know about the others).
    """
    arrive = arrivals(steps, order)
    waited = np.zeros(len(steps), bool)
    waited[order.after] = True
    gap = np.median(steps.start - arrive, axis=1)
    out: list[Ints] = []
    for who in (steps.stage, steps.dp):
        key = np.stack([who, steps.op, steps.chunk, steps.seq])
        which = np.unique(key, axis=1, return_inverse=True)[1].ravel()
        for k in np.unique(which[waited & (gap > GAP)]):
            ops = np.flatnonzero((which == k) & waited)
            if len(ops) > 1 and _held_back(steps.start[ops], arrive[ops]):
                out.append(ops)
    return out


def _held_back(start: Floats, arrive: Floats) -> bool:
    last = arrive.max(axis=0)
    if (start.min(axis=0) >= last - CLOCK).mean() < MOST or np.median(np.ptp(arrive, axis=0)) < GAP:
        return False
    early, gap = last - arrive, start - arrive
    early, gap = early - early.mean(), gap - gap.mean()
    return bool((early * gap).sum() > 0.5 * (early * early).sum())
