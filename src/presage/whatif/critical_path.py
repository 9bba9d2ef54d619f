"""The critical path of one step at the usual pace: how much of it is the host's, the GPU's, and waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.prediction.step import StepProgram
from presage.prediction.step_program import STREAM

__all__ = ["Path", "path_of"]

Floats = NDArray[np.float64]
STEPS = 7  # the last but one is like all that follow it; the last has no successor to hurry for


@dataclass(frozen=True, eq=False)
class Path:
    """Seconds of the critical path in one step. By op: the host's or the GPU's part (the last place: none's)."""

    step: float
    host: float
    gpu: float
    wait: float  # launch latencies and the like
    busy: float  # in which a step's kernels run, on the path or not
    gaps: float  # between a step's kernels at the least, one by one
    on_host: Floats
    on_gpu: Floats

    @property
    def idle(self) -> float:
        """Seconds a step in which the GPU has nothing to do."""
        return max(0.0, self.step - self.busy)


def path_of(built: StepProgram, busy: float) -> Path:
    """The path through one of a few steps, `busy` being the seconds of a step's kernels."""
    line, tasks = built.timeline(STEPS), built.tasks
    n = len(tasks)
    done = line.end.reshape(STEPS, n).max(axis=1)
    window = float(done[-3]), float(done[-2])
    path = line.critical_path
    until = np.append(line.start[path[1:]], line.end[path[-1:]])
    begun, worked, ended = (np.clip(x, *window) for x in (line.start[path], np.minimum(line.end[path], until), until))
    gpu, op = tasks.lane[path % n] >= STREAM, tasks.op[path % n]
    sizes = len(built.graph.ops) + 1
    on_host, on_gpu = (_sums(op[some] % sizes, (worked - begun)[some], sizes) for some in (~gpu, gpu))
    gaps = float(tasks.seconds[tasks.lane >= STREAM].sum()) - busy
    whole, waited = window[1] - window[0], float((ended - worked).sum())
    return Path(whole, float(on_host.sum()), float(on_gpu.sum()), waited, busy, gaps, on_host, on_gpu)


def _sums(place: NDArray[np.int64], seconds: Floats, sizes: int) -> Floats:
    return np.asarray(np.bincount(place, seconds, sizes), np.float64)
