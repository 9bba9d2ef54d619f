"""Bars with the range that nine of ten lie in: how much each of several things gains, or takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from presage.report.html.charts.units import Unit
from presage.report.html.charts.words import label
from presage.report.html.theme import ACCENT, BAD, GOOD, MUTED

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Ranged", "ranges_figure"]

ROW, AROUND = 30, 96
SHOWN = 30


@dataclass(frozen=True)
class Ranged:
    """A value, and what it lies between."""

    name: str
    low: float
    middle: float
    high: float


def ranges_figure(
    rows: Sequence[Ranged], unit: Unit, what: str, base: float = 0.0, judged: bool = False, shown: int = SHOWN
) -> Figure:
    """In the order given. `base` is where bars begin; `judged`: more than it is good, less is bad."""
    from plotly.graph_objects import Bar, Figure

    rows = [r for r in rows if isfinite(r.middle)][:shown]
    middle = [r.middle / unit.size for r in rows]
    bars = Bar(
        y=list(range(len(rows))), x=[m - base / unit.size for m in middle], base=base / unit.size, orientation="h",
        marker={"color": [_colour(r, base) if judged else ACCENT for r in rows], "cornerradius": 3}, width=0.62,
        error_x={
            "type": "data", "symmetric": False, "thickness": 1.4, "width": 4, "color": MUTED,
            "array": [(r.high - r.middle) / unit.size for r in rows],
            "arrayminus": [(r.middle - r.low) / unit.size for r in rows],
        },
        text=[f"{label(r.name, 60)}: {_told(r, unit)}" for r in rows], textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure = Figure(bars)
    figure.update_xaxes(title_text=what)
    names = [f"{label(r.name, 40)}  <b>{unit.told(r.middle)}</b>" for r in rows]
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=names, autorange="reversed", ticks="", showgrid=False, zeroline=False,
    )  # fmt: skip
    if base:
        figure.add_vline(x=base / unit.size, line={"width": 1, "color": MUTED})
    return figure.update_layout(height=AROUND + ROW * max(len(rows), 2), showlegend=False)


def _colour(r: Ranged, base: float) -> str:
    """Grey where the range does not tell on which side of the base it is."""
    return GOOD if r.low > base else BAD if r.high < base else MUTED


def _told(r: Ranged, unit: Unit) -> str:
    return f"{unit.told(r.middle)}, nine of ten from {unit.told(r.low)} to {unit.told(r.high)}"
