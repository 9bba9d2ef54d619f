"""The one look all tables share."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["plain_table"]

GAP = 2  # between columns
MOST_KEYS = 3  # columns that name a row
NARROW, ROOMY = 10, 24  # that text is wrapped to: rather than cut the table in parts, and where it is cut anyway


def plain_table(title: str, *columns: str, left: int = 1, fold: bool = True) -> Table:
    """A table without lines: the first `left` columns to the left, numbers to the right; `fold` lets those wrap too."""
    table = _Plain(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i > 0 and not fold)
    return table


class _Plain(Table):
    """Where it is too wide for the screen, texts wrap, numbers never do: the table is cut in parts instead, one below
    the other, each with the columns that name its rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = [_widest(console, options, column) for column in self.columns]
        if not self.columns or sum(wide) + GAP * (len(wide) - 1) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        fixed = [_fixed(c, w) for c, w in zip(self.columns, wide, strict=True)]
        for k, some in enumerate(_parts(fixed, wide, options.max_width)):
            part = copy(self)
            part.columns = [replace(fixed[i], _index=n) for n, i in enumerate(some)]
            part.title = self.title if k == 0 else " "
            yield from super(_Plain, part).__rich_console__(console, options)


def _widest(console: Console, options: ConsoleOptions, column: Column) -> int:
    every = (column.header, *column.cells)
    return max(Measurement.get(console, options.update(width=10_000), cell).maximum for cell in every)


def _fixed(column: Column, widest: int) -> Column:
    """A column of numbers: its cells on one line, its header's words below each other where they are longer."""
    header = str(column.header)
    if column.justify == "left":
        return column
    if len(header) < widest:
        return replace(column, width=widest)
    cells = max((len(str(cell)) for cell in column.cells), default=0)
    return replace(column, width=max([cells, *(len(word) for word in header.split())]), no_wrap=False)


def _parts(columns: Sequence[Column], wide: Sequence[int], width: int) -> list[list[int]]:
    """Which columns go beside each other."""

    def total(some: Sequence[int], text: int) -> int:
        needs = (columns[i].width or (wide[i] if columns[i].no_wrap else min(wide[i], text)) for i in some)
        return sum(needs) + GAP * (len(some) - 1)

    whole = list(range(len(columns)))
    if total(whole, NARROW) <= width:
        return [whole]
    keys = next((i for i, c in enumerate(columns) if c.justify != "left"), len(columns))
    again = whole[: next((n for n in range(1, MOST_KEYS + 1) if _unique(columns[:n])), keys)]
    names, numbers = whole[: max(keys, len(again))], whole[max(keys, len(again)) :]
    out, part = list[list[int]](), list[int]()
    for i in numbers:
        if part and total([*(again if out else names), *part, i], ROOMY) > width:
            out.append([*(again if out else names), *part])
            part = []
        part.append(i)
    return [*out, [*(again if out else names), *part]]


def _unique(columns: Sequence[Column]) -> bool:
    """Whether no two rows agree in them."""
    rows = list(zip(*([str(cell) for cell in c.cells] for c in columns), strict=True))
    return len(set(rows)) == len(rows)
