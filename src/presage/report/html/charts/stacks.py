"""Parts on top of each other at several places (stages, ranks, plans), those below 0 downwards; a limit across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from presage.report.html.charts.units import Unit
from presage.report.html.charts.words import label
from presage.report.html.theme import BAD, colours

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["GIB", "stacks_figure"]

GIB = Unit("GiB", 1024.0**3)
NEAR = 2.5  # times the highest stack: a limit above that would squash the rest
FEW = 40  # places that each have a name below


def stacks_figure(
    places: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    along: str,
    unit: Unit,
    limit: tuple[str, float] | None = None,
) -> Figure:
    """`parts`: of each name a value a place, in what `unit` says; `limit`: its name and value, if it is near."""
    from plotly.graph_objects import Figure

    figure, paint = Figure(), colours(parts)
    spots = list(range(len(places)))
    shown = [label(p, 24) for p in places]
    for name, values in parts.items():
        figure.add_bar(
            x=spots, y=np.asarray(values, float) / unit.size, name=label(name, 40), customdata=shown,
            marker={"color": paint[name], "line": {"width": 0}},
            hovertemplate=f"{along} %{{customdata}}, {label(name, 40)}: %{{y:.4~g}} {unit.name}<extra></extra>",
        )  # fmt: skip
    highest = float(np.sum([np.asarray(v, float) for v in parts.values()], axis=0).max(initial=0.0)) if parts else 0.0
    if limit and limit[1] <= NEAR * highest:
        figure.add_hline(y=limit[1] / unit.size, line={"color": BAD, "width": 1.6, "dash": "dash"})
    if limit and highest <= limit[1] <= NEAR * highest:
        figure.add_annotation(
            x=1, xref="paper", y=limit[1] / unit.size, text=label(limit[0], 60), showarrow=False, yanchor="bottom",
            xanchor="right",
        )  # fmt: skip
    every = max(1, -(-len(places) // FEW))
    figure.update_xaxes(title_text=along, tickvals=spots[::every], ticktext=shown[::every], zeroline=False)
    figure.update_yaxes(title_text=unit.name, rangemode="tozero", zeroline=False)
    gap = 0.3 if len(places) <= FEW else 0.05
    return figure.update_layout(height=400, barmode="relative", bargap=gap, legend_traceorder="normal")
