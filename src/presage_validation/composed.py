"""Step-time distributions composed from configs alone, beside the logs of the systems that ran them.

For every system whose job can be expressed: `job --draws` with the noise of screened nodes, whose laws of steps are
taken without any log of the system's submitter, and with efficiencies fitted without any run of MLPerf's rows. No time
of the system is given; the number of validations, which its config says, is. Records that are means of several steps
are compared with means of as many consecutive drawn steps. Runs of a system are on the same GPUs: which ones it got
moves its typical step, and is no part of how its steps vary.

`p50_error` is presage's own error of the typical step. Everything else is about how steps vary: quantiles over the
median, and the intervals that hold 50, 90 and 95% of steps whatever of the believed noise the system has, about the
measured median. `headline_90_coverage` is of the interval that includes presage's own error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import Belief, NoiseModel
from presage.noise.priors import known_systems, prior
from presage.pool.pool import SERIAL, Pool
from presage.prediction.draws.distribution import SHARES, StepDistribution, step_distribution
from presage.prediction.draws.step_model import step_model
from presage.prediction.jobs.efficiency import efficiency_without
from presage.prediction.jobs.job_step import job_step
from presage.prediction.result import model_error
from presage_fit.series.drift import kinds_of, lead_of
from presage_fit.step_logs import Logs, StepLog, read_logs
from presage_validation.logged_jobs import LoggedJob, job_of_log
from presage_validation.public_table import read_table
from presage_validation.run_jobs import COLUMNS, TableRow
from presage_validation.score import Skipped, run_cases
from presage_validation.steps import CUT
from presage_validation.temporal import EVEN, ks_distance, ks_floor, wasserstein

Floats = NDArray[np.float64]
CONDITIONS = "screened"  # what runs for MLPerf are: tested nodes, a network of their own, tuned
DRAWS = 4_000
MOST_RECORD = 64  # consecutive steps that are drawn of a record; means of more steps vary like those of so many
FEWEST = 20  # records that tell a p95
TAILS = {"p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class TailRatio:
    """A quantile over the median, less 1."""

    measured: float
    predicted: float
    low: float  # 90% of noise models
    high: float

    @property
    def points(self) -> float:
        """Error in percentage points."""
        return 100 * (self.predicted - self.measured)


@dataclass(frozen=True)
class ComposedSystem:
    """A system's log beside its prediction."""

    group: str
    submitter: str
    job: str
    config: str  # where it is from
    prior: tuple[str, ...]  # machines behind the noise of its steps
    kind: str
    n: int
    measured_p50: float
    p50_error: float
    tails: Mapping[str, TailRatio]
    w1_over_mean: float
    spread_w1_over_mean: float  # with the medians made equal
    coverage: Mapping[str, float]  # share of records in the interval of so many percent
    ks: float  # with the medians made equal
    ks_floor: float
    in_headline: bool  # the median is in the 90% interval that includes presage's own error

    def to_json(self) -> dict[str, Any]:
        tails = {f"{k}_over_p50": asdict(t) | {"points": t.points} for k, t in self.tails.items()}
        covered = {f"coverage_{k}": v for k, v in self.coverage.items()}
        return {k: v for k, v in asdict(self).items() if k not in ("tails", "coverage")} | tails | covered


