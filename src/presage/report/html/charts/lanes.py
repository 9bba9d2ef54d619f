"""Timelines: a row for each lane (thread, stream, rank, stage), a bar for each task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.bars import AxisUnit, label, named_ticks, time_unit
from presage.report.html.theme import colours
from presage.text import percent, seconds, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from plotly.graph_objects import Figure

    from presage.engine import Lane, Timeline

# ---- what runs when: a row for each lane (a thread, a stream, a rank, a stage), a bar for each task


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MARKS = 5_000  # bars: more are slow to draw and cannot be told apart
FINEST = 4_000  # parts of the span: the finest that is drawn when there are too many bars
LANES = 24  # more rows cannot be read
LANE_ROW, MARGIN = 22, 92  # pixels of a lane, and above and below all of them
LEAST_HEIGHT = 190  # or a legend of many groups leaves nothing on a narrow screen
THICK = 0.86  # of a lane


@dataclass(frozen=True, eq=False)
class LaneTasks:
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
    def joined(parts: Sequence[LaneTasks]) -> LaneTasks:
        """One below the other: lanes of equal names are different lanes, groups and names of equal ones the same."""
        groups = tuple(dict.fromkeys(g for p in parts for g in p.groups))
        names = tuple(dict.fromkeys(n for p in parts for n in p.names))
        before = np.cumsum([0, *(len(p.lanes) for p in parts)])
        return LaneTasks(
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

    def select(self, which: ArrayLike) -> LaneTasks:
        """A selection of tasks, in the same lanes."""
        columns = ("lane", "start", "seconds", "group", "name")
        return replace(self, **{k: getattr(self, k)[which] for k in columns})

    def clipped(self, begin: float, end: float) -> LaneTasks:
        """The tasks within a window, cut at its edges, with times from its start."""
        lo, hi = np.maximum(self.start, begin), np.minimum(self.end, end)
        moved = replace(self, start=lo - begin, seconds=hi - lo)
        return moved.select(hi > lo)

    def in_lanes(self, wanted: Iterable[int]) -> LaneTasks:
        """The tasks of these lanes, in this order."""
        order = list(wanted)
        place = np.full(len(self.lanes), -1, np.int64)
        place[order] = np.arange(len(order))
        kept = self.select(place[self.lane] >= 0)
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


def merge_short_tasks(bars: LaneTasks, most: int = MARKS) -> LaneTasks:
    """At most about `most` bars: neighbours of a lane that are too short to be seen become one of each group.

    Those follow one another: each lasts as long as the tasks of its group together, and says how many they are.
    """
    if len(bars) <= most:
        return bars
    order = np.lexsort((bars.start, bars.lane))
    bars = bars.select(order)
    low, high = bars.span
    parts, found = FINEST, bars
    while parts >= 1:
        found = _merge_cells(bars, (high - low) / parts)
        if len(found) <= most:
            break
        parts //= 2
    return found


def _merge_cells(bars: LaneTasks, width: float) -> LaneTasks:
    """Bars that begin in the same stretch of so many seconds, and are shorter than it, as one of each group."""
    short = bars.seconds < width
    cell = np.floor((bars.start - bars.span[0]) / width).astype(np.int64)
    new = np.ones(len(bars), np.bool_)
    new[1:] = (np.diff(bars.lane) != 0) | (np.diff(cell) != 0) | ~short[1:] | ~short[:-1]
    run = np.cumsum(new) - 1
    pairs, first, into, count = np.unique(
        np.stack([run, bars.group]), axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    seconds = np.bincount(into.reshape(-1), bars.seconds, len(first)).astype(np.float64)
    before = np.cumsum(seconds) - seconds  # of all merged bars; from it, of those of the same run
    begins = np.flatnonzero(np.append(True, np.diff(pairs[0]) != 0))
    offset = before - np.repeat(before[begins], np.diff(np.append(begins, len(first))))
    start = bars.start[np.flatnonzero(new)][pairs[0]] + offset
    names, name = _counted(bars, first, count)
    return LaneTasks(bars.lanes, bars.groups, names, bars.lane[first], start, seconds, pairs[1].astype(np.int64), name)


def _counted(bars: LaneTasks, first: Ints, count: Ints) -> tuple[tuple[str, ...], Ints]:
    """Names of merged bars: a task's own, or how many tasks they are."""
    names = [
        bars.names[bars.name[i]] if n == 1 else f"{n} tasks, {bars.groups[bars.group[i]]}"
        for i, n in zip(first.tolist(), count.tolist(), strict=True)
    ]
    return _numbered(names)


