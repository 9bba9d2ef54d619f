"""How near the GPU's limits ops run: FLOP/s against FLOPs a byte for those that multiply, bytes/s for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from presage.prediction.step_roofline import RooflinePoint
from presage.report.html.charts.words import label
from presage.report.html.theme import BAD, MUTED, colours
from presage.text import percent, seconds, size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["roofline_figure"]

TERA = 1e12
POINTS = 1_500  # kinds of ops: the costliest are shown
LARGEST = 34.0  # pixels: the dot of the op that takes longest


def roofline_figure(points: Sequence[RooflinePoint], bandwidth: float, peaks: Mapping[str, float]) -> Figure:
    """A dot a kind of op, its area the time all of them take. `peaks`: FLOP/s by type, of those that are run."""
    from plotly.subplots import make_subplots

    points = points[:POINTS]
    multiply = [p for p in points if p.flops and p.moved]
    others = [p for p in points if not p.flops and p.moved]
    rows = [x for x in (multiply, others) if x]
    many = len(rows) == 2
    figure = make_subplots(
        rows=max(len(rows), 1), cols=1, vertical_spacing=0.16, row_heights=[0.6, 0.4] if many else None
    )
    paint, most = colours(p.family for p in points), max((p.seconds for p in points), default=1.0)
    if multiply:
        _roof(figure, multiply, bandwidth, peaks)
        _dots(figure, multiply, paint, most, 1, products=True)
        _axes(figure, 1, "FLOPs for each byte moved", "TFLOP/s")
    if others:
        row, ends = len(rows), _ends([p.moved / p.calls for p in others])
        _line(figure, row, ends, [bandwidth] * 2, f"memory, {bandwidth / TERA:.3g} TB/s")
        _dots(figure, others, paint, most, row, products=False)
        _axes(figure, row, "bytes moved by one op (ops without matrix products)", "")
        figure.update_xaxes(ticksuffix="B", exponentformat="SI", dtick=None, row=row, col=1)
        figure.update_yaxes(ticksuffix="B/s", exponentformat="SI", dtick=None, row=row, col=1)
    return figure.update_layout(
        height=680 if many else 430, hovermode="closest", legend={"traceorder": "normal", "itemsizing": "constant"}
    )


def _roof(figure: Figure, points: Sequence[RooflinePoint], bandwidth: float, peaks: Mapping[str, float]) -> None:
    low, high = _ends([p.flops / p.moved for p in points])
    ridge = max(peaks.values(), default=1.0) / bandwidth
    low, high = min(low, ridge / 20), max(high, 4 * ridge)
    top = max(peaks.values(), default=bandwidth * high)
    _line(
        figure, 1, [low, top / bandwidth], [low * bandwidth / TERA, top / TERA], f"memory, {bandwidth / TERA:.3g} TB/s"
    )
    for dtype, peak in peaks.items():
        _line(figure, 1, [peak / bandwidth, high], [peak / TERA] * 2, f"{dtype}, {peak / TERA:.4g} TFLOP/s")


def _line(figure: Figure, row: int, x: Sequence[float], y: Sequence[float], name: str) -> None:
    """A limit with its name: of the memory's at its left end, of a unit's at its right one, where dots are few."""
    memory = name.startswith("memory")
    figure.add_scatter(
        x=list(x), y=list(y), mode="lines+text", text=[name, ""] if memory else ["", name], textfont={"size": 11},
        textposition=["top right" if row > 1 or x[0] > 1e3 else "bottom right", "top left"] if memory else "top left",
        line={"color": MUTED if memory else BAD, "width": 1.6}, showlegend=False, hoverinfo="skip",
        row=row, col=1, name=name, cliponaxis=False,
    )  # fmt: skip


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.5, max(values) * 1.5


def _dots(
    figure: Figure, points: Sequence[RooflinePoint], paint: Mapping[str, str], most: float, row: int, products: bool
) -> None:
    for family in dict.fromkeys(p.family for p in points):
        mine = [p for p in points if p.family == family]
        x = [p.flops / p.moved if products else p.moved / p.calls for p in mine]
        y = [p.flops / p.seconds / TERA if products else p.moved / p.seconds for p in mine]
        figure.add_scatter(
            x=np.array(x), y=np.array(y), mode="markers", name=label(family, 30), legendgroup=family, row=row, col=1,
            showlegend=not any(t.legendgroup == family for t in figure.data), text=[_told(p) for p in mine],
            hovertemplate="%{text}<extra></extra>",
            marker={
                "size": [p.seconds for p in mine], "sizemode": "area", "sizeref": 2 * most / LARGEST**2, "sizemin": 3,
                "color": paint[family], "opacity": 0.8, "line": {"width": 0.6, "color": "rgba(255,255,255,0.6)"},
            },
        )  # fmt: skip


def _told(p: RooflinePoint) -> str:
    what = label(f"{p.name.removeprefix('aten::')} {p.shapes}", 76)
    rate = f"{p.flops / p.seconds / TERA:.4g} TFLOP/s" if p.flops else f"{p.moved / p.seconds / TERA:.3g} TB/s"
    calls = f"{p.calls} call{'s' if p.calls > 1 else ''}, {seconds(p.seconds)} together"
    near = f"{size(p.moved / p.calls)} each: {percent(p.of_peak)} of the limit"
    return f"<b>{what}</b><br>{p.phase}, {calls}<br>{rate}, {near}"


def _axes(figure: Figure, row: int, x: str, y: str) -> None:
    figure.update_xaxes(type="log", title_text=x, dtick="D2", row=row, col=1)
    figure.update_yaxes(type="log", title_text=y, dtick="D2", row=row, col=1)
