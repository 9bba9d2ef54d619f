"""Faults of nodes: the later days of a log from its earlier ones.

A log is cut by time, never at random: what was known on the last day of the first part (nodes not back are not back)
is fitted, and the days after it are predicted. Cuts are at 3/7, 4/7 and 5/7 of the days; with two logs the first is
fitted and the second predicted. Scored: the share of node time lost, faults per node-day, nodes away that 95% of days
do not exceed (spares needed), and the share of faults on the tenth of nodes with most. Beside it: a constant rate with
the median repair, and the share that was lost before. Nothing is fitted on days that are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from presage.errors import PresageError
from presage_fit.fault_log import FaultLog, check_follows, read_fault_log
from presage_fit.faults import FaultModel, fit_faults, forecast
from presage_validation.score import AccuracyResult, Row, Skipped

CUTS = (3 / 7, 4 / 7, 5 / 7)
METRICS = ("share_lost", "fault_rate", "spares_p95", "worst_tenth")
BASELINES = ("median_repair", "as_before")
BAR = 0.20


@dataclass(frozen=True)
class FaultResult(AccuracyResult):
    """Predictions of the later days, those of the baselines, and 90% intervals."""

    baselines: Mapping[str, AccuracyResult] = field(default_factory=dict)
    intervals: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # by metric and cut

    def to_json(self) -> dict[str, Any]:
        inside = [self.intervals[r.metric, r.group] for r in self.rows]
        rows = [
            {"cut": r.group, "metric": r.metric, "predicted": r.predicted, "low": a, "high": b, "measured": r.measured}
            for r, (a, b) in zip(self.rows, inside, strict=True)
        ]
        return super().to_json() | {
            "bar": BAR,
            "rows": rows,
            "baselines": {k: r.to_json()["metrics"] for k, r in self.baselines.items()},
        }


def score_faults(
    paths: Sequence[Path], tell: Callable[[str], None] = lambda _: None, nodes: int | None = None
) -> FaultResult:
    """One log, cut; or two, the second predicted from the first."""
    if len(paths) not in (1, 2):
        raise PresageError("accuracy faults takes one log, which it cuts, or two: the days fitted, the days predicted")
    logs = [read_fault_log(p, nodes) for p in paths]
    skipped = tuple(Skipped(f"{x.name}, {row}", why) for x in logs for row, why in x.skipped)
    cases = _cases(logs)
    rows, others, intervals = [], {b: list[Row]() for b in BASELINES}, {}
    for name, seen, after in cases:
        tell(name)
        model = fit_faults(seen)
        truth = measured(after)
        for metric, (low, middle, high) in predicted(model, after.days).items():
            rows.append(Row(metric, name, seen.name, middle, truth[metric]))
            intervals[metric, name] = low, high
        for b, value in _baselines(seen).items():
            others[b].append(Row("share_lost", name, seen.name, value, truth["share_lost"]))
    covered = [intervals[r.metric, r.group][0] <= r.measured <= intervals[r.metric, r.group][1] for r in rows]
    baselines = {b: AccuracyResult("faults", "", tuple(v)) for b, v in others.items()}
    path = ", ".join(p.name for p in paths)
    rates = {"interval_90_coverage": float(np.mean(covered))}
    return FaultResult("faults", path, tuple(rows), skipped, rates, baselines=baselines, intervals=intervals)


def _cases(logs: Sequence[FaultLog]) -> list[tuple[str, FaultLog, FaultLog]]:
    """Name, days fitted and days predicted."""
    first = logs[0]
    if len(logs) == 2:
        check_follows(first, logs[1])
        return [(f"{first.name} -> {logs[1].name}", first, logs[1])]
    cuts = [round(first.begin + c * first.days) for c in CUTS]
    return [
        (f"days {first.begin:g}-{c} -> {c}-{first.end:g}", first.between(first.begin, c), first.between(c, first.end))
        for c in cuts
    ]


def measured(log: FaultLog) -> dict[str, float]:
    """What happened in the days of a log."""
    counts = np.sort(log.counts())[::-1]
    tenth = counts[: max(1, round(log.nodes / 10))].sum() / max(1, counts.sum())
    values = (log.share_lost(), log.rate, float(np.quantile(log.away(), 0.95)), float(tenth))
    return dict(zip(METRICS, values, strict=True))


def predicted(model: FaultModel, days: float) -> dict[str, tuple[float, float, float]]:
    """5th percentile, median and 95th of each metric."""
    found = forecast(model, days)
    values = (found.share, found.rate, found.away_p95, found.worst_tenth)
    levels = [np.quantile(v, [0.05, 0.5, 0.95]) for v in values]
    return {m: (float(a), float(b), float(c)) for m, (a, b, c) in zip(METRICS, levels, strict=True)}


def _baselines(seen: FaultLog) -> dict[str, float]:
    ended = seen.hours[~seen.open & seen.new]
    return {"median_repair": seen.rate * float(np.median(ended)) / 24, "as_before": seen.share_lost()}
