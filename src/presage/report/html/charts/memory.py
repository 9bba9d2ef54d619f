"""Memory over a step, stacked by what it holds, with the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.report.html.charts.words import label
from presage.report.html.theme import ACCENT, BAD, MUTED, colours
from presage.text import size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["memory_figure"]

Bytes = NDArray[np.int64]
GIB = 1024.0**3
POINTS = 1_500  # ops: of more, the highest of each few
NEAR = 2.5  # times the peak: a capacity above that would squash the rest


def memory_figure(
    allocated: Bytes,
    reserved: Bytes,
    kinds: Mapping[str, Bytes],
    capacity: float,
    phases: Sequence[tuple[str, int, int]] = (),
    ops: Sequence[str] = (),
) -> Figure:
    """Bytes at each op, in order; `kinds` add up to the allocated. `phases`: name, first op, the one after the last."""
    from plotly.graph_objects import Figure

    kept, figure = _highest(allocated), Figure()
    names = [label(ops[i], 60) if i < len(ops) else f"op {i}" for i in kept.tolist()]
    scale, unit = (GIB, "GiB") if allocated.max(initial=0) >= GIB / 4 else (1024.0**2, "MiB")
    _areas(figure, kept, {k: v / scale for k, v in kinds.items()} or {"allocated": allocated / scale}, names, unit)
    _lines(figure, kept, reserved / scale, capacity / scale, unit, float(reserved.max(initial=0)) / scale)
    _peak(figure, allocated, scale)
    _shades(figure, phases)
    figure.update_xaxes(title_text="ops, in the order they run", zeroline=False, range=[0, max(len(allocated) - 1, 1)])
    figure.update_yaxes(title_text=unit, rangemode="tozero", zeroline=False)
    return figure.update_layout(height=430, hovermode="x unified")


def _highest(allocated: Bytes) -> NDArray[np.int64]:
    """Of each few neighbours the op with most memory; first and last are kept."""
    n = len(allocated)
    if n <= POINTS:
        return np.arange(n)
    edges = np.linspace(0, n, POINTS + 1).astype(np.int64)[:-1]
    best = [a + int(allocated[a:b].argmax()) for a, b in zip(edges, [*edges[1:], n], strict=True)]
    return np.unique([0, *best, n - 1])


def _areas(
    figure: Figure, kept: NDArray[np.int64], kinds: Mapping[str, NDArray[np.float64]], names: list[str], unit: str
) -> None:
    paint = colours(kinds)
    for i, (kind, held) in enumerate(kinds.items()):
        figure.add_scatter(
            x=kept, y=held[kept].astype(np.float32), name=label(kind, 30), stackgroup="held", mode="lines",
            line={"width": 0, "shape": "hv"}, fillcolor=paint[kind],
            text=names if i == 0 else None,
            hovertemplate=f"%{{y:.3~f}} {unit}" + ("<br><i>%{text}</i>" if i == 0 else ""),
        )  # fmt: skip


def _lines(
    figure: Figure, kept: NDArray[np.int64], reserved: NDArray[np.float64], capacity: float, unit: str, peak: float
) -> None:
    figure.add_scatter(
        x=kept, y=reserved[kept].astype(np.float32), name="reserved", mode="lines",
        line={"width": 1.4, "dash": "dot", "color": MUTED, "shape": "hv"}, hovertemplate=f"%{{y:.3~f}} {unit}",
    )  # fmt: skip
    ends = [0, int(kept[-1])] if len(kept) else []
    figure.add_scatter(
        x=ends, y=[capacity] * len(ends), name="the GPU's memory", mode="lines", line={"width": 1.6, "color": BAD},
        hovertemplate=f"%{{y:.4~g}} {unit}", visible=True if capacity < NEAR * peak else "legendonly",
    )  # fmt: skip


def _peak(figure: Figure, allocated: Bytes, scale: float) -> None:
    if not len(allocated):
        return
    at = int(allocated.argmax())
    figure.add_scatter(
        x=[at], y=[allocated[at] / scale], name="peak", mode="markers", hoverinfo="skip",
        marker={"size": 9, "color": ACCENT, "symbol": "diamond", "line": {"width": 1.5, "color": "white"}},
    )  # fmt: skip
    side = "left" if at < 0.6 * len(allocated) else "right"
    figure.add_annotation(
        x=at, y=allocated[at] / scale, text=f"<b>peak</b> {size(float(allocated[at]))}", showarrow=False,
        xanchor=side, xshift=8 if side == "left" else -8, yshift=12,
    )  # fmt: skip


def _shades(figure: Figure, phases: Sequence[tuple[str, int, int]]) -> None:
    """Every other phase on a shade, each with its name below the axis' upper end."""
    for i, (name, first, after) in enumerate(phases):
        if i % 2:
            figure.add_vrect(x0=first, x1=after, fillcolor=MUTED, opacity=0.10, line_width=0, layer="below")
        figure.add_annotation(
            x=(first + after) / 2, y=1, yref="paper", text=label(name, 20), showarrow=False, yanchor="top",
            font={"size": 11}, opacity=0.7,
        )  # fmt: skip
