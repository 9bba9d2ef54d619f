"""Heat maps: ranks or stages against quantities, and what lies where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.answer import DataTable, data_table
from presage.report.html.charts.bars import AxisUnit, label, named_ticks, time_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plotly.graph_objects import Figure

# ---- ranks against what they do, or against steps: a cell's colour tells how far it is from the usual of its column


Floats = NDArray[np.float64]

ROWS, COLUMNS = 64, 60  # more cannot be read
TALL = 24  # rows: more are lower
HEADS = 24  # columns that each have a name
WRITTEN = 200  # cells: more have no number written in them
ROW, LOW_ROW, AROUND = 26, 14, 64  # pixels of a row, of one of many, and above and below all of them
LEAST = 0.1
MOST_ALIKE = 1_000  # rows that one may stand for: more change no median
GAP = 0.04  # between cells
BELOW, ABOVE, USUAL = "76,120,168", "217,83,79", "rgba(150,160,170,0.12)"


def notable_rows(values: ArrayLike, most: int = ROWS) -> list[int]:
    """The rows to show: all, or those that are farthest from the usual, in their order."""
    table = np.asarray(values, dtype=float)
    if len(table) <= most:
        return list(range(len(table)))
    far = np.nan_to_num(np.abs(_from_usual(table))).max(axis=1, initial=0.0)
    return sorted(np.argsort(-far, kind="stable")[:most].tolist())


def heat_figure(
    rows: Sequence[str],
    columns: Sequence[str],
    values: ArrayLike,
    unit: AxisUnit | None = None,
    alike: Sequence[int] | None = None,
    apart: bool = False,
) -> Figure:
    """`values` are seconds, unless `unit` says of what; red is above the middle of a column, blue below it.

    `alike`: how many each row stands for, where that is not one. `apart`: columns are of different things, and each has
    its own scale of colours.
    """
    from plotly.graph_objects import Figure

    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns))
    far, kept, shown = _from_usual(table, alike), notable_rows(table), min(len(columns), COLUMNS)
    table, far = table[kept, :shown], far[kept, :shown]
    unit = unit or time_unit(float(np.nanmax(np.abs(table), initial=0.0)))
    scale = _scales(far, apart)
    names, heads = [label(rows[i], 30) for i in kept], [label(c, 24) for c in columns[:shown]]
    hover = [
        [f"{r}, {c}: {_cell_text(table[i, j], unit)}<br>{far[i, j] / unit.size:+.3g} {unit.name} from the usual"
         for j, c in enumerate(heads)] for i, r in enumerate(names)
    ]  # fmt: skip
    figure = Figure(_cells([[_shade(x) for x in row] for row in far / scale], hover))
    if table.size <= WRITTEN:
        _add_numbers(figure, table, unit)
    _ticks(figure, names, heads)
    rows_high = (ROW if len(kept) <= TALL else LOW_ROW) * len(kept)
    return figure.update_layout(height=AROUND + max(rows_high, 90), showlegend=False, margin_b=12)


def _shade(far: float) -> str:
    """From blue (-1) to red (1), pale in the middle; none where nothing is."""
    if np.isnan(far):
        return "rgba(0,0,0,0)"
    strength = 0.8 * min(abs(far), 1.0)
    return f"rgba({ABOVE if far > 0 else BELOW},{strength:.2f})" if strength > 0.12 else USUAL


def _cells(colours: Sequence[Sequence[str]], hover: Sequence[Sequence[str]]) -> Any:
    """A map as bars, one per cell: Plotly's basic bundle has no heat maps."""
    from plotly.graph_objects import Bar

    places = [(i, j) for i, row in enumerate(hover) for j, text in enumerate(row) if text]
    return Bar(
        orientation="h", y=[i for i, _ in places], base=[j - 0.5 + GAP / 2 for _, j in places],
        x=[1 - GAP] * len(places), width=1 - 2 * GAP, hovertext=[hover[i][j] for i, j in places],
        marker={"color": [colours[i][j] for i, j in places], "line": {"width": 0}},
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _scales(far: Floats, apart: bool) -> Floats:
    """What is full colour: the farthest of all cells, or of each column's; of a column where all are near, not less
    than a part of the farthest of all."""
    most = float(np.nanmax(np.abs(far), initial=0.0)) or 1.0
    if not apart or not far.size:
        return np.full(far.shape[1], most)
    return np.asarray(np.maximum(np.nan_to_num(np.abs(far)).max(axis=0), LEAST * most))


def _add_numbers(figure: Figure, table: Floats, unit: AxisUnit) -> None:
    """The numbers in their cells, in the colour of all text."""
    many, across = table.shape
    figure.add_scatter(
        x=np.tile(np.arange(across), many), y=np.repeat(np.arange(many), across), mode="text", hoverinfo="skip",
        text=[_cell_text(v, unit) for v in table.ravel()], textfont={"size": 11},
    )  # fmt: skip


def _cell_text(value: float, unit: AxisUnit) -> str:
    return "-" if np.isnan(value) else unit.format(float(value))


def _ticks(figure: Figure, rows: list[str], columns: list[str]) -> None:
    figure.update_xaxes(side="top", range=[-0.5, len(columns) - 0.5], **named_ticks(columns, HEADS))
    figure.update_yaxes(range=[len(rows) - 0.5, -0.5], **named_ticks(rows))


def heat_table(
    first: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: ArrayLike,
    unit: AxisUnit | None = None,
    title: str = "",
) -> DataTable:
    """Every cell as a number, those that are not drawn with them."""
    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns))
    unit = unit or time_unit(float(np.nanmax(np.abs(table), initial=0.0)))
    cells = (tuple(_cell_text(v, unit) for v in row) for row in table)
    named = ((name, *row) for name, row in zip(rows, cells, strict=True))
    return data_table(title, (first, *columns), named, where="page")


