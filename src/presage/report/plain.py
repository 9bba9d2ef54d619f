"""The one look all tables share."""

from __future__ import annotations

from rich.table import Table

__all__ = ["plain_table"]


def plain_table(title: str, *columns: str, left: int = 1, fold: bool = True) -> Table:
    """A table without lines: the first `left` columns to the left, numbers to the right; `fold` lets those wrap too."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i > 0 and not fold)
    return table
