"""What is shown of a predicted step beyond its numbers: its timeline, its memory, how near the limits its ops run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from presage.engine import Timeline
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.memory.step_memory import MemoryProfile, memory_profile
from presage.prediction.breakdown import RooflinePoint, roofline_points
from presage.prediction.machine import kernel_times, machine
from presage.prediction.rank_set import RankSet
from presage.prediction.step import StepProgram, step_program

__all__ = ["StepDetail", "StepWindow", "rank_set_detail", "step_detail", "step_window"]

SIMULATED = 5  # steps: the last but one is like all that follow, and the host is at work on the one after it


@dataclass(frozen=True, eq=False)
class StepWindow:
    """A timeline and the seconds of it that are one step: from the end of the one before to its own."""

    timeline: Timeline
    window: tuple[float, float]


@dataclass(frozen=True, eq=False)
class StepDetail:
    """One rank's step. With many ranks the timeline is of all of them, the rest of the first."""

    graph: Graph
    gpu: Gpu
    shown: StepWindow
    memory: MemoryProfile
    work: tuple[RooflinePoint, ...]

    @property
    def peaks(self) -> dict[str, float]:
        """The peak FLOP/s of the types that the step multiplies in."""
        run = {w.peak for w in self.work if w.flops}
        return {" and ".join(d for d, p in self.gpu.peak.items() if p == peak): peak for peak in sorted(run)}


def step_detail(graph: Graph, gpu: str | Path = "h200") -> StepDetail:
    """Of a step on one GPU."""
    where = machine(gpu)
    times, chip = kernel_times(graph, where), where.kernels.gpu
    built = step_program(graph, times, where.host)
    return StepDetail(
        graph,
        chip,
        step_window(built),
        memory_profile(graph, chip=chip, kinds=True),
        roofline_points(graph, times, chip),
    )


def step_window(built: StepProgram, steps: int = SIMULATED) -> StepWindow:
    """One steady-state step of one rank."""
    timeline = built.timeline(steps)
    ends = timeline.end.reshape(steps, -1).max(axis=1, initial=0.0)
    return StepWindow(timeline, (float(ends[-3]), float(ends[-2])))


def rank_set_detail(team: RankSet) -> StepDetail:
    """Of a step on many ranks."""
    ranks, timeline, chip = team.ranks, team.timeline(), team.platform.gpu
    ends = np.array([timeline.end[ranks.step == k].max() for k in range(ranks.steps)])
    first = team.kinds[0].step
    graph = team.steps[first].graph
    shown = StepWindow(timeline, (float(ends[-3]), float(ends[-2])))
    memory = memory_profile(graph, chip=chip, kinds=True)
    return StepDetail(graph, chip, shown, memory, roofline_points(graph, team.times[first], chip))
