"""What stragglers cost: a job's step time against the same job with every operation of a type taking the same time.

The durations of the ideal job: for computation the mean over all workers, microbatches and steps of its type; for
communication the median of its time from the last participant's start on. Host time between operations is left out on
both sides. The slowdown is the ratio of the mean step times; giving back the real durations to one stage, one replica
or one operation type only shows how much of it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.engine import Program, finish_times
from presage.files.decoding import read_checked
from presage_fit import opreplay, optable
from presage_fit.opreplay import PARTS, OpTableReplay, without_host
from presage_fit.opsteps import Steps, split
from presage_fit.optable import COMMUNICATION, OpTable
from presage_validation.score import AccuracyResult, Row, Skipped

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


def idealize(steps: Steps, seconds: Floats, typical: Floats, keep: Bools | None = None) -> Floats:
    """Every operation at its type's typical seconds, but those of `keep` as measured."""
    ideal = np.broadcast_to(typical[steps.op][:, None], seconds.shape)
    return ideal.copy() if keep is None else np.where(keep[:, None], seconds, ideal)


@dataclass(frozen=True, eq=False)
class OpClass:
    """Steps with the same operations, as a program of streams and every operation's seconds in it."""

    steps: Steps
    program: Program
    seconds: Floats

    def times(self, seconds: Floats) -> Floats:
        out = np.zeros((len(self.program), seconds.shape[1]))
        out[2 : PARTS * len(self.steps) : PARTS] = seconds
        return finish_times(self.program, out)


@dataclass(frozen=True, eq=False)
class StragglerJob:
    """A table's steps without host time, and what each operation type typically takes."""

    table: OpTable
    parts: tuple[OpClass, ...]
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

    def _ideal(self, part: OpClass, keep: Callable[[Steps], Bools] | None) -> Floats:
        chosen = None if keep is None else keep(part.steps)
        seconds = idealize(part.steps, part.seconds, self.typical, chosen)
        if chosen is None or not chosen.any():
            return np.repeat(part.times(seconds[:, :1]), seconds.shape[1])
        return part.times(seconds)

    def _by_step(self, times: Callable[[OpClass], Floats]) -> dict[int, float]:
        pairs = [(p.steps.ids, times(p)) for p in self.parts]
        return dict(sorted((int(i), float(t)) for ids, ts in pairs for i, t in zip(ids, ts, strict=True)))


def _on(column: str, *values: int) -> Callable[[Steps], Bools]:
    """The operations of some stages, replicas or types."""
    return lambda steps: np.isin(getattr(steps, column), values)


def job(table: OpTable) -> StragglerJob:
    """A table as a job to ask what-if questions of."""
    parts = []
    for steps in split(table):
        program, seconds = without_host(steps)
        parts.append(OpClass(steps, program, seconds))
    return StragglerJob(table, tuple(parts), typical(table, [(p.steps, p.seconds) for p in parts]))


# Claims on operation tables: replayed step times, and slowdowns by stragglers beside the published answers.

KIND = "stragglers"
T = TypeVar("T")


def score_optable(path: str | Path) -> AccuracyResult:
    """Every step's time, replayed from the measured durations of its operations, beside the measured time.

    `replay` takes the host's time between operations from the step itself, so it mostly proves that nothing is lost;
    `replay_median_host` takes it from the other half of the steps, so all waits must come out of the program.
    """
    table = optable.read(path)
    rows: list[Row] = []
    skipped = list(_unknown(table))
    for part in opreplay.replays(table):
        rows += _steps(part, "replay", part.host)
        if len(part.steps.ids) > 1:
            rows += _steps(part, "replay_median_host", _from_others(part.host))
        else:
            skipped.append(Skipped(f"step {part.steps.ids[0]}, replay_median_host", "no other step has its operations"))
    return AccuracyResult(KIND, str(path), tuple(sorted(rows, key=lambda r: (r.metric, int(r.name)))), tuple(skipped))


def _steps(part: OpTableReplay, metric: str, host: Floats) -> Iterable[Row]:
    times = zip(part.steps.ids, part.times(host=host), part.steps.measured, strict=True)
    return [Row(metric, part.steps.table.job, str(step), float(p), float(m)) for step, p, m in times]


