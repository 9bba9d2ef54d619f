"""Rich tables of embeddings: picks among placements, and what indices tell of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from presage.report.plain import plain_table
from presage.text import percent

if TYPE_CHECKING:
    from presage.embeddings.index_counts import Counted
    from presage_validation.sharding import ShardingResult

__all__ = ["counted_table", "sharding_table"]


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


def counted_table(tables: Sequence[Counted], batch: int) -> Table:
    """What was counted, a row a table; of the histogram the rows used once, and those used 32 times or more."""
    names = ("rows", "pooling", "lookups", "distinct", "used once", "used 32x", "most used", "alpha")
    table = plain_table(f"Indices, in a batch of {batch}", "table", *names)
    for t in tables:
        shares = (percent(t.hist[0], 1), percent(sum(t.hist[5:]), 2))
        counts = (f"{t.lookups:,}", f"{t.distinct:,}")
        table.add_row(t.name, f"{t.rows:,}", f"{t.pooling:.2f}", *counts, *shares, f"{t.top:,}", f"{t.alpha:.2f}")
    return table
