"""What stragglers cost: a job's step time against the same job with every operation of a type taking the same time.

The durations of the ideal job: for computation the mean over all workers, microbatches and steps of its type; for
communication the median of its time from the last participant's start on. Host time between operations is left out on
both sides. The slowdown is the ratio of the mean step times; giving back the real durations to one stage, one replica
or one operation type only shows how much of it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Program, finish_times
from presage_fit.opreplay import PARTS, without_host
from presage_fit.opsteps import Steps, split
from presage_fit.optable import COMMUNICATION, OpTable

__all__ = ["Job", "idealised", "job", "typical"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Sends and receives of one direction are judged together.
MESSAGES = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
WORST = 0.03  # the share of workers that counts as the worst ones


def typical(table: OpTable, parts: Iterable[tuple[Steps, Floats]]) -> Floats:
    """Seconds per operation type without stragglers: the mean for computation, the median for communication."""
    pool: list[list[Floats]] = [[] for _ in table.ops]
    for steps, seconds in parts:
        for k in np.unique(steps.op):
            pool[k].append(seconds[steps.op == k].ravel())
    centre = [np.median if name in COMMUNICATION else np.mean for name in table.ops]
    return np.array([float(f(np.concatenate(x))) if x else 0.0 for f, x in zip(centre, pool, strict=True)])


def idealised(steps: Steps, seconds: Floats, typical: Floats, keep: Bools | None = None) -> Floats:
    """Every operation at its type's typical seconds, but those of `keep` as measured."""
    ideal = np.broadcast_to(typical[steps.op][:, None], seconds.shape)
    return ideal.copy() if keep is None else np.where(keep[:, None], seconds, ideal)


@dataclass(frozen=True, eq=False)
class Part:
    """Steps with the same operations, as a program of streams and every operation's seconds in it."""

    steps: Steps
    program: Program
    seconds: Floats

    def times(self, seconds: Floats) -> Floats:
        out = np.zeros((len(self.program), seconds.shape[1]))
        out[2 : PARTS * len(self.steps) : PARTS] = seconds
        return finish_times(self.program, out)


@dataclass(frozen=True, eq=False)
class Job:
    """A table's steps without host time, and what each operation type typically takes."""

    table: OpTable
    parts: tuple[Part, ...]
    typical: Floats

    def actual(self) -> dict[int, float]:
        """Seconds per step with the measured durations."""
        return self._by_step(lambda p: p.times(p.seconds))

    def mean(self, keep: Callable[[Steps], Bools] | None = None) -> float:
        """Mean seconds per step with every operation at its typical time, but those that `keep` picks as measured."""
        return float(np.mean(list(self._by_step(lambda p: self._ideal(p, keep)).values())))

    def slowdown(self, keep: Callable[[Steps], Bools] | None = None) -> float:
        """Mean step time over the ideal one; with `keep`, the part of it that those operations cause by themselves."""
        return self.mean(keep or (lambda s: np.ones(len(s), bool))) / self.mean()

    def by_replica(self) -> dict[int, float]:
        return {d: self.slowdown(_on("dp", d)) for d in range(self.table.replicas)}

    def by_stage(self) -> dict[int, float]:
        return {k: self.slowdown(_on("stage", k)) for k in range(self.table.stages)}

    def by_op(self) -> dict[str, float]:
        """By operation type, sends and receives of one direction together."""
        kinds: dict[str, list[int]] = {}
        for k, name in enumerate(self.table.ops):
            kinds.setdefault(MESSAGES.get(name, name), []).append(k)
        return {name: self.slowdown(_on("op", *ops)) for name, ops in kinds.items()}

    def without_last_stage(self) -> float:
        """Mean seconds per step if the last stage alone were typical."""
        return self.mean(lambda s: s.stage != self.table.stages - 1)

    def without_worst_workers(self) -> float:
        """Mean seconds per step if the worst workers were typical: those of a slow replica and a slow stage at once."""
        replica, stage = self.by_replica(), self.by_stage()
        stages, workers = self.table.stages, self.table.replicas * self.table.stages
        blame = [min(replica[w // stages], stage[w % stages]) for w in range(workers)]
        worst = np.argsort(-np.array(blame), kind="stable")[: int(np.ceil(WORST * workers))]
        return self.mean(lambda s: ~np.isin(s.worker, worst))

    def explained(self, without: float) -> float:
        """The share of the slowdown that goes away when the mean step time falls to `without` seconds."""
        actual = float(np.mean(list(self.actual().values())))
        return (actual - without) / (actual - self.mean())

    def _ideal(self, part: Part, keep: Callable[[Steps], Bools] | None) -> Floats:
        chosen = None if keep is None else keep(part.steps)
        seconds = idealised(part.steps, part.seconds, self.typical, chosen)
        if chosen is None or not chosen.any():
            return np.repeat(part.times(seconds[:, :1]), seconds.shape[1])
        return part.times(seconds)

    def _by_step(self, times: Callable[[Part], Floats]) -> dict[int, float]:
        pairs = [(p.steps.ids, times(p)) for p in self.parts]
        return dict(sorted((int(i), float(t)) for ids, ts in pairs for i, t in zip(ids, ts, strict=True)))


def _on(column: str, *values: int) -> Callable[[Steps], Bools]:
    """The operations of some stages, replicas or types."""
    return lambda steps: np.isin(getattr(steps, column), values)


def job(table: OpTable) -> Job:
    """A table as a job to ask what-if questions of."""
    parts = []
    for steps in split(table):
        program, seconds = without_host(steps)
        parts.append(Part(steps, program, seconds))
    return Job(table, tuple(parts), typical(table, [(p.steps, p.seconds) for p in parts]))
