"""Draws as a histogram, and below it the chance of exceeding; quantiles and deadlines are lines in both."""

from __future__ import annotations

from functools import partial
from html import escape
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.bars import AxisUnit, time_unit
from presage.report.html.theme import ACCENT, GOOD, MEANINGS, MUTED
from presage.text import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plotly.graph_objects import Figure


LEVELS = (0.5, 0.95, 0.99)
TABULATED = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
BINS, FEWEST_BINS, POINTS = 80, 16, 240
TAIL = 0.005  # of the draws may lie past the right edge, or more where the tail is long; it says so
LONG = 6.0  # times from the median to p90: where both axes end at most
WIDE = 0.24  # of the chart, that a label is at most
FAR = 1.5  # widths: a mark that is farther away is named at the edge

Values = NDArray[np.float64]


class _Line(NamedTuple):
    """A vertical line: its place, name and look."""

    at: float
    name: str
    colour: str
    dash: str = "solid"


def quantiles_of(draws: ArrayLike, levels: tuple[float, ...] = LEVELS) -> dict[float, float]:
    """Quantiles of draws, which may be infinite; none of no draws."""
    values = np.asarray(draws, dtype=float)
    values = values[~np.isnan(values)]
    if not values.size:
        return {}
    if np.isfinite(values).all():
        return {p: float(np.quantile(values, p)) for p in levels}
    return {p: float(np.quantile(values, p, method="inverted_cdf")) for p in levels}  # none is between a number and inf


def distribution_figure(
    draws: ArrayLike,
    quantiles: Mapping[float, float] | None = None,
    *,
    what: str = "steps",
    marks: Mapping[str, float] | None = None,
    unit: AxisUnit | None = None,
    height: int = 390,
) -> Figure:
    """`draws` and `marks` (a deadline, the prediction without noise) in seconds, unless `unit` says of what.

    `quantiles`: those that are named, p50, p95 and p99 of the draws where none are given. What is infinite never ends:
    it is left out of the bars and counted in the curve.
    """
    from plotly.subplots import make_subplots

    values = np.asarray(draws, dtype=float)
    finite = np.sort(values[np.isfinite(values)])
    if not finite.size:
        return _empty(what)
    unit = unit or time_unit(float(np.median(finite)))
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.58, 0.42])
    lines = _lines(quantiles_of(values) if quantiles is None else quantiles, marks or {})
    low, high = _window(finite, list((marks or {}).values()))
    many = int((~np.isnan(values)).sum())
    _bars(figure, finite, many, low, high, unit, what)
    _curve(figure, finite, many, high, unit, what)
    _mark(figure, lines, low, high, unit)
    _dress(figure, finite, many, low, high, unit, what)
    return figure.update_layout(height=height, showlegend=False, bargap=0, margin_t=_top(lines, low, high))


def distribution_section(draws: ArrayLike, text: str, **how: Any) -> Section:
    """Draws as a section of a page; `how` goes to `distribution_figure`."""
    chart = partial(distribution_figure, draws, **how)
    return Section("Uncertainty", (distribution_table(draws),), chart, text, where="page")


def distribution_table(
    draws: ArrayLike, unit: AxisUnit | None = None, title: str = "Quantiles of the draws"
) -> DataTable:
    """Quantiles of the draws and the chance of exceeding them."""
    found = quantiles_of(draws, TABULATED)
    unit = unit or time_unit(found.get(0.5, 0.0))
    rows = ((f"p{100 * p:g}", _value_text(v, unit), percent(1 - p, 1 if p < 0.999 else 2)) for p, v in found.items())
    return data_table(title, ("quantile", "at most", "exceeded by"), rows, where="page")


def _value_text(value: float, unit: AxisUnit) -> str:
    return unit.format(value) if np.isfinite(value) else "never"


