"""Tables of predicted step-time distributions against measured ones."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from presage.report.terminal import plain_table
from presage_validation.steps import StepsResult, summary
from presage_validation.temporal import Ratio, TemporalResult
from presage_validation.zero_data import ZeroData

__all__ = ["step_tables", "temporal_table", "zero_table"]

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
        table.add_row(_short(group), *_cells(summary([r for r in rows if r.group == group])))
    table.add_row("all", *_cells(summary(rows)), style="bold")
    if any(r.n_cut for r in rows):
        cut = sum(r.n_cut for r in rows)
        table.add_row(f"all, with the {cut} first steps", *_cells(summary(rows, cut=False)))
    table.add_row("training steps resampled (iid)", *_cells(summary(rows, "iid")))
    table.add_row("best single family", *_cells(summary(rows, "family")))
    return table


def _cells(s: dict[str, Any]) -> list[str]:
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
