"""Where a job's operations come from: which microbatch of which replica each one serves.

A cell is one microbatch of one replica; its columns are what the microbatch causes: computation of every kind on every
stage and chunk, and the transfers between stages. Columns of a cell vary together: a long sequence is slow forward,
backward and on every stage. Operations that serve no microbatch belong to the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage_fit.opsteps import Messages, Steps
from presage_fit.optable import COMMUNICATION

__all__ = ["Cells", "Column", "cells_of"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """One thing that a microbatch causes; `turn` numbers those of a kind that it causes more than once."""

    op: str
    stage: int
    chunk: int
    turn: int

    @property
    def computes(self) -> bool:
        return self.op not in COMMUNICATION


@dataclass(frozen=True, eq=False)
class Cells:
    """Operation `op[k]` is column `column[k]` of microbatch `microbatch[k]` of replica `replica[k]`."""

    columns: tuple[Column, ...]
    op: Ints
    replica: Ints
    microbatch: Ints
    column: Ints
    shape: tuple[int, int, int]  # replicas, microbatches, columns

    def __len__(self) -> int:
        return len(self.op)

    def spread_out(self, values: Floats) -> Floats:
        """(operations, ...) as (replicas, microbatches, columns, ...), NaN where a cell has no such operation."""
        out = np.full((*self.shape, *values.shape[1:]), np.nan)
        out[self.replica, self.microbatch, self.column] = values[self.op]
        return out

    def gathered(self, values: Floats) -> Floats:
        """The reverse: a row for every operation of a cell."""
        return np.asarray(values[self.replica, self.microbatch, self.column])

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Which columns are computation."""
        return np.array([c.computes for c in self.columns], bool)


def cells_of(steps: Steps, sent: Messages) -> Cells:
    """Computation goes by its microbatch number, a transfer with the computation that made or needs its data."""
    computes = ~steps.named(*COMMUNICATION) & ((steps.microbatch >= 0) | _by_turn(steps))
    sends = sent.sent & steps.named("forward-send", "backward-send") & (sent.compute >= 0)
    op = np.flatnonzero(computes | sends)
    work = np.where(sends[op], sent.compute[op], op)
    key = np.stack([steps.op[op], steps.stage[op], np.maximum(steps.chunk[work], 0)])
    number, turn = _numbered(steps, op, work, key)
    kinds, column = np.unique(np.vstack([key, turn]), axis=1, return_inverse=True)
    columns = tuple(Column(steps.table.ops[k], int(s), int(c), int(t)) for k, s, c, t in kinds.T)
    shape = (steps.table.replicas, int(number.max(initial=-1)) + 1, len(columns))
    return Cells(columns, op, steps.dp[op], number, column.reshape(-1), shape)


def _by_turn(steps: Steps) -> NDArray[np.bool_]:
    """Forward and backward without a microbatch number: the k-th is of microbatch k."""
    return steps.named("forward-compute", "backward-compute")


def _numbered(steps: Steps, op: Ints, work: Ints, key: Ints) -> tuple[Ints, Ints]:
    """Each operation's microbatch, from 0 on, and which of several alike of that microbatch it is."""
    said = steps.microbatch[work]
    unsaid = np.where(said < 0, 0, 1)
    where = [steps.dp[op], *key]
    given = _turns([*where, unsaid], steps.seq[op])
    number = given.copy()
    number[said >= 0] = np.unique(said[said >= 0], return_inverse=True)[1].reshape(-1)
    return number, _turns([*where, number], steps.seq[op])


def _turns(key: list[Ints], order: Ints) -> Ints:
    """The place of every row among those with the same key."""
    if not len(order):
        return np.empty(0, np.int64)
    which = np.unique(np.stack(key), axis=1, return_inverse=True)[1].reshape(-1)
    by = np.lexsort((order, which))
    first = np.searchsorted(which[by], np.arange(which.max() + 1))
    out = np.empty(len(order), np.int64)
    out[by] = np.arange(len(order)) - first[which[by]]
    return out
