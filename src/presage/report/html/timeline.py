"""A timeline as a section: its lanes over time, how busy each is, and what takes longest on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from presage.engine import Lane, Timeline
from presage.report.html.charts.lanes import LANES, MARKS, Bars, lanes_figure, merged, readable
from presage.report.html.page import Section, Table
from presage.report.text import percent, seconds, shorten

__all__ = ["WAITS", "lane_table", "lanes_section", "longest_table", "timeline_bars"]

WAITS = "waits for other ranks"
SHORTEST = 1e-9  # seconds: what is shorter is not drawn
LONGEST = 12  # rows


def timeline_bars(
    timeline: Timeline,
    window: tuple[float, float] | None = None,
    group_of: Callable[[str, Lane], str] = lambda _name, lane: lane.kind.value,
    named: Callable[[Lane], str] = lambda lane: lane.name,
) -> Bars:
    """The tasks of a timeline, or of a window of it, from its left edge on; a task's group follows from its name and
    lane. Waits in meetings are bars of their own."""
    program, wait = timeline.program, timeline.wait
    pairs, into = np.unique(np.stack([program.name, program.lane]), axis=1, return_inverse=True)
    groups = [group_of(program.names[n], program.lanes[k]) for n, k in pairs.T.tolist()]
    took = np.bincount(into.reshape(-1), timeline.end - timeline.start, len(groups)).astype(np.float64)
    known = _by_time(groups, took)
    group = np.array([known.index(g) for g in groups], np.int64)[into.reshape(-1)]
    waits = np.flatnonzero(wait >= SHORTEST)
    bars = Bars(
        lanes=tuple(named(lane) for lane in program.lanes),
        groups=tuple(known),
        names=(*program.names, WAITS),
        lane=np.concatenate([program.lane, program.lane[waits]]).astype(np.int64),
        start=np.concatenate([timeline.start, timeline.ready[waits]]),
        seconds=np.concatenate([timeline.end - timeline.start, wait[waits]]),
        group=np.concatenate([group, np.full(len(waits), len(known) - 1)]),
        name=np.concatenate([program.name, np.full(len(waits), len(program.names))]).astype(np.int64),
    )
    bars = bars.some(bars.seconds >= SHORTEST)
    bars = bars if window is None else bars.clipped(*window)
    return bars.in_lanes(np.flatnonzero(np.bincount(bars.lane, minlength=len(bars.lanes))).tolist())


def _by_time(groups: list[str], took: NDArray[np.float64]) -> list[str]:
    """Each group once, the one that takes longest first, waits last."""
    sums = dict.fromkeys(groups, 0.0)
    for g, seconds_ in zip(groups, took.tolist(), strict=True):
        sums[g] += seconds_
    return [*sorted(sums, key=lambda g: (-sums[g], g)), WAITS]


def lanes_section(title: str, bars: Bars, lead: str = "", whole: float | None = None) -> Section:
    """`whole`: the seconds that a lane could be busy; from the first start to the last end where nothing is said."""
    whole = whole or bars.span[1] - bars.span[0]
    told = " ".join(x for x in (lead, _how(bars)) if x)
    tables = (lane_table(bars, whole), longest_table(bars))
    return Section(title, tables, lanes_figure(bars) if len(bars) else None, told)


def _how(bars: Bars) -> str:
    """How to read it, and what was put together."""
    out = "Drag over a stretch to zoom in, double-click to see all again, click a name in the legend to hide it."
    few = readable(bars)
    if len(few.lanes) < len(bars.lanes):
        out += f" Of {len(bars.lanes)} lanes the {LANES} busiest and least busy are drawn."
    if len(few) > MARKS:
        drawn = len(merged(few))
        out += f" {len(few):,} tasks are drawn as {drawn:,} bars: neighbours too short to be seen are one."
    return out


def lane_table(bars: Bars, whole: float) -> Table:
    """How busy each lane is; waits for other ranks are not work."""
    waiting = bars.group == (bars.groups.index(WAITS) if WAITS in bars.groups else -1)
    tasks = np.bincount(bars.lane[~waiting], minlength=len(bars.lanes))
    busy = np.bincount(bars.lane[~waiting], bars.seconds[~waiting], len(bars.lanes))
    wait = np.bincount(bars.lane[waiting], bars.seconds[waiting], len(bars.lanes))
    columns: tuple[str, ...] = ("lane", "tasks", "busy", "share", "waits for ranks", "idle")
    rows: list[tuple[str, ...]] = []
    for name, n, b, w in zip(bars.lanes, tasks.tolist(), busy.tolist(), wait.tolist(), strict=True):
        share = percent(b / whole) if whole else "-"
        rows.append((name, f"{n:,}", seconds(b), share, seconds(w), seconds(max(whole - b - w, 0.0))))
    if not waiting.any():
        columns, rows = (*columns[:4], columns[5]), [(*r[:4], r[5]) for r in rows]
    return Table(columns, tuple(rows), "Lanes")


def longest_table(bars: Bars, most: int = LONGEST) -> Table:
    """The tasks that take longest."""
    order = np.argsort(-bars.seconds, kind="stable")[:most].tolist()
    rows = (
        (
            shorten(bars.names[bars.name[i]]), bars.groups[bars.group[i]], bars.lanes[bars.lane[i]],
            seconds(float(bars.start[i])), seconds(float(bars.seconds[i])),
        )
        for i in order
    )  # fmt: skip
    return Table(("task", "kind", "lane", "at", "takes"), tuple(rows), "Longest tasks", frozenset({0, 1, 2}))
