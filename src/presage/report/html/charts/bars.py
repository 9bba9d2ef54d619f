"""Bar charts: parts of a whole, groups, stacks, intervals and tornado diagrams; units and labels of axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from presage.report.answer import DataTable, data_table
from presage.report.html.theme import ACCENT, BAD, GOOD, MUTED, PALETTE, colours
from presage.text import percent, seconds, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plotly.graph_objects import Figure

# ---- the unit that an axis of times is read in


class AxisUnit(NamedTuple):
    """The name of a unit, and its size in seconds, bytes or whatever is drawn."""

    name: str
    size: float

    def format(self, value: float) -> str:
        """A value with four significant digits: 4.916 s, 41,200 days."""
        many = value / self.size
        return f"{many:,.0f} {self.name}" if abs(many) >= 1e4 else f"{many:.4g} {self.name}"


TIMES = (
    AxisUnit("days", 86400.0), AxisUnit("hours", 3600.0), AxisUnit("minutes", 60.0), AxisUnit("s", 1.0),
    AxisUnit("ms", 1e-3), AxisUnit("us", 1e-6),
)  # fmt: skip


def time_unit(typical: float) -> AxisUnit:
    """The largest unit that a typical value in seconds is at least two of; from seconds down, at least one of."""
    if not isfinite(typical) or typical <= 0:
        return AxisUnit("s", 1.0)
    return next((u for u in TIMES if typical >= u.size * (2 if u.size > 1 else 1)), TIMES[-1])


# ---- names as charts show them


CODES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def label(text: str, width: int = 70) -> str:
    """A name escaped for a chart (<float> is no tag) and shortened in the middle."""
    return shorten(" ".join(text.split()), width).translate(CODES)


def named_ticks(names: Sequence[str], most: int | None = None) -> dict[str, Any]:
    """The settings of an axis whose places have names, of which at most about `most` are written."""
    every = max(1, -(-len(names) // most)) if most else 1
    places = list(range(len(names)))[::every]
    return {
        "tickvals": places,
        "ticktext": [names[i] for i in places],
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }


# ---- parts of a whole, longest first, as bars


PART_ROW, PART_MARGIN = 24, 78  # pixels of a bar, and above and below all of them
PARTS_SHOWN = 14


def parts_figure(parts: Sequence[tuple[str, float]], whole: float, shown: int = PARTS_SHOWN) -> Figure:
    """Seconds of each part of `whole`, longest first; those past `shown` share one bar."""
    from plotly.graph_objects import Bar, Figure

    rows = sorted((p for p in parts if p[1] > 0), key=lambda p: -p[1])
    rest = sum(t for _, t in rows[shown:])
    rows = rows[:shown] + ([(f"{len(rows) - shown} more", rest)] if rest else [])
    paint = {**colours(name for name, _ in rows), **({rows[-1][0]: MUTED} if rest else {})}
    unit = time_unit(rows[0][1] if rows else 0.0)
    bars = Bar(
        x=[t / unit.size for _, t in rows],
        y=list(range(len(rows))),
        orientation="h",
        marker={"color": [paint[name] for name, _ in rows], "cornerradius": 3},
        text=[f"{(unit.format if unit.size > 1 else seconds)(t)}, {percent(t / whole)}" for _, t in rows],
        textposition="auto",
        textangle=0,
        customdata=[label(name, 70) for name, _ in rows],
        hovertemplate="%{customdata}: %{text}<extra></extra>",
        cliponaxis=False,
    )
    figure = Figure(bars)
    figure.update_xaxes(title_text=unit.name, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", **named_ticks([label(name, 44) for name, _ in rows]))
    return figure.update_layout(
        height=PART_MARGIN + PART_ROW * len(rows), showlegend=False, bargap=0.28, meta={"kind": "parts"}
    )


# ---- the same things several times, side by side: measured and predicted, before and after


GROUPS_SHOWN = 80  # more are not drawn
NAMED_GROUPS = 30  # places that each have a name below
GROUP_ROW, GROUP_MARGIN = 17, 92


def grouped_figure(
    places: Sequence[str], series: Mapping[str, Sequence[float]], along: str, unit: AxisUnit, across: bool = False
) -> Figure:
    """One group of bars per place, one bar per series; `across`: horizontal bars, for long names."""
    from plotly.graph_objects import Bar, Figure

    figure, shown, paint = Figure(), [label(p, 36) for p in places[:GROUPS_SHOWN]], colours(series)
    spots = list(range(len(shown)))
    for name, values in series.items():
        drawn = np.asarray(values, dtype=float)[:GROUPS_SHOWN]
        axes = {"x": drawn / unit.size, "y": spots} if across else {"y": drawn / unit.size, "x": spots}
        text = [f"{place}, {label(name, 30)}: {unit.format(float(v))}" for place, v in zip(shown, drawn, strict=True)]
        figure.add_trace(
            Bar(
                **axes, name=label(name, 30), orientation="h" if across else "v", text=text, textposition="none",
                hovertemplate="%{text}<extra></extra>",
                marker={"color": paint[name], "line": {"width": 0}},
            )
        )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.28, bargroupgap=0.05)
    if across:
        figure.update_xaxes(title_text=unit.name)
        figure.update_yaxes(autorange="reversed", **named_ticks(shown))
        return figure.update_layout(height=GROUP_MARGIN + GROUP_ROW * max(len(shown) * len(series), 4))
    figure.update_xaxes(title_text=along, **named_ticks(shown, NAMED_GROUPS))
    figure.update_yaxes(title_text=unit.name)
    return figure.update_layout(height=300)


# ---- relative errors against a band that is always the same


def band_figure(places: Sequence[str], errors: Sequence[float], band: float) -> Figure:
    """A dot per place, between lines at plus and minus `band`; the axis shows twice the band, or what exceeds it."""
    from plotly.graph_objects import Figure

    figure, shown = Figure(), [label(p, 36) for p in places[:GROUPS_SHOWN]]
    drawn = np.asarray(errors, dtype=float)[:GROUPS_SHOWN]
    figure.add_scatter(
        x=list(range(len(shown))), y=drawn, mode="markers", marker={"size": 8, "color": ACCENT}, showlegend=False,
        text=[f"{place}: {100 * e:+.2f}%" for place, e in zip(shown, drawn, strict=True)],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure.add_hrect(y0=-band, y1=band, fillcolor=GOOD, opacity=0.12, line_width=0, layer="below")
    most = max(2 * band, 1.1 * float(np.nanmax(np.abs(drawn), initial=0.0)))
    figure.update_xaxes(title_text="step", **named_ticks(shown, NAMED_GROUPS))
    figure.update_yaxes(title_text="error", tickformat="+.0%", range=[-most, most], zeroline=True)
    return figure.update_layout(height=230)


# ---- parts on top of each other at several places (stages, ranks, plans), those below 0 downwards; a limit across


GIB = AxisUnit("GiB", 1024.0**3)
NEAR = 2.5  # times the highest stack: a limit above that would squash the rest
NAMED_STACKS = 40  # places that each have a name below


def stacks_figure(
    places: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    along: str,
    unit: AxisUnit,
    limit: tuple[str, float] | None = None,
) -> Figure:
    """`parts`: values by name, one per place, in `unit`; `limit`: name and value of a line, drawn if it is near."""
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
    figure.update_xaxes(title_text=along, **named_ticks(shown, NAMED_STACKS) | {"ticks": "outside", "showgrid": True})
    figure.update_yaxes(title_text=unit.name, rangemode="tozero", zeroline=False)
    gap = 0.3 if len(places) <= NAMED_STACKS else 0.05
    return figure.update_layout(height=330, barmode="relative", bargap=gap, legend_traceorder="normal")


# ---- bars with the range that nine of ten lie in: how much each of several things gains, or takes


INTERVAL_ROW, INTERVAL_MARGIN = 24, 80
INTERVALS_SHOWN = 30


@dataclass(frozen=True)
class IntervalBar:
    """A value, and what it lies between."""

    name: str
    low: float
    middle: float
    high: float


def interval_figure(
    rows: Sequence[IntervalBar],
    unit: AxisUnit,
    what: str,
    base: float = 0.0,
    judged: bool = False,
    shown: int = INTERVALS_SHOWN,
) -> Figure:
    """Bars in the given order. `base` is where they begin; `judged`: above it is good, below is bad."""
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
        text=[f"{label(r.name, 60)}: {_interval_text(r, unit)}" for r in rows], textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure = Figure(bars)
    figure.update_xaxes(title_text=what)
    names = [f"{label(r.name, 40)}  <b>{unit.format(r.middle)}</b>" for r in rows]
    figure.update_yaxes(autorange="reversed", **named_ticks(names))
    if base:
        figure.add_vline(x=base / unit.size, line={"width": 1, "color": MUTED})
    return figure.update_layout(height=INTERVAL_MARGIN + INTERVAL_ROW * max(len(rows), 2), showlegend=False)


def _colour(r: IntervalBar, base: float) -> str:
    """Grey where the interval includes the base."""
    return GOOD if r.low > base else BAD if r.high < base else MUTED


def _interval_text(r: IntervalBar, unit: AxisUnit) -> str:
    return f"{unit.format(r.middle)}, 90% interval {unit.format(r.low)} to {unit.format(r.high)}"


# ---- what moves a number most: a row for each change, its bar as long as what it does, the longest on top


SWING_ROW, SWING_MARGIN = 26, 96  # pixels of a row, and above and below all of them
SWINGS_SHOWN = 16
ROOM = 0.2  # of the width, for a number
LEAST = 5e-5  # what moves it less is not drawn
NO_CHANGE = float("nan")


@dataclass(frozen=True)
class Swing:
    """The relative change of a number, one per series: -0.02 is 2% less, nan is none."""

    name: str
    changes: tuple[float, ...]
    errors: tuple[float, ...] = ()  # standard ones, where they are known

    @property
    def size(self) -> float:
        return max((abs(c) for c in self.changes if isfinite(c)), default=0.0)


def tornado_figure(
    swings: Sequence[Swing], series: Sequence[str], what: str, *, apart: bool = False, shown: int = SWINGS_SHOWN
) -> Figure:
    """`what` is the number that changes. The series of a row share a line, or have one each where they are `apart`."""
    from plotly.graph_objects import Figure

    rows = [s for s in _by_size(swings)[:shown] if s.size >= LEAST]
    paint = list(colours(series).values()) if apart else [GOOD, BAD, PALETTE[1]]
    figure = Figure([_swing_bars(rows, k, name, paint[k % len(paint)]) for k, name in enumerate(series)])
    figure.update_xaxes(
        title_text=f"change in {what}", tickformat="+.2~%", zeroline=True, zerolinewidth=1.5, range=_swing_range(rows)
    )
    figure.update_yaxes(autorange="reversed", **named_ticks([label(s.name, 44) for s in rows]))
    each = SWING_ROW * (1 + 0.45 * (len(series) - 1)) if apart else SWING_ROW
    mode = "group" if apart else "overlay"
    height = int(SWING_MARGIN + each * max(len(rows), 2))
    kind = {"kind": "tornado"}
    return figure.update_layout(height=height, barmode=mode, bargap=0.3, hovermode="closest", meta=kind)


def tornado_table(swings: Sequence[Swing], first: str, series: Sequence[str], title: str = "") -> DataTable:
    """All changes, the largest first."""
    rows = (
        (s.name, *(_change_text(c, s.errors[k] if k < len(s.errors) else 0.0) for k, c in enumerate(s.changes)))
        for s in _by_size(swings)
    )
    return data_table(title, (first, *series), rows, where="page")


def _by_size(swings: Sequence[Swing]) -> list[Swing]:
    return sorted(swings, key=lambda s: -s.size)


def _swing_range(rows: Sequence[Swing]) -> list[float] | None:
    """The axis range, with room for the numbers at the ends of bars."""
    ends = [c for s in rows for c in s.changes if isfinite(c)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = ROOM * (high - low)
    return [low - room * (low < 0), high + room * (high > 0)] if room else None


def _swing_bars(rows: Sequence[Swing], k: int, name: str, colour: str) -> Any:
    from plotly.graph_objects import Bar

    values = [s.changes[k] for s in rows]
    errors = [s.errors[k] if k < len(s.errors) else 0.0 for s in rows]
    return Bar(
        y=list(range(len(rows))),
        x=values,
        name=label(name, 40),
        orientation="h",
        marker={"color": colour, "cornerradius": 2},
        text=[_change_text(v, e) for v, e in zip(values, errors, strict=True)],
        textposition="outside",
        cliponaxis=False,
        customdata=[label(s.name, 70) for s in rows],
        hovertemplate="%{customdata}, " + label(name, 40) + ": %{text}<extra></extra>",
    )


def _change_text(change: float, error: float = 0.0) -> str:
    if not isfinite(change):
        return "-"
    if abs(change) < LEAST and error < LEAST:
        return "~0"
    digits = 2 if abs(change) < 0.0995 else 1
    return f"{100 * change:+.{digits}f}%" + (f" ± {100 * error:.{digits}f}" if error else "")
