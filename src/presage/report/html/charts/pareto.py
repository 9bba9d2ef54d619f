"""Plans as points, time against memory: the front that none beats in both, the chosen one as a star."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.charts.words import label
from presage.report.html.theme import ACCENT, BAD, GOOD, MUTED, PALETTE
from presage.text import size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Point", "pareto_figure", "thinned"]

GIB = 1024.0**3
POINTS = 3_000
NEAR = 1.15  # times the front's time: plans within it are all shown as far as there is room
SLOWEST = 2.0  # times the fastest: what is slower is out of view until one zooms out
WIDEST = 1.12  # times the GPU's memory, likewise


@dataclass(frozen=True)
class Point:
    """A plan: its words, seconds of a step, bytes a GPU needs."""

    name: str
    seconds: float
    needed: float


def pareto_figure(
    plans: Sequence[Point],
    front: Sequence[Point],
    capacity: float,
    chosen: Point,
    own: Point | None = None,
    too_large: Sequence[Point] = (),
    what: str = "time of a step",
    most: int = POINTS,
) -> Figure:
    """`capacity` in bytes; `what` the points' seconds are. `own` is the plan one began with; `too_large` would be
    faster and do not fit."""
    from plotly.graph_objects import Figure

    unit, figure = time_unit(chosen.seconds), Figure()
    kept = [plans[i] for i in thinned([p.seconds for p in plans], [p.needed for p in plans], most)]
    _dots(figure, kept, "plans that fit", unit, {"size": 5, "color": ACCENT, "opacity": 0.45})
    grey = {"size": 8, "color": MUTED, "symbol": "x-thin-open", "line": {"width": 2, "color": MUTED}}
    _dots(figure, too_large, "faster, but does not fit", unit, grey)
    _front(figure, front, unit)
    _dots(
        figure, [own] if own else [], "the job's own plan", unit, {"size": 13, "color": PALETTE[1], "symbol": "diamond"}
    )
    star = {"size": 18, "color": GOOD, "symbol": "star", "line": {"width": 1, "color": "white"}}
    _dots(figure, [chosen], "the best plan", unit, star)
    figure.add_vline(x=capacity / GIB, line={"color": BAD, "width": 1.4, "dash": "dash"})
    figure.add_annotation(
        x=capacity / GIB, y=0.5, yref="paper", text="the GPU's memory", showarrow=False, xanchor="left", textangle=90
    )
    least = min(p.needed for p in (*kept, *front, chosen))
    sides = [0.9 * least / GIB, max(WIDEST * capacity, 1.05 * (own.needed if own else 0.0)) / GIB]
    figure.update_xaxes(title_text="memory a GPU needs, GiB", zeroline=False, range=sides)
    figure.update_yaxes(
        title_text=f"{what}, {unit.name}", zeroline=False, range=_view(kept, too_large, own, chosen, unit)
    )
    return figure.update_layout(height=480, hovermode="closest")


def thinned(seconds: Sequence[float], needed: Sequence[float], most: int) -> list[int]:
    """Places of at most so many: all near the front, as far as there is room, and evenly many of the rest."""
    if len(seconds) <= most:
        return list(range(len(seconds)))
    far = _far(np.asarray(seconds, float), np.asarray(needed, float))
    order = np.argsort(far, kind="stable")
    near = int((far <= NEAR).sum())
    first = min(near, most * 2 // 3)
    rest = order[first:]
    return sorted([*order[:first].tolist(), *rest[np.linspace(0, len(rest) - 1, most - first).astype(int)].tolist()])


def _far(seconds: NDArray[np.float64], needed: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times as long as the fastest that needs no more memory."""
    order = np.lexsort((seconds, needed))
    out = np.empty(len(order))
    out[order] = seconds[order] / np.minimum.accumulate(seconds[order])
    return out


def _view(plans: Sequence[Point], others: Sequence[Point], own: Point | None, chosen: Point, unit: Unit) -> list[float]:
    """Of times: from the fastest to what is not much slower."""
    times = [p.seconds for p in (*plans, *others, *([own] if own else []), chosen)]
    low = min(times)
    high = max(min(max(times), SLOWEST * low), own.seconds if own and own.seconds < 2 * SLOWEST * low else 0.0)
    around = 0.06 * max(high - low, 0.01 * high)
    return [(low - around) / unit.size, (high + around) / unit.size]


def _dots(figure: Figure, points: Sequence[Point], name: str, unit: Unit, marker: dict[str, object]) -> None:
    if not points:
        return
    figure.add_scatter(
        x=np.array([p.needed for p in points]) / GIB, y=np.array([p.seconds for p in points]) / unit.size,
        mode="markers", marker=marker, name=name, text=[_told(p, unit) for p in points],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def _told(p: Point, unit: Unit) -> str:
    return f"<b>{label(p.name, 90)}</b><br>{unit.told(p.seconds)}, {size(p.needed)}"


def _front(figure: Figure, front: Sequence[Point], unit: Unit) -> None:
    points = sorted(front, key=lambda p: p.needed)
    figure.add_scatter(
        x=np.array([p.needed for p in points]) / GIB, y=np.array([p.seconds for p in points]) / unit.size,
        mode="lines+markers", name="none is better in both", line={"color": PALETTE[2], "width": 2, "shape": "hv"},
        marker={"size": 7}, text=[_told(p, unit) for p in points], hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
