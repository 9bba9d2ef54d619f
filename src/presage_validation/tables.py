"""Rich tables of accuracy results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from presage.report.terminal import plain_table
from presage.text import percent, seconds, shorten
from presage_fit.ops.sizes import sizes_of
from presage_validation.capture import CaseMatch
from presage_validation.fleet import FleetResult
from presage_validation.score import AccuracyResult, Score
from presage_validation.sharding import ShardingScores
from presage_validation.steps import StepsResult, ZeroData, summary
from presage_validation.temporal import Ratio, TemporalResult
from presage_validation.whatif import PairResult, Scored, rates

if TYPE_CHECKING:
    from presage_validation.stragglers import Figures, JobForecast, StragglersResult


def accuracy_table(result: AccuracyResult) -> Table:
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


def sharding_table(result: ShardingScores) -> Table:
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


# Tables of predicted speed-ups beside measured ones.


def pair_table(result: PairResult) -> Table:
    """Every pair, the largest differences first."""
    columns = (
        "pair",
        "bound",
        "predicted",
        "5% to 95%",
        "measured",
        "points",
        "noise",
        "GPU predicted",
        "GPU measured",
    )
    table = plain_table("Speed-ups, predicted and measured", *columns, fold=False)
    for p in sorted(result.pairs, key=lambda p: -abs(p.points)):
        table.add_row(*_pair_cells(p), style="" if p.right_sign or not p.has_effect else "red")
    return table


def _pair_cells(p: Scored) -> list[str]:
    m = p.measured
    return [
        m.name,
        m.bound.removesuffix("-bound"),
        f"{p.speedup:.3f}",
        f"{p.low:.2f} to {p.high:.2f}",
        f"{m.speedup:.3f}",
        f"{p.points:+.1f}",
        "" if m.noise is None else f"{m.noise:.1f}",
        f"{p.gpu_speedup:.3f}",
        f"{m.gpu_speedup:.3f}",
    ]


def group_table(result: PairResult) -> Table:
    """All pairs, then by bound and by edit."""
    columns = ("group", "pairs", "median", "p90", "right sign", "of", "in range", "runs differ")
    table = plain_table("Difference of the time saved, in points of the step", *columns)
    for group, some in (("all", [*result.pairs]), *result.parts().items()):
        table.add_row(group, *_rates(rates(some)), style="bold" if group == "all" else "")
    return table


def _rates(r: Mapping[str, float]) -> list[str]:
    return [
        f"{r['pairs']:.0f}",
        f"{r['median_points']:.1f}",
        f"{r['p90_points']:.1f}",
        f"{100 * r['right_sign']:.0f}%" if r["with_effect"] else "",
        f"{r['with_effect']:.0f}",
        f"{100 * r['interval_hit_rate']:.0f}%",
        f"{r['noise_points']:.1f}" if r["noise_points"] == r["noise_points"] else "",
    ]


# Tables of predicted step-time distributions against measured ones.

COLUMNS = (
    "group",
    "runs",
    "n",
    "p50",
    "p95",
    "p99",
    "W1/mean",
    "CRPS ratio",
    "below 95%",
    "KS",
    "floor",
    "total",
    "in 90%",
)


def step_tables(result: StepsResult) -> list[Table]:
    """One of each kind of record: every group, then all of them, beside the baselines."""
    return [_kind_table(result, kind) for kind in result.kinds()]


def _kind_table(result: StepsResult, kind: str) -> Table:
    rows = [r for r in result.rows if r.kind == kind]
    table = plain_table(f"Left-out runs, {kind}: median |errors|", *COLUMNS, fold=False)
    for group in result.groups(kind):
        table.add_row(_short(group), *_step_cells(summary([r for r in rows if r.group == group])))
    table.add_row("all", *_step_cells(summary(rows)), style="bold")
    if any(r.n_cut for r in rows):
        cut = sum(r.n_cut for r in rows)
        table.add_row(f"all, with the {cut} first steps", *_step_cells(summary(rows, cut=False)))
    table.add_row("training steps resampled (iid)", *_step_cells(summary(rows, "iid")))
    table.add_row("best single family", *_step_cells(summary(rows, "family")))
    return table


def _step_cells(s: dict[str, Any]) -> list[str]:
    return [
        str(s["runs"]),
        str(s["n"]),
        *(f"{100 * s[k]:.2f}%" for k in ("p50_error", "p95_error", "p99_error", "w1_over_mean")),
        f"{s['crps_ratio']:.2f}",
        f"{100 * s['coverage_95']:.1f}%",
        f"{s['ks']:.2f}",
        f"{s['ks_floor']:.2f}",
        f"{100 * s['run_total_error']:.2f}%",
        f"{100 * s['run_interval_90_coverage']:.0f}%",
    ]


def zero_table(zero: ZeroData) -> Table:
    table = plain_table(
        "No data: p95 over p50 from GPU, nodes and step time", "group", "GPU", "nodes", "step", "measured", "predicted",
        "90% of systems", "error", left=2,
    )  # fmt: skip
    for r in zero.rows:
        error = 100 * (r.predicted - r.measured)
        table.add_row(
            _short(r.group), r.architecture, f"{r.nodes:.0f}", f"{r.step_seconds:.2f} s", f"+{100 * r.measured:.2f}%",
            f"+{100 * r.predicted:.2f}%", f"{100 * r.low:.1f} to {100 * r.high:.1f}%",
            f"{error:+.2f}{'' if r.hit else ' (miss)'}",
        )  # fmt: skip
    return table


def _short(group: str) -> str:
    parts = group.split("/")
    return "/".join(parts[1:]) if len(parts) == 3 else group


def temporal_table(result: TemporalResult) -> Table:
    """Every series."""
    table = plain_table(
        "Second halves of series, from their first halves", "series", "cause", "n", "warm-up", "slow share",
        "p95/p50", "predicted", "90%", "error", "p99/p50", "predicted", "90%", "error", left=2, fold=False,
    )  # fmt: skip
    for r in result.rows:
        cells = [c for q in ("p95", "p99") for c in _ratio_cells(r.ratios[q])]
        table.add_row(r.series, r.cause, str(r.n), str(r.warm_up), f"{r.slow_share:.2f}", *cells)
    return table


def _ratio_cells(r: Ratio) -> list[str]:
    return [
        f"+{100 * r.measured:.2f}%",
        f"+{100 * r.predicted:.2f}%",
        f"{100 * r.low:.2f} to {100 * r.high:.2f}",
        f"{100 * r.error:+.2f}",
    ]


# Tables of step times predicted from per-operation tables.

FIGURES = ("n", "p50", "p95", "p99", "W1/mean", "CRPS ratio", "below 95%", "KS", "floor", "5%", "total in 90%")
EFFECTS = ("rank", "step", "replica", "load", "own", "transfers", "collectives", "host")


def straggler_table(result: StragglersResult) -> Table:
    """Every job: even steps predict odd ones, the other way round, and every operation drawn by itself."""
    table = plain_table("Steps predicted from the other half of a job's steps", "job", *FIGURES, fold=False)
    for j in result.jobs:
        table.add_row(j.job, *_figures(j.ours), style="bold")
        table.add_row("  odd to even steps", *_figures(j.back))
        table.add_row("  iid pool", *_figures(j.iid))
    return table


def _figures(f: Figures) -> list[str]:
    inside = "-" if f.run_interval_90_coverage is None else ("yes" if f.run_interval_90_coverage else "no")
    return [
        str(f.n),
        *(f"{100 * x:+.2f}%" for x in (f.p50_error, f.p95_error, f.p99_error)),
        f"{100 * f.w1_over_mean:.2f}%",
        f"{f.crps_ratio:.2f}",
        f"{100 * f.coverage_95:.0f}%",
        *(f"{x:.2f}" for x in (f.ks, f.ks_floor, f.ks_critical_5pct)),
        inside,
    ]


def effect_table(result: StragglersResult) -> Table:
    """Standard deviations of the fitted effects, and how sure the p95 is."""
    table = plain_table("Fitted effects (sd)", "job", *EFFECTS, "slow workers", "p95: draws", "steps", fold=False)
    for j in result.jobs:
        table.add_row(*_effects(j))
    return table


def _effects(j: JobForecast) -> list[str]:
    sizes = sizes_of(j.effects)
    slow = ", ".join(f"dp {d} stage {s} x{x:.2f}" for (d, s), x in list(sizes.slow.items())[:3])
    sure = (f"±{100 * x:.2f}%" for x in (j.sure.monte_carlo, j.sure.training_steps))
    return [j.job, *(f"{100 * sizes.by_name[k].value:.2f}%" for k in EFFECTS), slow or "none", *sure]
