"""What moves a number most: a row for each change, its bar as long as what it does, the longest on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from presage.report.html.charts.words import label
from presage.report.html.page import Table
from presage.report.html.theme import ACCENT, BAD, GOOD, PALETTE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Swing", "tornado_figure", "tornado_table"]

ROW, AROUND = 30, 112  # pixels of a row, and above and below all of them
SHOWN = 16
ROOM = 0.2  # of the width, for a number
LEAST = 5e-5  # what moves it less is not drawn
NONE = float("nan")


@dataclass(frozen=True)
class Swing:
    """What a change does to a number, as shares of it, one for each series: -0.02 is 2% less; nan where none is."""

    name: str
    changes: tuple[float, ...]
    errors: tuple[float, ...] = ()  # standard ones, where they are known

    @property
    def size(self) -> float:
        return max((abs(c) for c in self.changes if isfinite(c)), default=0.0)


def tornado_figure(
    swings: Sequence[Swing], series: Sequence[str], what: str, *, apart: bool = False, shown: int = SHOWN
) -> Figure:
    """`what` is the number that changes. Series of one row lie on one line (less to the left, more to the right), or
    below each other where they are `apart`."""
    from plotly.graph_objects import Figure

    rows = [s for s in _order(swings)[:shown] if s.size >= LEAST]
    paint = (ACCENT, PALETTE[1], PALETTE[2]) if apart else (GOOD, BAD, PALETTE[1])
    figure = Figure([_bars(rows, k, name, paint[k % 3]) for k, name in enumerate(series)])
    figure.update_xaxes(
        title_text=f"change of {what}", tickformat="+.2~%", zeroline=True, zerolinewidth=1.5, range=_range(rows)
    )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    each = ROW * (1 + 0.45 * (len(series) - 1)) if apart else ROW
    mode = "group" if apart else "overlay"
    height = int(AROUND + each * max(len(rows), 2))
    return figure.update_layout(height=height, barmode=mode, bargap=0.3, hovermode="closest")


def tornado_table(swings: Sequence[Swing], first: str, series: Sequence[str], title: str = "") -> Table:
    """All of them, the longest first."""
    rows = (
        (s.name, *(_told(c, s.errors[k] if k < len(s.errors) else 0.0) for k, c in enumerate(s.changes)))
        for s in _order(swings)
    )
    return Table((first, *series), tuple(rows), title)


def _order(swings: Sequence[Swing]) -> list[Swing]:
    return sorted(swings, key=lambda s: -s.size)


def _range(rows: Sequence[Swing]) -> list[float] | None:
    """With room for the numbers at the bars' ends."""
    ends = [c for s in rows for c in s.changes if isfinite(c)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = ROOM * (high - low)
    return [low - room * (low < 0), high + room * (high > 0)] if room else None


def _bars(rows: Sequence[Swing], k: int, name: str, colour: str) -> Any:
    from plotly.graph_objects import Bar

    values = [s.changes[k] for s in rows]
    errors = [s.errors[k] if k < len(s.errors) else 0.0 for s in rows]
    return Bar(
        y=[label(s.name, 44) for s in rows],
        x=values,
        name=label(name, 40),
        orientation="h",
        marker={"color": colour, "cornerradius": 2},
        text=[_told(v, e) for v, e in zip(values, errors, strict=True)],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}, " + label(name, 40) + ": %{text}<extra></extra>",
    )


def _told(change: float, error: float = 0.0) -> str:
    if not isfinite(change):
        return "-"
    if abs(change) < LEAST and error < LEAST:
        return "~0"
    digits = 2 if abs(change) < 0.0995 else 1
    return f"{100 * change:+.{digits}f}%" + (f" ± {100 * error:.{digits}f}" if error else "")
