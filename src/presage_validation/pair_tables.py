"""Tables of predicted speed-ups beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from presage.report.terminal import plain_table
from presage_validation.whatif import PairResult, Scored, rates

__all__ = ["group_table", "pair_table"]


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
        table.add_row(*_cells(p), style="" if p.right_sign or not p.has_effect else "red")
    return table


def _cells(p: Scored) -> list[str]:
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
