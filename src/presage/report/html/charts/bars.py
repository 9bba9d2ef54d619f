"""Parts of a whole, longest first, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from presage.report.html.theme import colours
from presage.report.text import percent, seconds

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
    paint = colours(name for name, _ in rows)
    bars = Bar(
        x=[took for _, took in rows],
        y=[name for name, _ in rows],
        orientation="h",
        marker={"color": [paint[name] for name, _ in rows], "cornerradius": 3},
        text=[f"{seconds(took)}, {percent(took / whole)}" for _, took in rows],
        textposition="auto",
        hovertemplate="%{y}: %{text}<extra></extra>",
        cliponaxis=False,
    )
    figure = Figure(bars)
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", ticks="")
    return figure.update_layout(height=AROUND + ROW * len(rows), showlegend=False, bargap=0.28)
