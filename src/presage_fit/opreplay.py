"""Steps of an operation table through the engine, one draw a step.

Every operation is three tasks: the host's time before it, what it does (with others, if it is a transfer or a
collective), and what its worker adds at the end.

Measured, and so input: how long each computation took; how long each transfer took from its last participant's start;
the host's time between an operation and the last one it waited for; when each worker's first operation of a step
started. Emergent: every other start and end, every wait for a message, a collective or another worker, and the step
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Lane, LaneKind, Program, finish_times
from presage_fit.opsteps import CLOCK, MOST, Messages, Steps, meetings, messages, split, transfers
from presage_fit.optable import BACKWARD, COMMUNICATION, FORWARD, OpTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTS = 3  # tasks per operation: 3i is the host's time before operation i, 3i + 1 the operation, 3i + 2 its tail


@dataclass(frozen=True, eq=False)
class OpTableReplay:
    """Seconds per (operation, step): `host` before it, `run` together with others, `tail` its own end."""

    steps: Steps
    program: Program
    host: Floats
    run: Floats
    tail: Floats

    def durations(self, host: Floats | None = None, run: Floats | None = None, tail: Floats | None = None) -> Floats:
        """Seconds per (task, step) for the engine, with some of the parts replaced."""
        given = zip((host, run, tail), (self.host, self.run, self.tail), strict=True)
        parts = np.stack([was if new is None else new for new, was in given], axis=1)
        out = np.zeros((len(self.program), parts.shape[2]))
        out[: PARTS * len(self.steps)] = parts.reshape(-1, parts.shape[2])
        return out

    def times(self, host: Floats | None = None, run: Floats | None = None, tail: Floats | None = None) -> Floats:
        """Seconds per step, with some of the parts replaced."""
        return finish_times(self.program, self.durations(host, run, tail))


def replays(table: OpTable) -> tuple[OpTableReplay, ...]:
    """A replay for every set of steps that have the same operations."""
    return tuple(replay(s) for s in split(table))


def replay(steps: Steps) -> OpTableReplay:
    """The measured steps as a program of what waits for what, and the durations that were measured."""
    sent = messages(steps)
    group = meetings(steps, sent)
    order = traced_order(steps)
    waits = joins(steps, order)
    arrive = arrivals(steps, order)
    ready = arrive.copy()
    for ops in waits:
        ready[ops] = np.maximum(ready[ops], arrive[ops].max(axis=0))
    begin = np.maximum(steps.start, ready)
    run, tail = transfers(begin, steps.end, group)
    # A send and a receive issued together end together, so an end of a message may be a wait for another message
    tail[sent.sent] = 0.0
    return OpTableReplay(steps, program_of(steps, order, group, waits), begin - ready, run, tail)


def program_of(steps: Steps, order: Order, group: Ints, joins: list[Ints] | None = None) -> Program:
    """The tasks of every operation on its worker's lanes, then a task of no length for each untraced wait."""
    n, joins = len(steps), joins or []
    lanes = _lanes(steps, order)
    host = 2 * order.lane
    lane = np.stack([host, host + 1, host + 1], axis=1).ravel()
    ops = np.arange(n)
    edges = Edges.of(PARTS * order.before + 2, PARTS * order.after) + Edges.of(PARTS * ops, PARTS * ops + 1)
    for k, members in enumerate(joins):
        before = order.before[np.isin(order.after, members)]
        edges = edges + Edges.of(PARTS * before + 2, PARTS * n + k) + Edges.of(PARTS * n + k, PARTS * members)
    meet = np.full(PARTS * n + len(joins), -1)
    meet[1 : PARTS * n : PARTS] = np.unique(group, return_inverse=True)[1] - int((group < 0).any())
    name, names = _names(steps, len(joins))
    return Program.of(
        [*lanes, *(Lane(f"untraced wait {k}", _rank(steps, x[0]), LaneKind.HOST) for k, x in enumerate(joins))],
        np.concatenate([lane, len(lanes) + np.arange(len(joins))]),
        edges,
        group=meet,
        name=name,
        names=names,
    )


def _names(steps: Steps, joins: int) -> tuple[Ints, list[str]]:
    """A label for every task: "forward-compute: host", "forward-compute", "forward-compute: tail"."""
    kinds = [f"{x}{part}" for part in (": host", "", ": tail") for x in steps.table.ops]
    label = np.stack([steps.op + k * len(steps.table.ops) for k in range(PARTS)], axis=1).ravel()
    return np.concatenate([label, np.full(joins, len(kinds))]), [*kinds, "untraced wait"]


def _rank(steps: Steps, op: int) -> int:
    return int(steps.table.rank[steps.rows[op, 0]])


def _lanes(steps: Steps, order: Order) -> list[Lane]:
    """Two lanes per queue: the host's and the operations'."""
    communicates = steps.named(*COMMUNICATION)
    out: list[Lane] = []
    for queue in range(int(order.lane.max()) + 1):
        op = int(np.argmax(order.lane == queue))
        kind = LaneKind.COMMUNICATION if communicates[op] else LaneKind.COMPUTE
        name = f"dp {steps.dp[op]} stage {steps.stage[op]} {kind.value} {queue}"
        out += [Lane(f"{name} host", _rank(steps, op), LaneKind.HOST), Lane(name, _rank(steps, op), kind)]
    return out


def without_host(steps: Steps) -> tuple[Program, Floats]:
    """The steps as streams with no host time: the program, and every operation's seconds from its last participant on.

    The form in which straggler analyses ask what would have been: see `presage_validation.straggler_cost`.
    """
    sent = messages(steps)
    group = meetings(steps, sent)
    run, tail = transfers(steps.start, steps.end, group)
    return program_of(steps, stream_order(steps, sent), group), run + tail


# What waits for what on a worker, read off the times at which its operations started and ended.
#
# Two readings of one table:
#
# - `traced`: an operation waits for all those of its worker that had ended when it started, in nearly every step. This
#   is what the host did, so a blocking send holds up the next computation. Replays use it.
# - `streams`: computation and each direction of each point-to-point kind run on streams of their own; a computation
#   waits for its receive, a send for its computation, a receive for the computation before its own. Host order among
#   streams is dropped. Published straggler analyses use it.
#
# `joins` finds waits that the table has no operation for: starts that several workers hold back until the last of them
# has arrived.

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


def traced_order(steps: Steps) -> Order:
    edges: list[tuple[Ints, Ints]] = []
    lane = np.zeros(len(steps), np.int64)
    for ops in _workers(steps):
        edges.append(_in_turn(steps, ops, lane))
    return _order(edges, lane)


def stream_order(steps: Steps, sent: Messages) -> Order:
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
