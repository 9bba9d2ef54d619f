"""What runs when: a row for each lane (a thread, a stream, a rank, a stage), a bar for each task.

bars = Bars.of(Bar("stage 0", 0.0, 0.1, "forward", "microbatch 0"), ...)    or columns: Bars(lanes, groups, names, ...)
lanes_figure(bars)

A timeline of many tasks is drawn with neighbours that are too short to be seen as one bar: see `merged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.charts.words import label
from presage.report.html.theme import colours

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Bar", "Bars", "lanes_figure", "merged"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MARKS = 5_000  # bars: more are slow to draw and cannot be told apart
FINEST = 4_000  # parts of the span: the finest that is drawn when there are too many bars
LANES = 24  # more rows than that are not readable
ROW, AROUND = 30, 120  # pixels of a lane, and above and below all of them
LEAST_HEIGHT = 270  # or a legend of many groups leaves nothing on a narrow screen
THICK = 0.86  # of a lane


@dataclass(frozen=True)
class Bar:
    """One task: seconds from the left edge, and how long. Bars of one group have one colour."""

    lane: str
    start: float
    seconds: float
    group: str
    name: str = ""


@dataclass(frozen=True, eq=False)
class Bars:
    """Tasks as columns: places in `lanes` (the first on top), `groups` (in the legend's order) and `names`."""

    lanes: tuple[str, ...]
    groups: tuple[str, ...]
    names: tuple[str, ...]
    lane: Ints
    start: Floats
    seconds: Floats
    group: Ints
    name: Ints

    @staticmethod
    def of(*bars: Bar) -> Bars:
        columns = [[getattr(b, key) for b in bars] for key in ("lane", "group", "name")]
        (lanes, lane), (groups, group), (names, name) = map(_numbered, columns)
        start, seconds = (np.array([getattr(b, k) for b in bars], np.float64) for k in ("start", "seconds"))
        return Bars(lanes, groups, names, lane, start, seconds, group, name)

    @staticmethod
    def joined(parts: Sequence[Bars]) -> Bars:
        """One below the other: lanes of equal names are different lanes, groups and names of equal ones the same."""
        groups = tuple(dict.fromkeys(g for p in parts for g in p.groups))
        names = tuple(dict.fromkeys(n for p in parts for n in p.names))
        before = np.cumsum([0, *(len(p.lanes) for p in parts)])
        return Bars(
            lanes=tuple(n for p in parts for n in p.lanes),
            groups=groups,
            names=names,
            lane=np.concatenate([p.lane + b for p, b in zip(parts, before, strict=False)]),
            start=np.concatenate([p.start for p in parts]),
            seconds=np.concatenate([p.seconds for p in parts]),
            group=np.concatenate([_renumbered(p.groups, groups)[p.group] for p in parts]),
            name=np.concatenate([_renumbered(p.names, names)[p.name] for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def end(self) -> Floats:
        return self.start + self.seconds

    @cached_property
    def span(self) -> tuple[float, float]:
        """From the first start to the last end."""
        return (float(self.start.min()), float(self.end.max())) if len(self) else (0.0, 0.0)

    def some(self, which: ArrayLike) -> Bars:
        """These tasks alone, in the same lanes."""
        columns = ("lane", "start", "seconds", "group", "name")
        return replace(self, **{k: getattr(self, k)[which] for k in columns})

    def clipped(self, begin: float, end: float) -> Bars:
        """What runs in a window, from its left edge on; what is only partly in it is cut."""
        lo, hi = np.maximum(self.start, begin), np.minimum(self.end, end)
        moved = replace(self, start=lo - begin, seconds=hi - lo)
        return moved.some(hi > lo)

    def in_lanes(self, wanted: Iterable[int]) -> Bars:
        """With these lanes alone, in this order."""
        order = list(wanted)
        place = np.full(len(self.lanes), -1, np.int64)
        place[order] = np.arange(len(order))
        kept = self.some(place[self.lane] >= 0)
        return replace(kept, lanes=tuple(self.lanes[i] for i in order), lane=place[kept.lane])

    @cached_property
    def busy(self) -> Floats:
        """Seconds of each lane."""
        return np.bincount(self.lane, self.seconds, len(self.lanes)).astype(np.float64)


def _numbered(values: Iterable[str]) -> tuple[tuple[str, ...], Ints]:
    values = list(values)
    place = {v: i for i, v in enumerate(dict.fromkeys(values))}
    return tuple(place), np.array([place[v] for v in values], np.int64)


def _renumbered(old: tuple[str, ...], new: tuple[str, ...]) -> Ints:
    place = {v: i for i, v in enumerate(new)}
    return np.array([place[v] for v in old], np.int64)


def merged(bars: Bars, most: int = MARKS) -> Bars:
    """At most about `most` bars: neighbours of a lane that are too short to be seen become one.

    It spans all of them, has the colour of the group that takes most of it, and says how many they are.
    """
    if len(bars) <= most:
        return bars
    order = np.lexsort((bars.start, bars.lane))
    bars = bars.some(order)
    low, high = bars.span
    parts, found = FINEST, bars
    while parts >= 1:
        found = _merged(bars, (high - low) / parts)
        if len(found) <= most:
            break
        parts //= 2
    return found


def _merged(bars: Bars, width: float) -> Bars:
    """Bars that begin in the same stretch of so many seconds, and are shorter than it, as one."""
    short = bars.seconds < width
    cell = np.floor((bars.start - bars.span[0]) / width).astype(np.int64)
    new = np.ones(len(bars), np.bool_)
    new[1:] = (np.diff(bars.lane) != 0) | (np.diff(cell) != 0) | ~short[1:] | ~short[:-1]
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(bars)))
    group = _main_group(bars, np.cumsum(new) - 1, len(first))
    names, name = _counted(bars, first, count, group)
    seconds = np.maximum.reduceat(bars.end, first) - bars.start[first]
    return Bars(bars.lanes, bars.groups, names, bars.lane[first], bars.start[first], seconds, group, name)


def _main_group(bars: Bars, into: Ints, count: int) -> Ints:
    """Of each merged bar the group that takes most of it."""
    took = np.zeros((count, len(bars.groups)))
    np.add.at(took, (into, bars.group), bars.seconds)
    return np.asarray(took.argmax(axis=1), np.int64)


def _counted(bars: Bars, first: Ints, count: Ints, group: Ints) -> tuple[tuple[str, ...], Ints]:
    """Names of merged bars: of one alone its own, else how many."""
    told = [
        bars.names[bars.name[i]] if n == 1 else f"{n} tasks, mostly {bars.groups[g]}"
        for i, n, g in zip(first.tolist(), count.tolist(), group.tolist(), strict=True)
    ]
    return _numbered(told)


def readable(bars: Bars, most: int = LANES) -> Bars:
    """Where there are too many lanes the busiest and the least busy of them, in their order."""
    if len(bars.lanes) <= most:
        return bars
    order = np.argsort(-bars.busy, kind="stable")
    kept = [*order[: most - most // 2], *order[len(order) - most // 2 :]]
    return bars.in_lanes(sorted(int(i) for i in kept))


def lanes_figure(bars: Bars, paint: Mapping[str, str] | None = None, most: int = MARKS, lanes: int = LANES) -> Figure:
    """Lanes below each other over time; drag to zoom, click a group in the legend to hide it."""
    from plotly.graph_objects import Figure

    bars = merged(readable(bars, lanes), most)
    unit = time_unit(bars.span[1] - bars.span[0])
    paint = {**colours(bars.groups), **(paint or {})}
    figure = Figure([_group(bars, g, unit, paint[bars.groups[g]]) for g in np.unique(bars.group).tolist()])
    figure.update_xaxes(title_text=f"time, {unit.name}", zeroline=False)
    figure.update_yaxes(
        tickvals=list(range(len(bars.lanes))), ticktext=[label(n, 36) for n in bars.lanes], fixedrange=True,
        range=[len(bars.lanes) - 0.5, -0.5], ticks="", showgrid=False, zeroline=False,
    )  # fmt: skip
    height = max(AROUND + ROW * len(bars.lanes), LEAST_HEIGHT)
    return figure.update_layout(height=height, barmode="overlay", hovermode="closest", dragmode="zoom")


def _group(bars: Bars, group: int, unit: Unit, colour: str) -> Any:
    from plotly.graph_objects import Bar as Drawn

    mine = bars.some(bars.group == group)
    return Drawn(
        orientation="h",
        y=mine.lane.astype(np.int16),
        base=np.round(mine.start / unit.size, 6),
        x=mine.seconds / unit.size,
        width=THICK,  # a group with bars in few lanes would have thicker ones
        name=label(bars.groups[group], 40),
        hovertext=[label(bars.names[i]) for i in mine.name],
        hovertemplate=f"%{{hovertext}}<br>at %{{base:.5~g}} {unit.name}, takes %{{x:.4~g}} {unit.name}",
        marker={"color": colour, "line": {"width": 0}},
    )
