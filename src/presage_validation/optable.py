"""Claims on operation tables: replayed step times, and slowdowns by stragglers beside the published answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.files.decoding import read_checked
from presage_fit import opreplay, optable
from presage_fit.opreplay import Replay
from presage_fit.optable import OpTable
from presage_validation import straggler_cost as stragglers
from presage_validation.score import Result, Row, Skipped
from presage_validation.straggler_cost import Job

__all__ = ["PublishedResult", "Removed", "published", "score_optable", "whatif_slowdown"]

KIND = "stragglers"
T = TypeVar("T")
Floats = NDArray[np.float64]


def score_optable(path: str | Path) -> Result:
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
    return Result(KIND, str(path), tuple(sorted(rows, key=lambda r: (r.metric, int(r.name)))), tuple(skipped))


def _steps(part: Replay, metric: str, host: Floats) -> Iterable[Row]:
    times = zip(part.steps.ids, part.times(host=host), part.steps.measured, strict=True)
    return [Row(metric, part.steps.table.job, str(step), float(p), float(m)) for step, p, m in times]


def _from_others(host: Floats) -> Floats:
    """Every operation's median over the other half of the steps."""
    out = np.empty_like(host)
    for half, other in ((0, 1), (1, 0)):
        out[:, half::2] = np.median(host[:, other::2], axis=1, keepdims=True)
    return out


def whatif_slowdown(path: str | Path) -> Result:
    """The slowdown by stragglers and its parts beside those published for the job, where they lie beside the table.

    Metrics: `slowdown` (of the job), `slowdown_by_stage`, `_by_replica`, `_by_op`, `step_no_host` (seconds per step
    without host time), `ideal_step`, and the step time with the last stage or the worst workers made typical.
    """
    table = optable.read(path)
    answer = published(path, "result", PublishedResult)
    if answer is None:
        missing = Skipped(f"result-{table.job}.json", "no published answer beside the table")
        return Result(KIND, str(path), (), (*_unknown(table), missing))
    job = stragglers.job(table)
    parts = [
        _beside("step_no_host", table.job, job.actual(), answer.step_t_nodelay),
        _beside("slowdown_by_stage", table.job, job.by_stage(), answer.blocking_decompose_by_stage),
        _beside("slowdown_by_replica", table.job, job.by_replica(), answer.blocking_decompose_by_dp_rank),
        _beside("slowdown_by_op", table.job, job.by_op(), answer.blocking_decompose_by_optype),
    ]
    rows = [
        Row("slowdown", table.job, "job", job.slowdown(), answer.blocking_slowdown),
        Row("ideal_step", table.job, "job", job.mean(), float(np.mean(list(answer.step_t_noblk.values())))),
        *(r for found, _ in parts for r in found),
        *_fixed(path, job),
    ]
    skipped = (*_unknown(table), *(x for _, lost in parts for x in lost))
    return Result(KIND, str(path), tuple(rows), skipped)


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


def _beside(
    metric: str, job: str, ours: Mapping[int, float] | Mapping[str, float], theirs: Mapping[str, float] | None
) -> tuple[list[Row], list[Skipped]]:
    named = {str(k): v for k, v in ours.items()}
    theirs = theirs or {}
    rows = [Row(metric, job, k, named[k], v) for k, v in theirs.items() if k in named]
    return rows, [Skipped(f"{metric} {k}", "not in the table") for k in theirs if k not in named]


def _fixed(path: str | Path, job: Job) -> Iterable[Row]:
    for what, metric, seconds in (
        ("ms", "step_without_last_stage", job.without_last_stage),
        ("mw", "step_without_worst_workers", job.without_worst_workers),
    ):
        answer = published(path, what, Removed)
        if answer is not None:
            yield Row(metric, job.table.job, "job", seconds(), answer.trem)


def _unknown(table: OpTable) -> tuple[Skipped, ...]:
    return tuple(Skipped(f"optype {x}", "not known: counted as work of its own worker") for x in table.unknown)
