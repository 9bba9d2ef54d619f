"""Tasks on lanes, and when they run. Knows no op names, no GPUs and no files."""

from presage.engine.durations import Durations
from presage.engine.order import Deadlock
from presage.engine.program import Builder, Edges, Lane, LaneKind, Program
from presage.engine.rounds import PipelineTimes, RoundProgram, simulate_pipeline
from presage.engine.timeline import LaneUse, Timeline, finish_times, latest_ends, period, repeat, simulate
from presage.engine.transfers import exposed_after, exposed_before

__all__ = [
    "Builder",
    "Deadlock",
    "Durations",
    "Edges",
    "Lane",
    "LaneKind",
    "LaneUse",
    "PipelineTimes",
    "Program",
    "RoundProgram",
    "Timeline",
    "exposed_after",
    "exposed_before",
    "finish_times",
    "latest_ends",
    "period",
    "repeat",
    "simulate",
    "simulate_pipeline",
]
