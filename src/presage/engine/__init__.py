"""Tasks on lanes, and when they run. Knows no op names, no GPUs and no files."""

from presage.engine.durations import Durations
from presage.engine.program import Builder, Deadlock, Edges, Lane, LaneKind, Program
from presage.engine.steady import period, repeat
from presage.engine.timeline import LaneUse, Timeline, finish_times, latest_ends, simulate

__all__ = [
    "Builder",
    "Deadlock",
    "Durations",
    "Edges",
    "Lane",
    "LaneKind",
    "LaneUse",
    "Program",
    "Timeline",
    "finish_times",
    "latest_ends",
    "period",
    "repeat",
    "simulate",
]
