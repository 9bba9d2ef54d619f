"""What is where: things against places, a cell the stronger the more of it is there, empty where nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.html.charts.units import Unit
from presage.report.html.charts.words import label
from presage.report.html.theme import ACCENT

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["grid_figure"]

Floats = NDArray[np.float64]
ROW, AROUND = 15, 110
FEW = 32  # places that each have a name
SCALE = [[0.0, "rgba(76,120,168,0.16)"], [1.0, ACCENT]]


def grid_figure(rows: Sequence[str], columns: Sequence[str], values: ArrayLike, unit: Unit, along: str) -> Figure:
    """`values` [rows, columns] in what `unit` says; nan where nothing is."""
    from plotly.graph_objects import Figure, Heatmap

    table = np.asarray(values, dtype=float).reshape(len(rows), len(columns)) / unit.size
    shade = np.log10(np.where(table > 0, table, np.nan))
    names, places = [label(r, 28) for r in rows], [label(c, 16) for c in columns]
    cells = Heatmap(
        z=np.round(shade, 3), x=list(range(len(columns))), y=list(range(len(rows))), colorscale=SCALE, showscale=False,
        xgap=1, ygap=1, hoverongaps=False, customdata=_told(names, places, table, along, unit),
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    figure = Figure(cells)
    every = max(1, -(-len(places) // FEW))
    figure.update_xaxes(
        title_text=along, tickvals=list(range(len(places)))[::every], ticktext=places[::every], showgrid=False,
        ticks="", zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, autorange="reversed", showgrid=False, ticks="",
        zeroline=False, tickfont={"size": 10},
    )  # fmt: skip
    return figure.update_layout(height=AROUND + max(ROW * len(names), 90), hovermode="closest")


def _told(names: list[str], places: list[str], table: Floats, along: str, unit: Unit) -> list[list[str]]:
    """What a cell says; nothing where nothing is."""
    return [
        ["" if np.isnan(v) else f"{n}, {along} {p}: {v:.4g} {unit.name}" for p, v in zip(places, row, strict=True)]
        for n, row in zip(names, table.tolist(), strict=True)
    ]
