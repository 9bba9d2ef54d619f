"""Step times of many draws: the host's pace, the GPU's spread and what the kernel models do not know.

A draw is a run on a machine of this kind: its step time is the mean over steps, once the first have passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_model import Pace
from presage.engine import Durations, Program
from presage.engine.timeline import latest_ends
from presage.noise.sampling import pace_factors, step_paces
from presage.prediction.step_program import AUTOGRAD, MAIN, STREAM, StepTasks

__all__ = ["NO_SPREAD", "StepSpread", "draw_durations", "step_seconds"]

Floats = NDArray[np.float64]

WARM_UP = 2  # steps in which the host gets ahead of the GPU
GPU_SD = 0.0025  # GPU time from run to run, measured: 0.2 to 0.3%


@dataclass(frozen=True)
class StepSpread:
    """Standard deviations of the logarithm: of host threads, and of all GPU time by one factor."""

    host: Pace
    gpu: float = GPU_SD
    kernels: float = 0.04  # the kernel models' own error, common to a step's kernels

    @property
    def of_gpu(self) -> float:
        return float(np.hypot(self.gpu, self.kernels))


NO_SPREAD = StepSpread(Pace(0.0, 0.0, 0.0), 0.0, 0.0)


def draw_durations(tasks: StepTasks, steps: int, draws: int, spread: StepSpread, rng: np.random.Generator) -> Durations:
    """Seconds of every task in every draw; a single draw without any spread is the usual pace itself."""
    if spread.of_gpu == 0 and spread.host.run_sd == 0 and spread.host.step_sd == 0:
        return Durations.of(np.tile(tasks.seconds, steps))
    p = spread.host
    lanes = np.empty((3, steps, draws))
    for lane in (MAIN, AUTOGRAD):
        lanes[lane] = step_paces(rng, p.run_sd, p.step_sd, p.step_correlation, steps, draws)
    lanes[STREAM] = pace_factors(rng, spread.of_gpu, draws)
    table = lanes[np.minimum(tasks.lane, STREAM)].swapaxes(0, 1) * tasks.seconds[None, :, None]
    return Durations.of(table.reshape(steps * len(tasks), draws))


def step_seconds(program: Program, took: Durations, step: NDArray[np.int32], steps: int) -> Floats:
    """Seconds a step, by draw: the mean over the steps after the first few. `step` is the one each task is of."""
    done = latest_ends(program, took, step, steps)
    skipped = min(WARM_UP, steps - 1)
    start = done[skipped - 1] if skipped else np.zeros(took.count)
    return np.asarray((done[-1] - start) / (steps - skipped))
