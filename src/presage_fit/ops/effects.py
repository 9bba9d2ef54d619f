"""Random effects of a per-operation table: fitted on some steps, drawn as durations of the program that replays them.

    effects = fit(optable.read("trace-AR.csv.gz"))
    seconds = effects.times(np.random.default_rng(0), 10_000)

A step's durations are put together from four places. Levels: what an operation of this kind takes on this stage of this
replica, in every step; slow ranks live here. The step: one training step lends all that happens once in a step
(collectives, optimizer, host time, when workers begin) and the factor its computation had in common. The replica in the
step. The microbatch: its factors forward, backward, on every stage and in transfers, drawn together. Waits are never
drawn: the engine finds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, Program, finish_times
from presage.errors import InputError
from presage.noise.model import Belief
from presage_fit.opreplay import PARTS, OpTableReplay, replay
from presage_fit.ops.parts import Channels, Split, levels, nested
from presage_fit.ops.pool import ENOUGH, Cells, EffectPool, cells_of, pool_of
from presage_fit.opsteps import Steps, messages, split
from presage_fit.optable import OpTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
LEAST = 2  # steps with the same operations, to see how they differ
HELD = 16 << 20  # bytes of durations at a time
LEAST_WIDTH = 32  # draws at a time
SWAPS = 5  # other steps that every training step is tried with
CLEAR = 3.0  # standard errors by which steps must be longer then, for a hidden wait,
LEAST_ERROR = 1e-3  # and by no less than this


@dataclass(frozen=True, eq=False)
class OpEffects:
    """Effects of the steps of one table that have the same operations."""

    played: OpTableReplay  # the training steps
    share: float  # of all training steps
    bias: float  # measured over replayed, of the training steps
    hidden: float  # how much too long steps would be by waits that hide in gaps; 0: there are none
    cells: Cells
    level: Floats  # seconds by (replica, microbatch, column)
    channels: Channels
    parts: Split
    step: Floats  # factors by (replica, column, training step)
    replica: EffectPool | None  # what a replica's microbatches of a step have in common, where enough of it was seen
    own: EffectPool | None
    rest: Floats  # seconds by (task, training step) of all that no microbatch causes
    row: Ints  # by task: its cell (0 and up), -1 for the rest, -2 for tasks that take no time

    @property
    def job(self) -> str:
        return self.played.steps.table.job

    @property
    def program(self) -> Program:
        return self.played.program

    @property
    def ids(self) -> Ints:
        """The training steps' numbers."""
        return self.played.steps.ids

    @property
    def measured(self) -> Floats:
        """Seconds of the training steps."""
        return self.played.steps.measured

    def draw(self, rng: np.random.Generator, draws: int, states: Ints | None = None) -> Durations:
        """Seconds by task for the engine; `states`: the training step (by place) that lends its state to each draw."""
        state = self.state(rng, draws) if states is None else states
        resting, cells = np.flatnonzero(self.row == -1), len(self.cells)
        seconds = np.empty((cells + len(resting), len(state)))
        np.multiply(self.cells.gathered(self._factors(rng, state)), self._level[:, None], out=seconds[:cells])
        np.take(self._rest, state, axis=1, out=seconds[cells:], mode="clip")
        row = np.where(self.row >= 0, self.row, -1)
        row[resting] = cells + np.arange(len(resting))
        return Durations(np.zeros(len(row)), row.astype(np.int32), seconds)

    def times(self, rng: np.random.Generator, draws: int, states: Ints | None = None) -> Floats:
        """Seconds of `draws` steps, in memory that does not grow with the draws."""
        at = self.state(rng, draws) if states is None else states
        parts = in_pieces(at, int((self.row >= -1).sum()))
        return self.bias * np.concatenate([finish_times(self.program, self.draw(rng, len(s), s)) for s in parts])

    def state(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Ints:
        """Places of training steps, all as likely."""
        return rng.integers(0, len(self.ids), shape)

    def path(self, rng: np.random.Generator, ids: Ints, runs: int, correlation: float) -> Ints:
        """[runs, steps]: states of steps of these numbers, one after another.

        A step keeps the state of the one before with probability `correlation` to the power of the steps between.
        """
        out = self.state(rng, (runs, len(ids)))
        stay = rng.random((runs, len(ids))) < correlation ** np.abs(np.diff(ids, prepend=ids[:1]))
        for k in range(1, len(ids)):
            out[:, k] = np.where(stay[:, k], out[:, k - 1], out[:, k])
        return out

    def resampled(self, rng: np.random.Generator) -> OpEffects:
        """Fitted again to as many training steps, drawn from them with replacement: what it may be as well."""
        at = rng.integers(0, len(self.ids), len(self.ids))
        steps, p = self.played.steps, self.played
        some = Steps(steps.table, steps.ids[at], steps.rows[:, at], steps.start[:, at], steps.end[:, at])
        again = _fitted(OpTableReplay(some, p.program, p.host[:, at], p.run[:, at], p.tail[:, at]))
        kept = self.rest[:, at] if self.hidden else again.rest
        return replace(again, share=self.share, bias=self.bias, hidden=self.hidden, rest=kept)

    def belief(self) -> Belief:
        """The same as numbers that carry over to other jobs, with intervals."""
        from presage_fit.ops.sizes import belief_of

        return belief_of(self)

    @cached_property
    def _level(self) -> Floats:
        return self.cells.gathered(self.level)

    @cached_property
    def _rest(self) -> Floats:
        return np.ascontiguousarray(self.rest[self.row == -1])

    def _factors(self, rng: np.random.Generator, state: Ints) -> Floats:
        """(replicas, microbatches, columns, draws): what cells take over their levels."""
        step = self.step[:, None][..., state]
        if self.replica is not None:
            step = step * self._by_replica(self.replica.draw(rng, 1, len(state)))
        if self.own is None:
            return np.broadcast_to(step, (*self.cells.shape, len(state)))
        own = self._by_replica(self.own.draw(rng, self.cells.shape[1], len(state)))
        own *= step
        return own

    def _by_replica(self, drawn: Floats) -> Floats:
        """(groups of replicas, rows, members' columns, draws) as (replicas, rows, columns, draws)."""
        groups, each, wide, draws = drawn.shape
        columns = self.cells.shape[2]
        apart = drawn.reshape(groups, each, wide // columns, columns, draws)
        return np.swapaxes(apart, 1, 2).reshape(-1, each, columns, draws)


def fit(table: OpTable, steps: Iterable[int] | None = None) -> OpEffects:
    """From some steps of a table (default all): the largest set of them that have the same operations."""
    return fit_sets(table, steps)[0]


def fit_sets(table: OpTable, steps: Iterable[int] | None = None) -> tuple[OpEffects, ...]:
    """One model for every set of steps with the same operations, largest first; sets of one step are left out."""
    chosen = table if steps is None else steps_only(table, steps)
    sets = sorted((s for s in split(chosen) if len(s.ids) >= LEAST), key=lambda s: -len(s.ids))
    if not sets:
        raise InputError(table.path, f"no {LEAST} of the steps to fit have the same operations", "step")
    total = sum(len(s.ids) for s in sets)
    return tuple(replace(_checked(_fitted(replay(s))), share=len(s.ids) / total) for s in sets)


def steps_only(table: OpTable, steps: Iterable[int]) -> OpTable:
    """The rows of some steps."""
    keep = np.isin(table.step, list(steps))
    if not keep.any():
        raise InputError(table.path, "none of the steps to fit is in the table", "step")
    names = ("op", "dp", "stage", "rank", "step", "seq", "chunk", "microbatch", "model_chunk", "start", "duration")
    return replace(table, **{n: getattr(table, n)[keep] for n in names})


def _fitted(played: OpTableReplay) -> OpEffects:
    sent = messages(played.steps)
    cells = cells_of(played.steps, sent)
    seconds = cells.spread_out(played.run)
    level, channels = levels(seconds)
    parts = nested(seconds, level, channels)
    lent, drawn = _replica_effects(parts, channels)
    step = np.exp(parts.step + lent)
    return OpEffects(
        played=played,
        share=1.0,
        bias=float(np.mean(played.steps.measured / played.times())),
        hidden=0.0,
        cells=cells,
        level=level,
        channels=channels,
        parts=parts,
        step=step / step.mean(axis=-1, keepdims=True),
        replica=_pool(drawn[:, None], parts.together, False),
        own=_pool(parts.own, parts.together, parts.even),
        rest=played.durations(),
        row=_rows(played, cells, sent.partner),
    )


def _checked(effects: OpEffects) -> OpEffects:
    """The same, but without waits that hide in gaps.

    A wait that the table has no operation for counts as host time. It shows when steps swap all that no microbatch
    causes: beside other computation, such gaps make steps longer than they were. Then each gap is taken at its least.
    """
    hidden, error = _swapped(effects)
    if hidden <= max(CLEAR * error, LEAST_ERROR):
        return effects
    rest = effects.rest.copy()
    host = slice(0, PARTS * len(effects.played.steps), PARTS)
    rest[host] = rest[host].min(axis=1, keepdims=True)
    seconds = np.where((effects.row >= 0)[:, None], effects.played.durations(), rest)
    bias = float(np.mean(effects.measured / finish_times(effects.program, seconds)))
    return replace(effects, rest=rest, hidden=hidden, bias=bias)


def _swapped(effects: OpEffects) -> tuple[float, float]:
    """How much longer training steps are with what another one lends, as a fraction, and its standard error."""
    own, steps = effects.played.durations(), len(effects.ids)
    mine = effects.row >= 0
    longer = []
    for by in range(1, min(SWAPS, steps - 1) + 1):
        seconds = np.where(mine[:, None], own, np.roll(own, by, axis=1))
        longer.append(effects.bias * finish_times(effects.program, seconds) / effects.measured - 1)
    each = np.mean(longer, axis=0)
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(steps))


def _replica_effects(parts: Split, channels: Channels) -> tuple[Floats, Floats]:
    """Replicas' effects in a step: those that the step lends, and those that are drawn for each replica.

    How stages differ goes with the step. What a replica's microbatches have in common is drawn where enough was seen.
    """
    replicas, _, steps = parts.replica.shape
    drawn = np.zeros_like(parts.replica)
    if replicas // parts.together * steps >= ENOUGH:
        drawn = np.broadcast_to(channels.split(parts.replica)[0], parts.replica.shape)
    return parts.replica - drawn, drawn


def _pool(effects: Floats, together: int, whole: bool) -> EffectPool | None:
    """(replicas, rows, columns, steps), neighbours that go together side by side in one row."""
    replicas, each, columns, steps = effects.shape
    if not effects.size:
        return None
    groups = effects.reshape(replicas // together, together, each, columns, steps)
    rows = groups.transpose(0, 4, 2, 1, 3).reshape(replicas // together, steps, each, together * columns)
    return pool_of(rows, whole and bool(np.isfinite(rows).all()))


def _rows(played: OpTableReplay, cells: Cells, partner: Ints) -> Ints:
    """Which cell, if any, says how long each task takes: both ends of a transfer go by the sender's."""
    row = np.where(played.durations().max(axis=1) > 0, -1, -2)
    run = PARTS * cells.op + 1
    row[run] = np.arange(len(cells))
    meets = partner[cells.op] >= 0
    row[PARTS * partner[cells.op[meets]] + 1] = np.flatnonzero(meets)
    return row


def in_pieces(values: NDArray[Any], rows: int) -> list[NDArray[Any]]:
    """Cut so that so many rows of durations stay small."""
    width = max(LEAST_WIDTH, HELD // (8 * max(rows, 1)))
    return np.array_split(values, -(-len(values) // width))


# The independent signature-pool sampler: every operation draws from all durations of its type and stage.
#
# All ranks, microbatches and steps in one pool: the yardstick that random effects are measured against. Host time and
# the ends of collectives come from one training step, as they do there.


@dataclass(frozen=True, eq=False)
class IidPool:
    """Operation k draws from `pool[first[k]:last[k]]`; members of a meeting take the draw of the first of them."""

    played: OpTableReplay
    seconds: Floats  # (tasks, training steps) as measured
    bias: float
    pool: Floats
    first: Ints
    last: Ints
    leader: Ints

    def draw(self, rng: np.random.Generator, draws: int) -> Durations:
        """Seconds by task for the engine."""
        out = self.seconds[:, rng.integers(0, self.seconds.shape[1], draws)]
        run = self.pool[rng.integers(self.first[:, None], self.last[:, None], (len(self.first), draws))]
        out[1 : PARTS * len(run) : PARTS] = run[self.leader]
        return Durations.of(out)

    def times(self, rng: np.random.Generator, draws: int) -> Floats:
        """Seconds of `draws` steps."""
        parts = in_pieces(np.arange(draws), 2 * len(self.played.program))
        return self.bias * np.concatenate([finish_times(self.played.program, self.draw(rng, len(p))) for p in parts])


def iid_pool(played: OpTableReplay, bias: float = 1.0) -> IidPool:
    """From the training steps of a replay, for its program."""
    steps = played.steps
    which = np.unique(np.stack([steps.op, steps.stage]), axis=1, return_inverse=True)[1].reshape(-1)
    order = np.argsort(which, kind="stable")
    width = played.run.shape[1]
    first = np.searchsorted(which[order], which) * width
    last = np.searchsorted(which[order], which, "right") * width
    group = played.program.group[1 : PARTS * len(steps) : PARTS].astype(np.int64)
    key = np.where(group >= 0, group, group.max(initial=0) + 1 + np.arange(len(group)))
    leader = np.unique(key, return_index=True)[1][np.unique(key, return_inverse=True)[1].reshape(-1)]
    return IidPool(played, played.durations(), bias, played.run[order].ravel(), first, last, leader)
