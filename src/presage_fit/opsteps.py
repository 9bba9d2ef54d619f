"""Steps of an operation table that have the same operations, and which of those belong together.

`Steps` lays the rows out as arrays of (operations, steps). `messages` finds the two ends of every point-to-point
transfer, `meetings` the operations that several workers do together. All of it comes from the rows: stages, chunks and
microbatches may be of any number, and differ from worker to worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage_fit.optable import BACKWARD, FORWARD, OpTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Clocks of two workers, and of two streams of one worker, agree to about this.
CLOCK = 2e-4
# A rule of order or of togetherness must hold in this share of the steps; the rest is left to odd clocks.
MOST = 0.9

STAGE, REPLICA, WORLD = "stage", "replica", "world"  # who takes part: the replicas of a stage, a replica's stages, all
SCOPES = {
    "params-all-gather": (STAGE,),
    "grads-reduce-scatter": (STAGE,),
    "separate-grads-all-reduce": (STAGE,),
    "embedding-grads-all-reduce": (REPLICA,),
    "optimizer-clip-main-grad": (WORLD, REPLICA),  # the norm of all gradients: one number from every worker
}


@dataclass(frozen=True, eq=False)
class Steps:
    """Operation i of step j ran from start[i, j] to end[i, j], in seconds from the first start of the step.

    Operations are sorted by worker, and on a worker by their mean start.
    """

    table: OpTable
    ids: Ints  # the steps' numbers in the table
    rows: Ints  # (operations, steps): rows of the table
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.rows)

    def _of(self, column: Ints) -> Ints:
        return column[self.rows[:, 0]]

    @cached_property
    def dp(self) -> Ints:
        return self._of(self.table.dp)

    @cached_property
    def stage(self) -> Ints:
        return self._of(self.table.stage)

    @cached_property
    def worker(self) -> Ints:
        return self.dp * self.table.stages + self.stage

    @cached_property
    def op(self) -> Ints:
        return self._of(self.table.op)

    @cached_property
    def seq(self) -> Ints:
        return self._of(self.table.seq)

    @cached_property
    def chunk(self) -> Ints:
        return self._of(self.table.chunk)

    @cached_property
    def microbatch(self) -> Ints:
        return self._of(self.table.microbatch)

    @cached_property
    def model_chunk(self) -> Ints:
        """The chunk's place in the whole model; where the table does not say, chunks are dealt out stage by stage."""
        said = self._of(self.table.model_chunk)
        return np.where(said >= 0, said, np.maximum(self.chunk, 0) * self.table.stages + self.stage)

    @property
    def measured(self) -> Floats:
        """Seconds from each step's first start to its last end."""
        return np.asarray(self.end.max(axis=0))

    def named(self, *names: str) -> NDArray[np.bool_]:
        """The operations of some types."""
        return np.isin(self.op, [k for k, x in enumerate(self.table.ops) if x in names])


def split(table: OpTable) -> tuple[Steps, ...]:
    """The table's steps, those with the same operations together: each group is one program with a draw per step."""
    keys = np.stack([table.dp, table.stage, table.op, table.chunk, table.seq, table.microbatch])
    order = np.lexsort((*keys[::-1], table.step))
    cuts = np.flatnonzero(np.diff(table.step[order])) + 1
    same: dict[bytes, list[Ints]] = {}
    for rows in np.split(order, cuts):
        what = keys[:, rows]
        twice = np.flatnonzero((what[:, 1:] == what[:, :-1]).all(axis=0))
        if len(twice):
            line = int(rows[twice[0] + 1]) + 2
            raise InputError(table.path, f"line {line}: a second row for the same operation of a step", "seq_id")
        same.setdefault(what.tobytes(), []).append(rows)
    return tuple(_steps(table, np.stack(rows, axis=1)) for rows in same.values())


def _steps(table: OpTable, rows: Ints) -> Steps:
    start = table.start[rows]
    start = start - start.min(axis=0)
    first = rows[:, 0]
    order = np.lexsort((start.mean(axis=1), table.dp[first] * table.stages + table.stage[first]))
    start, rows = start[order], rows[order]
    return Steps(table, table.step[rows[0]], rows, start, start + table.duration[rows])


@dataclass(frozen=True, eq=False)
class Messages:
    """For every operation: the other end of its transfer, and the computation that made or needs the data, or -1."""

    partner: Ints
    compute: Ints

    @property
    def sent(self) -> NDArray[np.bool_]:
        """Both ends of the transfers that took place. Some tables also list sends and receives that never ran."""
        return self.partner >= 0


