"""Bars of a timeline chart from a row for each task."""

from __future__ import annotations

import numpy as np

from presage.report.html.charts.lanes import LaneTasks


def lane_tasks(*rows: tuple[str, float, float, str] | tuple[str, float, float, str, str]) -> LaneTasks:
    """Rows of lane, start, seconds, group and, where it has one, name."""
    columns = [[row[i] if i < len(row) else "" for row in rows] for i in range(5)]
    words = [list(dict.fromkeys(columns[i])) for i in (0, 3, 4)]
    places = zip(words, (0, 3, 4), strict=True)
    lane, group, name = (np.array([w.index(x) for x in columns[i]], np.int64) for w, i in places)
    start, seconds = (np.array(columns[i], np.float64) for i in (1, 2))
    return LaneTasks(*map(tuple, words), lane, start, seconds, group, name)
