"""The same things several times, side by side: measured and predicted, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from presage.report.html.charts.units import Unit
from presage.report.html.charts.words import label
from presage.report.html.theme import ACCENT, GOOD, PALETTE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["beside_figure"]

PAINT = (PALETTE[-1], ACCENT, GOOD, PALETTE[1])
PLACES = 80  # more are not drawn
FEW = 30  # places that each have a name below
ROW, AROUND = 21, 110


def beside_figure(
    places: Sequence[str], series: Mapping[str, Sequence[float]], along: str, unit: Unit, across: bool = False
) -> Figure:
    """Of each place a bar a series; `across`: places below each other, for long names."""
    from plotly.graph_objects import Bar, Figure

    figure, shown = Figure(), [label(p, 36) for p in places[:PLACES]]
    spots = list(range(len(shown)))
    for i, (name, values) in enumerate(series.items()):
        drawn = np.asarray(values, dtype=float)[:PLACES]
        axes = {"x": drawn / unit.size, "y": spots} if across else {"y": drawn / unit.size, "x": spots}
        text = [f"{place}, {label(name, 30)}: {unit.told(float(v))}" for place, v in zip(shown, drawn, strict=True)]
        figure.add_trace(
            Bar(
                **axes, name=label(name, 30), orientation="h" if across else "v", text=text, textposition="none",
                hovertemplate="%{text}<extra></extra>", marker={"color": PAINT[i % len(PAINT)], "line": {"width": 0}},
            )
        )  # fmt: skip
    every = 1 if across else max(1, -(-len(shown) // FEW))
    places_ = {"tickvals": spots[::every], "ticktext": shown[::every], "zeroline": False, "ticks": ""}
    figure.update_layout(barmode="group", bargap=0.28, bargroupgap=0.05)
    if across:
        figure.update_xaxes(title_text=unit.name)
        figure.update_yaxes(autorange="reversed", showgrid=False, **places_)
        return figure.update_layout(height=AROUND + ROW * max(len(shown) * len(series), 4))
    figure.update_xaxes(title_text=along, showgrid=False, **places_)
    figure.update_yaxes(title_text=unit.name)
    return figure.update_layout(height=360)
