"""Rich tables of what indices tell of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from presage.report.plain import plain_table
from presage.text import percent

if TYPE_CHECKING:
    from presage.embeddings.index_counts import TableCounts

__all__ = ["counted_table"]


def counted_table(tables: Sequence[TableCounts], batch: int) -> Table:
    """What was counted, a row a table; of the histogram the rows used once, and those used 32 times or more."""
    names = ("rows", "pooling", "lookups", "distinct", "used once", "used 32x", "most used", "alpha")
    table = plain_table(f"Indices, in a batch of {batch}", "table", *names)
    for t in tables:
        shares = (percent(t.hist[0], 1), percent(sum(t.hist[5:]), 2))
        counts = (f"{t.lookups:,}", f"{t.distinct:,}")
        table.add_row(t.name, f"{t.rows:,}", f"{t.pooling:.2f}", *counts, *shares, f"{t.top:,}", f"{t.alpha:.2f}")
    return table
