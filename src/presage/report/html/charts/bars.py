"""Parts of a whole, longest first, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from presage.report.html.charts.units import time_unit
from presage.report.html.charts.words import label
from presage.report.html.theme import MUTED, colours
from presage.text import percent, seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["parts_figure"]

ROW, AROUND = 26, 90  # pixels of a bar, and above and below all of them
SHOWN = 14


def parts_figure(parts: Sequence[tuple[str, float]], whole: float, shown: int = SHOWN) -> Figure:
    """Seconds of each part of `whole`; those past `shown` in one bar."""
    from plotly.graph_objects import Bar, Figure

    rows = sorted((p for p in parts if p[1] > 0), key=lambda p: -p[1])
    rest = sum(took for _, took in rows[shown:])
    rows = rows[:shown] + ([(f"{len(rows) - shown} more", rest)] if rest else [])
    paint = {**colours(name for name, _ in rows), **({rows[-1][0]: MUTED} if rest else {})}
    unit = time_unit(rows[0][1] if rows else 0.0)
    bars = Bar(
        x=[took / unit.size for _, took in rows],
        y=[label(name, 44) for name, _ in rows],
        orientation="h",
        marker={"color": [paint[name] for name, _ in rows], "cornerradius": 3},
        text=[f"{(unit.told if unit.size > 1 else seconds)(took)}, {percent(took / whole)}" for _, took in rows],
        textposition="auto",
        hovertemplate="%{y}: %{text}<extra></extra>",
        cliponaxis=False,
    )
    figure = Figure(bars)
    figure.update_xaxes(title_text=unit.name, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", ticks="")
    return figure.update_layout(height=AROUND + ROW * len(rows), showlegend=False, bargap=0.28)