def _from_others(host: Floats) -> Floats:
    """Every operation's median over the other half of the steps."""
    out = np.empty_like(host)
    for half, other in ((0, 1), (1, 0)):
        out[:, half::2] = np.median(host[:, other::2], axis=1, keepdims=True)
    return out


def whatif_slowdown(path: str | Path) -> AccuracyResult:
    """The slowdown by stragglers and its parts beside those published for the job, where they lie beside the table.

    Metrics: `slowdown` (of the job), `slowdown_by_stage`, `_by_replica`, `_by_op`, `step_no_host` (seconds per step
    without host time), `ideal_step`, and the step time with the last stage or the worst workers made typical.
    """
    table = optable.read(path)
    answer = published(path, "result", PublishedResult)
    if answer is None:
        missing = Skipped(f"result-{table.job}.json", "no published answer beside the table")
        return AccuracyResult(KIND, str(path), (), (*_unknown(table), missing))
    costs = job(table)
    parts = [
        _compared("step_no_host", table.job, costs.actual(), answer.step_t_nodelay),
        _compared("slowdown_by_stage", table.job, costs.by_stage(), answer.blocking_decompose_by_stage),
        _compared("slowdown_by_replica", table.job, costs.by_replica(), answer.blocking_decompose_by_dp_rank),
        _compared("slowdown_by_op", table.job, costs.by_op(), answer.blocking_decompose_by_optype),
    ]
    rows = [
        Row("slowdown", table.job, "job", costs.slowdown(), answer.blocking_slowdown),
        Row("ideal_step", table.job, "job", costs.mean(), float(np.mean(list(answer.step_t_noblk.values())))),
        *(r for found, _ in parts for r in found),
        *_fixed(path, costs),
    ]
    skipped = (*_unknown(table), *(x for _, lost in parts for x in lost))
    return AccuracyResult(KIND, str(path), tuple(rows), skipped)


class PublishedResult(msgspec.Struct):
    """A published result: mean seconds per step as run without host time and made ideal, and slowdowns by part."""

    blocking_slowdown: float
    step_t_nodelay: dict[str, float]
    step_t_noblk: dict[str, float]
    blocking_decompose_by_dp_rank: dict[str, float] | None = None
    blocking_decompose_by_stage: dict[str, float] | None = None
    blocking_decompose_by_optype: dict[str, float] | None = None


class Removed(msgspec.Struct):
    """A published answer to: what if these workers were typical? Mean seconds per step."""

    trem: float


def published(path: str | Path, what: str, kind: type[T]) -> T | None:
    """The published file of a kind for the table at `path`: WHAT-JOB.json(.gz) beside trace-JOB.csv(.gz)."""
    table = Path(path)
    job = table.name.split(".")[0].removeprefix("trace-")
    for file in (table.with_name(f"{what}-{job}.json"), table.with_name(f"{what}-{job}.json.gz")):
        if file.is_file():
            return read_checked(file, kind)
    return None


def _compared(
    metric: str, job: str, ours: Mapping[int, float] | Mapping[str, float], theirs: Mapping[str, float] | None
) -> tuple[list[Row], list[Skipped]]:
    named = {str(k): v for k, v in ours.items()}
    theirs = theirs or {}
    rows = [Row(metric, job, k, named[k], v) for k, v in theirs.items() if k in named]
    return rows, [Skipped(f"{metric} {k}", "not in the table") for k in theirs if k not in named]


def _fixed(path: str | Path, job: StragglerJob) -> Iterable[Row]:
    for what, metric, seconds in (
        ("ms", "step_without_last_stage", job.without_last_stage),
        ("mw", "step_without_worst_workers", job.without_worst_workers),
    ):
        answer = published(path, what, Removed)
        if answer is not None:
            yield Row(metric, job.table.job, "job", seconds(), answer.trem)


def _unknown(table: OpTable) -> tuple[Skipped, ...]:
    return tuple(Skipped(f"optype {x}", "not known: counted as work of its own worker") for x in table.unknown)
