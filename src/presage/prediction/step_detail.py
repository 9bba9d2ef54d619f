"""StepDetail: what a report shows of a step beyond its numbers: timeline, memory and roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from presage.engine import Timeline
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.memory.step_memory import MemoryProfile
from presage.prediction.breakdown import RooflinePoint

if TYPE_CHECKING:
    from presage.prediction.step import StepProgram

SIMULATED = 5  # steps: the last but one is like all that follow, and the host is at work on the one after it


@dataclass(frozen=True, eq=False)
class StepWindow:
    """A timeline and the seconds of it that are one step: from the end of the previous step to its own."""

    timeline: Timeline
    window: tuple[float, float]


@dataclass(frozen=True, eq=False)
class StepDetail:
    """One step in detail. With several ranks the timeline is of all of them, the rest of the first rank."""

    graph: Graph
    gpu: Gpu
    shown: StepWindow
    memory: MemoryProfile
    work: tuple[RooflinePoint, ...]

    @property
    def peaks(self) -> dict[str, float]:
        """Peak FLOP/s of the data types of the step's GEMMs."""
        run = {w.peak for w in self.work if w.flops}
        return {" and ".join(d for d, p in self.gpu.peak.items() if p == peak): peak for peak in sorted(run)}


def step_window(built: StepProgram, steps: int = SIMULATED) -> StepWindow:
    """One steady-state step of one rank."""
    timeline = built.timeline(steps)
    ends = timeline.end.reshape(steps, -1).max(axis=1, initial=0.0)
    return StepWindow(timeline, (float(ends[-3]), float(ends[-2])))
