"""A pool of measured effects to draw from: whole rows, so that what belongs together stays together.

Kept as measured where there are enough of them: a unit's own where it has 200, else those of all units, in each one's
own width. With fewer they are drawn from the Normal with their covariance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage_fit.opsteps import Messages, Steps
from presage_fit.optable import COMMUNICATION

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ENOUGH = 200  # measured values are kept as they are from here on
BORROWED = 20  # values of all units that count for a unit's own width
BEYOND = 1.5  # times the largest value seen
WIDTHS = 17  # at which the mean of pooled factors is computed; straight lines between


@dataclass(frozen=True, eq=False)
class EffectPool:
    """Logarithms (columns, rows); unit u draws from rows first[u]..last[u], in its widths, for factors of mean 1."""

    rows: Floats
    first: Ints
    last: Ints
    width: Floats  # (units, columns)
    shift: Floats  # (units, columns)
    normal: bool
    block: int  # rows that are drawn together, in order

    def draw(self, rng: np.random.Generator, each: int, draws: int) -> Floats:
        """Factors (units, each, columns, draws): `each` rows for every unit and draw."""
        if self.normal:
            mix = rng.standard_normal((len(self.first), each, draws, self.rows.shape[1])) / np.sqrt(self.rows.shape[1])
            return self._factors(np.moveaxis(np.clip(mix @ self.rows.T, -self._most, self._most), -1, -2))
        picks = self._picks(rng, each, draws)
        if self._ready is not None:
            return np.asarray(np.moveaxis(self._ready[:, picks], 0, 2))
        return self._factors(np.moveaxis(self.rows[:, picks], 0, 2))

    def _factors(self, logs: Floats) -> Floats:
        out = logs * self.width[:, None, :, None]
        out += self.shift[:, None, :, None]
        return np.asarray(np.exp(out, out=out))

    @cached_property
    def _most(self) -> Floats:
        """By column, what a Normal draw may be at most: it knows nothing of much more than was seen."""
        return np.asarray(BEYOND * np.abs(self.rows).max(axis=1))

    @cached_property
    def _ready(self) -> Floats | None:
        """Factors in place of rows, where every unit draws from its own."""
        if (self.first[1:] < self.last[:-1]).any():
            return None
        count = self.last - self.first
        width, shift = (np.repeat(x, count, axis=0).T for x in (self.width, self.shift))
        return np.asarray(np.exp(self.rows * width + shift))

    def _picks(self, rng: np.random.Generator, each: int, draws: int) -> Ints:
        size, first = ((self.last - self.first) // self.block)[:, None, None], self.first[:, None, None]
        if self.block == 1:
            return np.asarray(first + rng.integers(0, size, (len(self.first), each, draws)))
        start = first + self.block * rng.integers(0, size, (len(self.first), 1, draws))
        return np.asarray(start + np.arange(each)[:, None])


def pool_of(effects: Floats, whole: bool = False) -> EffectPool | None:
    """From (units, repeats, rows of a repeat, columns); with `whole`, all rows of a repeat are drawn together."""
    units, repeats, each, columns = effects.shape
    flat = effects.reshape(units, repeats * each, columns)
    there = np.isfinite(flat).any(axis=2)
    if not there.any() or not np.nan_to_num(flat).any():
        return None
    width = _widths(flat)
    rows = np.nan_to_num(flat / np.where(width > 0, width, 1.0)[:, None])
    count = there.sum(axis=1)
    own = int(count.min()) >= ENOUGH
    stacked = rows[there] if not whole else rows.reshape(-1, columns)
    ends = np.cumsum(count) if not whole else np.arange(1, units + 1) * repeats * each
    first, last = (np.append(0, ends[:-1]), ends) if own else (np.zeros(units, np.int64), np.full(units, ends[-1]))
    normal = len(stacked) < ENOUGH
    shift = _shifts(stacked, first, last, width, normal)
    return EffectPool(np.ascontiguousarray(stacked.T), first, last, width, shift, normal, each if whole else 1)


def _widths(flat: Floats) -> Floats:
    """Each unit's spread by column over that of all units, pulled towards 1 where it has few values."""
    there = np.isfinite(flat)
    square, count = np.nan_to_num(flat**2).sum(axis=1), there.sum(axis=1)
    typical = square.sum(axis=0) / np.maximum(count.sum(axis=0), 1)
    mine = (square + BORROWED * typical) / (count + BORROWED)
    return np.where(typical > 0, np.sqrt(mine / np.maximum(typical, 1e-300)), 1.0)


def _shifts(rows: Floats, first: Ints, last: Ints, width: Floats, normal: bool) -> Floats:
    """What takes the mean of each unit's factors to 1."""
    if normal:
        return np.asarray(-0.5 * (rows**2).mean(axis=0) * width**2)
    if (first != first[0]).any():
        return -np.stack([_log_mean(rows[a:b] * w) for a, b, w in zip(first, last, width, strict=True)])
    grid = np.linspace(width.min(), width.max(), WIDTHS)
    found = np.stack([_log_mean(rows * w) for w in grid])
    return -np.stack([np.interp(w, grid, f) for w, f in zip(width.T, found.T, strict=True)], axis=1)


def _log_mean(logs: Floats) -> Floats:
    return np.asarray(np.log(np.exp(logs).mean(axis=0)))


# Where a job's operations come from: which microbatch of which replica each one serves.
#
# A cell is one microbatch of one replica; its columns are what the microbatch causes: computation of every kind on
# every stage and chunk, and the transfers between stages. Columns of a cell vary together: a long sequence is slow
# forward, backward and on every stage. Operations that serve no microbatch belong to the step.


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