@dataclass(frozen=True)
class ComposedResult:
    path: str
    rows: tuple[ComposedSystem, ...]
    skipped: tuple[Skipped, ...]

    def metrics(self) -> dict[str, Any]:
        rows = self.rows
        if not rows:
            return {}
        out: dict[str, Any] = {"p50_error": _middle(r.p50_error for r in rows)}
        for name in TAILS:
            points = [abs(r.tails[name].points) for r in rows]
            out[f"{name}_over_p50_points"] = {"median": float(np.median(points)), "max": float(max(points))}
        out["w1_over_mean"] = _middle(r.w1_over_mean for r in rows)
        out["spread_w1_over_mean"] = _middle(r.spread_w1_over_mean for r in rows)
        for share in rows[0].coverage:
            out[f"coverage_{share}"] = float(np.mean([r.coverage[share] for r in rows]))
        for name in TAILS:
            held = [r.tails[name].low <= r.tails[name].measured <= r.tails[name].high for r in rows]
            out[f"{name}_over_p50_interval_90_coverage"] = float(np.mean(held))
        out["headline_90_coverage"] = float(np.mean([r.in_headline for r in rows]))
        return out | {"ks": _middle(r.ks for r in rows), "ks_floor": _middle(r.ks_floor for r in rows)}

    def constant(self) -> dict[str, float]:
        """Errors of p95 over p50 if it were the median of the other submitters' systems in the logs, in points."""
        errors = []
        for r in self.rows:
            others = [o.tails["p95"].measured for o in self.rows if o.submitter != r.submitter]
            errors += [100 * abs(float(np.median(others)) - r.tails["p95"].measured)] if others else []
        return {"median": float(np.median(errors)), "max": max(errors)} if errors else {}

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "sure",
            "path": self.path,
            "n": len(self.rows),
            "skipped": [asdict(s) for s in self.skipped],
            "metrics": self.metrics(),
            "groups": {r.group: r.to_json() for r in self.rows},
            "baselines": {"constant": {"p95_over_p50_points": self.constant()}},
            "prior": f"{CONDITIONS}; laws of steps from the systems of other submitters",
        }

    def lines(self) -> list[tuple[str, ...]]:
        """Every quantile with its measurement, for a CSV file."""
        head = ("group", "quantile", "measured", "predicted", "low", "high")
        rows = [
            (r.group, f"{name}/p50-1", *(f"{x:.6g}" for x in (t.measured, t.predicted, t.low, t.high)))
            for r in self.rows
            for name, t in r.tails.items()
        ]
        typical = [(r.group, "p50", f"{r.measured_p50:.6g}", f"{r.measured_p50 * (1 + r.p50_error):.6g}", "", "")
                   for r in self.rows]  # fmt: skip
        return [head, *typical, *rows]


def _middle(values: Iterable[float]) -> float:
    return float(np.median(np.abs(list(values))))


def score_composed(
    logs: str | Path, runs: str | Path, tell: Callable[[str], None] = lambda _: None, pool: Pool = SERIAL
) -> ComposedResult:
    """Score every system of the logs whose job can be expressed."""
    return score_systems(read_logs([logs]), list(read_table(Path(runs), COLUMNS)), f"{logs} {runs}", tell, pool)


def score_systems(
    logs: Logs,
    table: Sequence[tuple[int, TableRow]],
    path: str,
    tell: Callable[[str], None] = lambda _: None,
    pool: Pool = SERIAL,
) -> ComposedResult:
    """The same of logs and rows that are read."""
    groups = list(logs.groups().values())
    done, skipped = run_cases(partial(score_system, table), groups, tell, lambda runs: runs[0].group, pool)
    unread = [Skipped(*s) for s in logs.skipped]
    return ComposedResult(path, tuple(row for _, row in done), (*skipped, *unread))


def score_system(table: Sequence[tuple[int, TableRow]], runs: Sequence[StepLog], seed: int = 0) -> ComposedSystem:
    """One system's log against its prediction; raises with the reason where there is none."""
    from presage.errors import PresageError

    if len({r.kind for r in runs}) > 1:
        raise PresageError("its runs are logged in different ways")
    described, seen = job_of_log(runs[0].meta, table), _records(runs)
    if len(seen) < FEWEST:
        raise PresageError(f"{len(seen)} records are too few to tell a p95 ({FEWEST} are needed)")
    return _compared(runs, described, seen, _predicted(runs, described, seed))


def _cut(log: StepLog) -> int:
    return min(CUT if log.single else 1, len(log.seconds) - 1)


def _records(runs: Sequence[StepLog]) -> Floats:
    """Records of all runs, without their first: single steps, or the record that holds those."""
    return np.concatenate([r.seconds[_cut(r) :] for r in runs])


class _Prediction(NamedTuple):
    drawn: Floats  # seconds of records
    others: Floats  # [noise model, record]: rising


def _predicted(runs: Sequence[StepLog], described: LoggedJob, seed: int) -> _Prediction:
    job, meta = described.job, runs[0].meta
    efficiency = efficiency_without(described.source)
    step = job_step(job, efficiency)
    per_node = int(meta.get("gpus_per_node") or 8)
    belief = prior(job.platform.gpu, job.gpus, per_node, step.seconds, CONDITIONS, {str(meta.get("submitter"))})
    record = min(MOST_RECORD, runs[0].stride)
    shape = step_model(job, step, efficiency)
    any_gpus = step_distribution(shape, belief, seed, DRAWS, intervals=False, pool=SERIAL)
    found = step_distribution(shape, on_same_gpus(belief), seed, DRAWS, record=record, pool=SERIAL)
    slower = any_gpus.quantile(0.5).value / found.quantile(0.5).value
    drawn, others = (with_schedule(slower * x, runs, belief.noise, step.seconds, seed) for x in _seconds(found))
    return _Prediction(drawn.ravel(), np.sort(others, axis=1))


