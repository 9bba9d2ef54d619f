"""Ranks against what they do, or against steps: a cell's colour tells how far it is from the usual of its column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.charts.words import label
from presage.report.html.page import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["heat_figure", "heat_table", "telling"]

Floats = NDArray[np.float64]

ROWS, COLUMNS = 64, 60  # more cannot be read
TALL = 24  # rows: more are lower
WRITTEN = 200  # cells: more have no number written in them
ROW, LOW_ROW, AROUND = 26, 14, 64  # pixels of a row, of one of many, and above and below all of them
LEAST = 0.1
MOST_ALIKE = 1_000  # rows that one may stand for: more change no median
SCALE = [[0.0, "rgba(76,120,168,0.8)"], [0.5, "rgba(150,160,170,0.12)"], [1.0, "rgba(217,83,79,0.8)"]]


def telling(values: ArrayLike, most: int = ROWS) -> list[int]:
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
    unit: Unit | None = None,
    alike: Sequence[int] | None = None,
    apart: bool = False,
) -> Figure:
    """`values` are seconds, unless `unit` says of what; red is above the middle of a column, blue below it.

    `alike`: how many each row stands for, where that is not one. `apart`: columns are of different things, and each has
    its own scale of colours.
    """
    from plotly.graph_objects import Figure, Heatmap

    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns))
    far, kept, shown = _from_usual(table, alike), telling(table), min(len(columns), COLUMNS)
    table, far = table[kept, :shown], far[kept, :shown]
    unit = unit or time_unit(float(np.nanmax(np.abs(table), initial=0.0)))
    scale = _scales(far, apart)
    names, heads = [label(rows[i], 30) for i in kept], [label(c, 24) for c in columns[:shown]]
    hover = [
        [f"{r}, {c}: {_told(table[i, j], unit)}<br>{far[i, j] / unit.size:+.3g} {unit.name} from the usual"
         for j, c in enumerate(heads)] for i, r in enumerate(names)
    ]  # fmt: skip
    map_ = Heatmap(
        z=far / scale, x=list(range(shown)), y=list(range(len(kept))), zmin=-1, zmax=1, colorscale=SCALE, xgap=2,
        ygap=2, text=hover, hoverongaps=False, showscale=False, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure = Figure(map_)
    if table.size <= WRITTEN:
        _write(figure, table, unit)
    _ticks(figure, names, heads)
    rows_high = (ROW if len(kept) <= TALL else LOW_ROW) * len(kept)
    return figure.update_layout(height=AROUND + max(rows_high, 90), showlegend=False, margin_b=12)


def _scales(far: Floats, apart: bool) -> Floats:
    """What is full colour: the farthest of all cells, or of each column's; of a column where all are near, not less
    than a part of the farthest of all."""
    most = float(np.nanmax(np.abs(far), initial=0.0)) or 1.0
    if not apart or not far.size:
        return np.full(far.shape[1], most)
    return np.asarray(np.maximum(np.nan_to_num(np.abs(far)).max(axis=0), LEAST * most))


def _write(figure: Figure, table: Floats, unit: Unit) -> None:
    """The numbers in their cells, in the colour of all text."""
    many, across = table.shape
    figure.add_scatter(
        x=np.tile(np.arange(across), many), y=np.repeat(np.arange(many), across), mode="text", hoverinfo="skip",
        text=[_told(v, unit) for v in table.ravel()], textfont={"size": 11},
    )  # fmt: skip


def _told(value: float, unit: Unit) -> str:
    return "-" if np.isnan(value) else unit.told(float(value))


def _ticks(figure: Figure, rows: list[str], columns: list[str]) -> None:
    every = max(1, -(-len(columns) // 24))
    places = list(range(0, len(columns), every))
    figure.update_xaxes(
        tickvals=places, ticktext=[columns[i] for i in places], side="top", ticks="", range=[-0.5, len(columns) - 0.5],
        showgrid=False, zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=rows, range=[len(rows) - 0.5, -0.5], ticks="",
        showgrid=False, zeroline=False,
    )  # fmt: skip


def heat_table(
    first: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: ArrayLike,
    unit: Unit | None = None,
    title: str = "",
) -> Table:
    """Every cell as a number, those that are not drawn with them."""
    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns))
    unit = unit or time_unit(float(np.nanmax(np.abs(table), initial=0.0)))
    cells = (tuple(_told(v, unit) for v in row) for row in table)
    return Table((first, *columns), tuple((name, *row) for name, row in zip(rows, cells, strict=True)), title)


def _from_usual(table: Floats, alike: Sequence[int] | None = None) -> Floats:
    """How far each cell is from its column's median."""
    if not table.size:
        return table
    each = np.repeat(table, np.minimum(alike, MOST_ALIKE), axis=0) if alike is not None else table
    known = ~np.isnan(each)
    usual = [np.median(c[k]) if k.any() else np.nan for c, k in zip(each.T, known.T, strict=True)]
    return np.asarray(table - np.array(usual))
