"""Steps of an operation table through the engine, one draw a step.

Every operation is three tasks: the host's time before it, what it does (with others, if it is a transfer or a
collective), and what its worker adds at the end.

Measured, and so input: how long each computation took; how long each transfer took from its last participant's start;
the host's time between an operation and the last one it waited for; when each worker's first operation of a step
started. Emergent: every other start and end, every wait for a message, a collective or another worker, and the step
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Lane, LaneKind, Program, finish_times
from presage_fit import oporder
from presage_fit.oporder import Order
from presage_fit.opsteps import Steps, meetings, messages, split, transfers
from presage_fit.optable import COMMUNICATION, OpTable

__all__ = ["PARTS", "Replay", "program_of", "replay", "replays", "without_host"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTS = 3  # tasks per operation: 3i is the host's time before operation i, 3i + 1 the operation, 3i + 2 its tail


@dataclass(frozen=True, eq=False)
class Replay:
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


def replays(table: OpTable) -> tuple[Replay, ...]:
    """A replay for every set of steps that have the same operations."""
    return tuple(replay(s) for s in split(table))


def replay(steps: Steps) -> Replay:
    """The measured steps as a program of what waits for what, and the durations that were measured."""
    sent = messages(steps)
    group = meetings(steps, sent)
    order = oporder.traced(steps)
    joins = oporder.joins(steps, order)
    arrive = oporder.arrivals(steps, order)
    ready = arrive.copy()
    for ops in joins:
        ready[ops] = np.maximum(ready[ops], arrive[ops].max(axis=0))
    begin = np.maximum(steps.start, ready)
    run, tail = transfers(begin, steps.end, group)
    # A send and a receive issued together end together, so an end of a message may be a wait for another message
    tail[sent.sent] = 0.0
    return Replay(steps, program_of(steps, order, group, joins), begin - ready, run, tail)


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
    return program_of(steps, oporder.streams(steps, sent), group), run + tail