def _empty(what: str) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.add_annotation(text=f"no {what} to show", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return figure.update_layout(height=160, xaxis_visible=False, yaxis_visible=False)


# ---- what is in view


def _window(finite: Values, marks: list[float]) -> tuple[float, float]:
    """The range shown: nearly all draws, without a long tail, and marks that are not too far away."""
    low = float(finite[0])
    p50, p90, p95, last = (float(x) for x in np.quantile(finite, (0.5, 0.9, 0.95, 1 - TAIL)))
    high = max(min(last, p50 + LONG * (p90 - p50)), p95)
    width = max(high - low, 1e-3 * abs(high), 1e-12)
    near = [m for m in marks if np.isfinite(m) and low - FAR * width < m < high + FAR * width]
    low, high = min([low, *near]), max([high, *near])
    around = 0.03 * max(high - low, width)
    return low - around, high + around


def _lines(quantiles: Mapping[float, float], marks: Mapping[str, float]) -> list[_Line]:
    named = [_Line(v, f"p{100 * p:g}", MEANINGS.get(f"p{100 * p:g}", MUTED), "dot") for p, v in quantiles.items()]
    named += [_Line(v, name, GOOD) for name, v in marks.items()]
    return sorted((x for x in named if np.isfinite(x.at)), key=lambda x: x.at)


# ---- what is drawn


def _bars(figure: Figure, finite: Values, total: int, low: float, high: float, unit: AxisUnit, what: str) -> None:
    bins = int(np.clip(2 * np.sqrt(finite.size), FEWEST_BINS, BINS))
    edges = np.linspace(low, high, bins + 1)
    found, _ = np.histogram(finite, edges)
    middle, step = (edges[:-1] + edges[1:]) / 2, (high - low) / bins
    ends = [f"{unit.format(a)} to {unit.format(b)}" for a, b in pairwise(edges)]
    figure.add_bar(
        x=middle / unit.size, y=found / total, width=np.full(bins, 0.94 * step / unit.size), row=1, col=1,
        marker={"color": ACCENT, "line": {"width": 0}}, name=what, customdata=ends,
        hovertemplate=f"%{{y:.2%}} of {what}<br>take %{{customdata}}<extra></extra>",
    )  # fmt: skip


def _curve(figure: Figure, finite: Values, total: int, high: float, unit: AxisUnit, what: str) -> None:
    """P(> x) up to the edge: evenly over its logarithm, so that the tail has as many points as the middle."""
    never = total - finite.size
    ranks = np.unique(finite.size - np.geomspace(1, finite.size, POINTS).round().astype(int))
    x, above = finite[ranks], (finite.size - ranks - 1 + never) / total
    x, above = np.append(finite[0], x), np.append(1.0, above)
    inside = int((x <= high).sum()) + 1  # the first beyond the edge leads the line there
    x, above = x[:inside], above[:inside]
    figure.add_scatter(
        x=x / unit.size, y=np.where(above > 0, above, np.nan), mode="lines", line={"color": ACCENT, "width": 2},
        row=2, col=1, name="longer",
        hovertemplate=f"%{{y:.3%}} of {what}<br>exceed %{{x:.4g}} {unit.name}<extra></extra>",
    )  # fmt: skip


def _mark(figure: Figure, lines: list[_Line], low: float, high: float, unit: AxisUnit) -> None:
    for line, (level, side) in zip(lines, _places(lines, low, high), strict=True):
        at = min(max(line.at, low), high) / unit.size
        label = f"<b>{escape(line.name)}</b> {unit.format(line.at)}"
        look = {"color": line.colour, "width": 1.6, "dash": line.dash}
        x = line.at / unit.size
        if low <= line.at <= high:
            for row in ("", "2"):
                figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, xref=f"x{row}", yref=f"y{row} domain", line=look)
        else:
            label = f"{label} →" if line.at > high else f"← {label}"
        figure.add_annotation(
            x=at, y=1, xref="x", yref="paper", text=label, showarrow=False, xanchor=side, yanchor="bottom",
            yshift=15 * level, font={"size": 11},
        )  # fmt: skip


def _places(lines: list[_Line], low: float, high: float) -> list[tuple[int, str]]:
    """The row and side of each label: the lowest row where it covers no earlier one."""
    taken: dict[int, list[tuple[float, float]]] = {}
    out = []
    for line in lines:
        at = (min(max(line.at, low), high) - low) / (high - low)
        side = "left" if at < 1 - WIDE else "right"
        span = (at, at + WIDE) if side == "left" else (at - WIDE, at)
        level = next(k for k in count() if all(span[1] <= a or b <= span[0] for a, b in taken.get(k, ())))
        taken.setdefault(level, []).append(span)
        out.append((level, side))
    return out


def _top(lines: list[_Line], low: float, high: float) -> int:
    return 26 + 15 * max((level for level, _ in _places(lines, low, high)), default=0)


def _dress(figure: Figure, finite: Values, total: int, low: float, high: float, unit: AxisUnit, what: str) -> None:
    """One x axis for both: what lies beyond its edge is said, the longest too."""
    beyond, never, longest = float((finite > high).mean()), total - finite.size, float(finite[-1])
    more = [f"{percent(beyond, 2)} beyond the edge, at most {unit.format(longest)}"] if beyond else []
    more += [f"{never:,} of {total:,} never finish"] if never else []
    figure.update_xaxes(range=[low / unit.size, high / unit.size])
    figure.update_xaxes(title_text=unit.name + (f" ({'; '.join(more)})" if more else ""), row=2, col=1)
    figure.update_yaxes(title_text=f"share of {what}", tickformat=".2~%", rangemode="tozero", row=1, col=1)
    least = max(float((finite > high).sum() + never) / total, 0.7 / total)
    ends = [min(float(np.log10(0.7 * least)), -1.0), 0.05]
    figure.update_yaxes(
        title_text="chance of exceeding", type="log", tickformat="~%", dtick=1, range=ends, row=2, col=1
    )