def select_lanes(bars: LaneTasks, most: int = LANES) -> LaneTasks:
    """The busiest and the least busy lanes, where there are too many, in their order."""
    if len(bars.lanes) <= most:
        return bars
    order = np.argsort(-bars.busy, kind="stable")
    kept = [*order[: most - most // 2], *order[len(order) - most // 2 :]]
    return bars.in_lanes(sorted(int(i) for i in kept))


def lanes_figure(
    bars: LaneTasks, paint: Mapping[str, str] | None = None, most: int = MARKS, lanes: int = LANES
) -> Figure:
    """Lanes below each other over time; drag to zoom, click a group in the legend to hide it."""
    from plotly.graph_objects import Figure

    bars = merge_short_tasks(select_lanes(bars, lanes), most)
    unit = time_unit(bars.span[1] - bars.span[0])
    paint = {**colours(bars.groups), **(paint or {})}
    figure = Figure([_group(bars, g, unit, paint[bars.groups[g]]) for g in np.unique(bars.group).tolist()])
    figure.update_xaxes(title_text=f"time, {unit.name}", zeroline=False)
    names = [label(n, 36) for n in bars.lanes]
    figure.update_yaxes(fixedrange=True, range=[len(names) - 0.5, -0.5], **named_ticks(names))
    height = max(MARGIN + LANE_ROW * len(bars.lanes), LEAST_HEIGHT)
    how = {"barmode": "overlay", "hovermode": "closest", "dragmode": "zoom", "meta": {"kind": "lanes"}}
    return figure.update_layout(height=height, **how)


def _group(bars: LaneTasks, group: int, unit: AxisUnit, colour: str) -> Any:
    from plotly.graph_objects import Bar as Drawn

    tasks = bars.select(bars.group == group)
    return Drawn(
        orientation="h",
        y=tasks.lane.tolist(),  # lists: the page works with them
        base=_rounded(tasks.start / unit.size),
        x=_rounded(tasks.seconds / unit.size),
        width=THICK,  # a group with bars in few lanes would have thicker ones
        name=label(bars.groups[group], 40),
        hovertext=[label(bars.names[i]) for i in tasks.name],
        hovertemplate=f"%{{hovertext}}<br>at %{{base:.5~g}} {unit.name}, takes %{{x:.4~g}} {unit.name}",
        marker={"color": colour, "line": {"width": 0}},
    )


def _rounded(values: Floats) -> list[float]:
    return [float(f"{v:.6g}") for v in values.tolist()]


# ---- a timeline as a section: its lanes over time, how busy each is, and what takes longest on them


WAITS = "waiting for other ranks"
SHORTEST = 1e-9  # seconds: what is shorter is not drawn
LONGEST = 12  # rows


def timeline_tasks(
    timeline: Timeline,
    window: tuple[float, float] | None = None,
    group_of: Callable[[str, Lane], str] = lambda _name, lane: lane.kind.value,
    named: Callable[[Lane], str] = lambda lane: lane.name,
) -> LaneTasks:
    """The tasks of a timeline, or of a window of it, from its left edge on; a task's group follows from its name and
    lane. Waits in meetings are bars of their own."""
    program, wait = timeline.program, timeline.wait
    pairs, into = np.unique(np.stack([program.name, program.lane]), axis=1, return_inverse=True)
    groups = [group_of(program.names[n], program.lanes[k]) for n, k in pairs.T.tolist()]
    times = np.bincount(into.reshape(-1), timeline.end - timeline.start, len(groups)).astype(np.float64)
    known = _order_groups(groups, times)
    group = np.array([known.index(g) for g in groups], np.int64)[into.reshape(-1)]
    waits = np.flatnonzero(wait >= SHORTEST)
    bars = LaneTasks(
        lanes=tuple(named(lane) for lane in program.lanes),
        groups=tuple(known),
        names=(*program.names, WAITS),
        lane=np.concatenate([program.lane, program.lane[waits]]).astype(np.int64),
        start=np.concatenate([timeline.start, timeline.ready[waits]]),
        seconds=np.concatenate([timeline.end - timeline.start, wait[waits]]),
        group=np.concatenate([group, np.full(len(waits), len(known) - 1)]),
        name=np.concatenate([program.name, np.full(len(waits), len(program.names))]).astype(np.int64),
    )
    bars = bars.select(bars.seconds >= SHORTEST)
    bars = bars if window is None else bars.clipped(*window)
    return bars.in_lanes(np.flatnonzero(np.bincount(bars.lane, minlength=len(bars.lanes))).tolist())


def _order_groups(groups: list[str], times: NDArray[np.float64]) -> list[str]:
    """Each group once, the one that takes longest first, waits last."""
    sums = dict.fromkeys(groups, 0.0)
    for g, seconds_ in zip(groups, times.tolist(), strict=True):
        sums[g] += seconds_
    return [*sorted(sums, key=lambda g: (-sums[g], g)), WAITS]


def lanes_section(title: str, bars: LaneTasks, lead: str = "", whole: float | Sequence[float] | None = None) -> Section:
    """A timeline as a section. `whole`: the seconds that lanes (or each of them) could be busy, by default the span."""
    if whole is None:
        whole = bars.span[1] - bars.span[0]
    text = " ".join(x for x in (lead, _legend_help(bars)) if x)
    tables = (lane_table(bars, whole), longest_table(bars))
    return Section(title, tables, partial(lanes_figure, bars) if len(bars) else None, text, where="page", wide=True)


def _legend_help(bars: LaneTasks) -> str:
    """How to use the chart, and what was merged."""
    out = (
        "Where bars would be thinner than a pixel, a column shows the share of each kind. Drag to zoom, double-click "
        "to reset."
    )
    few = select_lanes(bars)
    if len(few.lanes) < len(bars.lanes):
        out += f" Of {len(bars.lanes)} lanes, the {LANES} busiest and least busy are drawn."
    if len(few) > MARKS:
        drawn = len(merge_short_tasks(few))
        out += f" {len(few):,} tasks are drawn as {drawn:,} bars: short neighbours are merged."
    return out


def lane_table(bars: LaneTasks, whole: float | Sequence[float]) -> DataTable:
    """How busy each lane is; waits for other ranks are not work."""
    waiting = bars.group == (bars.groups.index(WAITS) if WAITS in bars.groups else -1)
    tasks = np.bincount(bars.lane[~waiting], minlength=len(bars.lanes))
    busy = np.bincount(bars.lane[~waiting], bars.seconds[~waiting], len(bars.lanes))
    wait = np.bincount(bars.lane[waiting], bars.seconds[waiting], len(bars.lanes))
    could = np.broadcast_to(np.asarray(whole, dtype=float), len(bars.lanes))
    columns: tuple[str, ...] = ("lane", "tasks", "busy", "share", "waits for ranks", "idle")
    rows: list[tuple[str, ...]] = []
    for i, name in enumerate(bars.lanes):
        b, w, all_ = float(busy[i]), float(wait[i]), float(could[i])
        share = percent(b / all_) if all_ else "-"
        rows.append((name, f"{tasks[i]:,}", seconds(b), share, seconds(w), seconds(max(all_ - b - w, 0.0))))
    if not waiting.any():
        columns, rows = (*columns[:4], columns[5]), [(*r[:4], r[5]) for r in rows]
    return data_table("Lanes", columns, rows, where="page")


def longest_table(bars: LaneTasks, most: int = LONGEST) -> DataTable:
    """What takes longest on a lane, tasks of one name together."""
    key = np.stack([bars.name, bars.lane, bars.group])
    pairs, into, calls = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    into = into.reshape(-1)
    total = np.bincount(into, bars.seconds, len(calls))
    longest = np.zeros(len(calls))
    np.maximum.at(longest, into, bars.seconds)
    rows = []
    for i in np.argsort(-total, kind="stable")[:most].tolist():
        name, lane, group = pairs[:, i].tolist()
        words = (shorten(bars.names[name]), bars.groups[group], bars.lanes[lane])
        rows.append((*words, f"{calls[i]:,}", seconds(float(longest[i])), seconds(float(total[i]))))
    columns = ("task", "kind", "lane", "calls", "longest", "together")
    return data_table("Longest tasks", columns, rows, text=3, where="page")
