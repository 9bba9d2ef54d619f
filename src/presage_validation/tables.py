"""Rich tables of accuracy results."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from presage.report.terminal import plain_table
from presage.text import percent, seconds, shorten
from presage_validation.capture import CaseMatch
from presage_validation.fleet import FleetResult
from presage_validation.score import Result, Score
from presage_validation.sharding import ShardingResult


def accuracy_table(result: Result) -> Table:
    """Errors overall and by group."""
    columns = ("n", "MAPE", "geomean", "median", "p90", "max", "bias")
    table = plain_table(f"Accuracy: {result.kind}", "metric", "group", *columns, left=2)
    for metric, s in result.metrics().items():
        table.add_row(metric, "all", *_cells(s), style="bold")
    for group in result.groups():
        for metric, s in result.metrics(group).items():
            table.add_row(metric, group, *_cells(s))
    return table


def _cells(s: Score) -> list[str]:
    return [str(s.n), *(percent(x, 2) for x in (s.mape, s.geomean, s.median, s.p90, s.max, s.bias))]


def capture_table(cases: Sequence[CaseMatch]) -> Table:
    """How much of each case's kernel time was captured op by op, and the largest piece that was not."""
    table = plain_table(
        "Captured against traced", "case", "kernel time", "matched", "ops", "matched ops", "largest miss"
    )
    for c in cases:
        miss = f"{c.only_in_trace[0][0]}: {shorten(str(c.only_in_trace[0][1]), 70)}" if c.only_in_trace else ""
        table.add_row(c.case, seconds(c.seconds), percent(c.share, 2), str(c.ops), str(c.matched_ops), miss)
    return table


def sharding_table(result: ShardingResult) -> Table:
    """What each predictor picks of the measured placements."""
    table = plain_table(
        "Picks among measured placements", "predictor", "tasks", "best", "within 5%", "within 10%", "mean regret", "tau"
    )
    for name, p in result.picks().items():
        shares = (percent(x, 0) for x in (p.top1, p.within_5pct, p.within_10pct))
        tau = "" if p.kendall_tau is None else f"{p.kendall_tau:.2f}"
        style = "bold" if name == "presage" else ""
        table.add_row(name, str(p.tasks), *shares, percent(p.mean_regret, 1), tau, style=style)
    return table


def fleet_table(result: FleetResult) -> Table:
    """Errors of the 99th percentile and of the expected largest, median and p90 over sets, by table."""
    table = plain_table(
        "Slow end of fleets, from 50 GPUs",
        "fleet",
        "GPUs",
        "n",
        "metric",
        "median",
        "p90",
        "in 90%",
        "Normal",
        "sample",
    )
    for group in (*result.sizes, None):
        ours, size = result.result.metrics(group), result.sizes.get(group or "")
        for metric, s in ours.items():
            n = "" if size is None else str(size[2 if metric.endswith("fleet") else 1])
            covered = (
                result.result.rates[f"{metric}_interval_90_coverage"]
                if group is None
                else result.coverage[group][metric]
            )
            others = [percent(r.metrics(group)[metric].median, 2) for r in result.baselines.values()]
            head = ("all", "") if group is None else (group, str(size[0]) if size else "")
            cells = (metric, percent(s.median, 2), percent(s.p90, 2), percent(covered, 0), *others)
            table.add_row(*head, n, *cells, style="bold" if group is None else "")
    return table
