"""A timeline as a section: its lanes over time, how busy each is, and what takes longest on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from presage.engine import Lane, Timeline
from presage.report.html.charts.lanes import LANES, MARKS, Bars, lanes_figure, merged, readable
from presage.report.html.page import Section, Table
from presage.text import percent, seconds, shorten

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


def lanes_section(title: str, bars: Bars, lead: str = "", whole: float | Sequence[float] | None = None) -> Section:
    """`whole`: the seconds that lanes (or each of them) could be busy; from the first start to the last end where
    nothing is said."""
    if whole is None:
        whole = bars.span[1] - bars.span[0]
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


def lane_table(bars: Bars, whole: float | Sequence[float]) -> Table:
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
    return Table(columns, tuple(rows), "Lanes")


def longest_table(bars: Bars, most: int = LONGEST) -> Table:
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
    return Table(columns, tuple(rows), "What takes longest", frozenset({0, 1, 2}))