def on_same_gpus(belief: Belief) -> Belief:
    """The noise of runs on the same GPUs: how those differ makes all steps of all runs slower, and none vary."""
    spread = {k: replace(s, rank=0.0) for k, s in belief.noise.spread.items()}
    intervals = {p: i for p, i in belief.intervals.items() if not p.endswith(".rank")}
    return replace(belief, noise=replace(belief.noise, spread=spread), intervals=intervals)


def _seconds(found: StepDistribution) -> tuple[Floats, Floats]:
    others = found.others or (found.draws,)
    return found.draws.seconds.reshape(1, -1), np.array([d.seconds.ravel() for d in others])


def with_schedule(drawn: Floats, runs: Sequence[StepLog], noise: NoiseModel, seconds: float, seed: int) -> Floats:
    """Records [noise model, record], as many of which are slow after a validation as the schedule of the runs says."""
    kinds = Counter(k for r in runs for k in kinds_of(r.steps, r.events, lead_of(r))[_cut(r) :])
    rng, total = np.random.default_rng((seed, 3)), sum(kinds.values())
    order, first, out = rng.permutation(drawn.shape[1]), 0, drawn.copy()
    for event in noise.scheduled:
        many = round(drawn.shape[1] * kinds[event.name] / total)
        at, first = order[first : first + many], first + many
        excess = np.maximum(event.factor.sample(rng, (len(drawn), many)) - 1, 0.0)
        out[:, at] += excess * seconds / runs[0].stride
    return out


def _compared(runs: Sequence[StepLog], d: LoggedJob, seen: Floats, p: _Prediction) -> ComposedSystem:
    middle, typical = float(np.median(seen)), float(np.median(p.drawn))
    rows = p.others / np.median(p.others, axis=1, keepdims=True)
    relative, pool = seen / middle, np.quantile(p.others, EVEN)
    error, spread = model_error("moe" if d.job.model.experts else "dense"), pool / np.median(pool)
    low, high = error.interval(typical)
    submitter = str(runs[0].meta.get("submitter"))
    return ComposedSystem(
        group=runs[0].group,
        submitter=submitter,
        job=_layout(d),
        config=d.config,
        prior=tuple(sorted({s.machine for s in known_systems() if s.submitter != submitter})),
        kind=runs[0].kind,
        n=len(seen),
        measured_p50=middle,
        p50_error=typical / middle - 1,
        tails={k: _tail(seen, p.drawn, rows, q) for k, q in TAILS.items()},
        w1_over_mean=wasserstein(np.quantile(p.drawn, EVEN), seen) / float(seen.mean()),
        spread_w1_over_mean=wasserstein(spread, relative) / float(relative.mean()),
        coverage={f"{100 * s:g}": _coverage(p.others / typical, relative, s) for s in SHARES},
        ks=ks_distance(spread, relative),
        ks_floor=ks_floor(len(seen)),
        in_headline=low <= middle <= high,
    )


def _layout(d: LoggedJob) -> str:
    j, p = d.job, d.job.parallel
    return (
        f"{j.model.name} on {j.gpus} {j.platform.gpu.key}, tp{p.tp} pp{p.pp}x{p.virtual} cp{p.cp} dp{j.dp}, "
        f"batch {j.global_batch}, {j.precision}"
    )


def _tail(seen: Floats, drawn: Floats, rows: Floats, q: float) -> TailRatio:
    """With the interval of what a log of so many records would show under each noise model."""
    logged = rows[:, np.random.default_rng(0).integers(0, rows.shape[1], len(seen))]
    low, high = np.quantile(np.quantile(logged, q, axis=1) / np.median(logged, axis=1) - 1, [0.05, 0.95])
    return TailRatio(_above(seen, q), _above(drawn, q), float(low), float(high))


def _above(x: Floats, q: float) -> float:
    return float(np.quantile(x, q) / np.median(x) - 1)


def _coverage(predicted: Floats, seen: Floats, share: float) -> float:
    """Share of records within the middle `share` of what is predicted, both over their medians."""
    low, high = np.quantile(predicted, [0.5 - share / 2, 0.5 + share / 2])
    return float(np.mean((seen >= low) & (seen <= high)))
