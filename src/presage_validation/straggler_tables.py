"""Tables of step times predicted from per-operation tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from presage.report.terminal import plain_table
from presage_fit.ops.sizes import sizes_of

if TYPE_CHECKING:
    from presage_validation.stragglers import Figures, JobForecast, StragglersResult

__all__ = ["effect_table", "straggler_table"]

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