def _from_usual(table: Floats, alike: Sequence[int] | None = None) -> Floats:
    """How far each cell is from its column's median."""
    if not table.size:
        return table
    each = np.repeat(table, np.minimum(alike, MOST_ALIKE), axis=0) if alike is not None else table
    known = ~np.isnan(each)
    usual = [np.median(c[k]) if k.any() else np.nan for c, k in zip(each.T, known.T, strict=True)]
    return np.asarray(table - np.array(usual))


# ---- what is where: things against places, a cell the stronger the more of it is there, empty where nothing is


GRID_ROW, GRID_MARGIN = 15, 110
GRID_NAMED = 32  # places that each have a name


def grid_figure(rows: Sequence[str], columns: Sequence[str], values: ArrayLike, unit: AxisUnit, along: str) -> Figure:
    """`values` [rows, columns] in what `unit` says; nan where nothing is."""
    from plotly.graph_objects import Figure

    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns)) / unit.size
    shade = np.log10(np.where(table > 0, table, np.nan))
    low, high = (float(f(shade[np.isfinite(shade)], initial=s)) for f, s in ((np.min, np.inf), (np.max, -np.inf)))
    strong = np.nan_to_num(0.16 + 0.84 * (shade - low) / max(high - low, 1e-9), nan=0.16)
    names, places = [label(r, 28) for r in rows], [label(c, 16) for c in columns]
    colours = [[f"rgba({BELOW},{x:.2f})" for x in row] for row in strong.tolist()]
    figure = Figure(_cells(colours, _grid_text(names, places, table, along, unit)))
    figure.update_xaxes(title_text=along, **named_ticks(places, GRID_NAMED))
    figure.update_yaxes(autorange="reversed", tickfont={"size": 10}, **named_ticks(names))
    height = GRID_MARGIN + max(GRID_ROW * len(names), 90)
    return figure.update_layout(height=height, hovermode="closest", showlegend=False)


def _grid_text(names: list[str], places: list[str], table: Floats, along: str, unit: AxisUnit) -> list[list[str]]:
    """What a cell says; nothing where nothing is."""
    return [
        ["" if np.isnan(v) else f"{n}, {along} {p}: {v:.4g} {unit.name}" for p, v in zip(places, row, strict=True)]
        for n, row in zip(names, table.tolist(), strict=True)
    ]