def messages(steps: Steps) -> Messages:
    """Pair the k-th send of a stage with the k-th receive of the next one (forward) or the one before (backward)."""
    out = Messages(np.full(len(steps), -1), np.full(len(steps), -1))
    ends = {
        kind: _with_compute(steps, kind, out.compute)
        for kind in ("forward-send", "forward-recv", "backward-send", "backward-recv")
    }
    stages = steps.table.stages
    for way, hop in (("forward", 1), ("backward", -1)):
        for worker in range(steps.table.replicas * stages):
            dp, stage = divmod(worker, stages)
            to = dp * stages + (stage + hop) % stages
            sends, receives = ends[f"{way}-send"].get(worker, []), ends[f"{way}-recv"].get(to, [])
            if len(sends) != len(receives):
                here, there = f"stage {stage}", f"stage {(stage + hop) % stages}"
                what = f"dp_rank {dp}: {len(sends)} sends of {here} but {len(receives)} receives of {there}"
                raise InputError(steps.table.path, f"step {steps.ids[0]}, {what}", f"optype {way}-send")
            out.partner[sends], out.partner[receives] = receives, sends
    return out


def _with_compute(steps: Steps, kind: str, compute: Ints) -> dict[int, list[int]]:
    """Fill in the computation of every send or receive of a kind; those that took place, by worker."""
    way, end = kind.split("-")
    forward, sends = way == "forward", end == "send"
    works = _by_worker(steps, FORWARD if forward else BACKWARD)
    # the model's last chunk sends nothing forward and receives nothing backward; its first chunk the other way round
    alone = steps.model_chunk.max() if forward == sends else 0
    out: dict[int, list[int]] = {}
    rows = _by_worker(steps, kind)
    for worker, work in works.items():
        need = [w for w in work if steps.model_chunk[w] != alone]
        for op, w in _matched(steps, kind, rows.get(worker, []), work, need):
            compute[op] = w
            if steps.model_chunk[w] != alone:
                out.setdefault(worker, []).append(op)
    return out


def _matched(steps: Steps, kind: str, ops: list[int], work: list[int], need: list[int]) -> Iterable[tuple[int, int]]:
    """A worker's sends or receives of a kind beside their computations, in order."""
    sends = kind.endswith("send")
    if len(ops) != len(need):
        start, end = steps.start.mean(axis=1), steps.end.mean(axis=1)
        ran = (end[ops] >= end[work].min() - CLOCK) if sends else (start[ops] <= start[work].max() + CLOCK)
        ops = [op for op, yes in zip(ops, ran, strict=True) if yes]
    for candidate in (need, work, [] if sends else work[1:]):
        if len(candidate) == len(ops):
            return zip(ops, candidate, strict=True)
    where = f"step {steps.ids[0]}, dp_rank {steps.dp[work[0]]}, stage {steps.stage[work[0]]}"
    what = f"{len(ops)} rows, but {len(need)} of {len(work)} computations need one"
    raise InputError(steps.table.path, f"{where}: {what}", f"optype {kind}")


def _by_worker(steps: Steps, *names: str) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for i in np.flatnonzero(steps.named(*names)):
        out.setdefault(int(steps.worker[i]), []).append(int(i))
    return out


def meetings(steps: Steps, sent: Messages) -> Ints:
    """A number shared by the operations that several workers do together, or -1."""
    group = np.where(sent.sent, np.minimum(np.arange(len(steps)), sent.partner), -1)
    for op, name in enumerate(steps.table.ops):
        ops = np.flatnonzero(steps.op == op)
        for scope in SCOPES.get(name, ()) if len(ops) else ():
            parts = _parties(steps, ops, scope)
            if parts and np.mean([_overlap(steps, p) for p in parts]) >= MOST:
                for p in parts:
                    group[p] = p[0]
                break
    return group


def _parties(steps: Steps, ops: Ints, scope: str) -> list[Ints]:
    """The same operation of the workers in a scope, in groups of two or more."""
    who = {STAGE: steps.stage, REPLICA: steps.dp, WORLD: np.zeros(len(steps), np.int64)}[scope][ops]
    key = np.stack([who, steps.chunk[ops], steps.seq[ops]])
    which = np.unique(key, axis=1, return_inverse=True)[1].ravel()
    return [p for k in range(which.max() + 1) if len(p := ops[which == k]) > 1]


def _overlap(steps: Steps, ops: Ints) -> float:
    """The share of steps in which no member had left before the last one came."""
    return float((steps.start[ops].max(axis=0) <= steps.end[ops].min(axis=0) + CLOCK).mean())


def transfers(start: Floats, end: Floats, group: Ints) -> tuple[Floats, Floats]:
    """Split operations into what a meeting does together and what each member adds, without the wait for the last.

    The common part lasts from the last member's start to the first member's end; the rest is the member's own. An
    operation that meets nobody is all common part.
    """
    met = np.flatnonzero(group >= 0)
    latest, first = np.full_like(start, -np.inf), np.full_like(end, np.inf)
    np.maximum.at(latest, group[met], start[met])
    np.minimum.at(first, group[met], end[met])
    together, tail = np.maximum(end - start, 0.0), np.zeros_like(start)
    last, done = latest[group[met]], first[group[met]]
    together[met] = np.maximum(done - last, 0.0)
    tail[met] = np.maximum(end[met] - np.maximum(done, last), 0.0)
    return together, tail
