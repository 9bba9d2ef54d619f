"""Pipeline schedules: which stage runs what when, how long a step takes, what it holds."""

from presage.parallel.pipeline.drawing import program, timeline
from presage.parallel.pipeline.durations import Durations, durations
from presage.parallel.pipeline.schedule import Order, Schedule
from presage.parallel.pipeline.step import Run, run

__all__ = ["Durations", "Order", "Run", "Schedule", "durations", "program", "run", "timeline"]
