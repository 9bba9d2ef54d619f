"""Result: what every prediction offers, whether of a step, of several ranks, of a job or of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from presage.displayed import Displayed, share_rows

if TYPE_CHECKING:
    from presage.engine import Program, Timeline
    from presage.memory import JobMemory
    from presage.memory.step_memory import MemoryProfile
import math
from functools import cache
from pathlib import Path

from presage.hardware.facts import load_toml

Floats = NDArray[np.float64]
ResultKind: TypeAlias = Literal["step", "ranks", "job", "run"]


@dataclass(frozen=True)
class Quantiles:
    """Mean, median (p50) and 90% interval (p5 to p95) of a predicted step time, in seconds."""

    mean: float
    p5: float
    p50: float
    p95: float

    @staticmethod
    def of(seconds: Floats) -> Quantiles:
        """Quantiles of drawn step times."""
        return Quantiles(float(seconds.mean()), *map(float, np.quantile(seconds, [0.05, 0.5, 0.95])))

    @staticmethod
    def constant(seconds: float) -> Quantiles:
        """A step time without a spread."""
        return Quantiles(seconds, seconds, seconds, seconds)


@dataclass(frozen=True, eq=False, repr=False)
class Result(Displayed):
    """Base of StepResult, JobResult and RunResult. Times in seconds, memory in bytes.

    Subclasses store or compute the attributes declared here; whatever is costly is computed on first use, once.
    """

    if TYPE_CHECKING:  # at run time a base's property would be in the way of a subclass's field

        @property
        def kind(self) -> ResultKind: ...

        @property
        def title(self) -> str:
            """Source of the step, or name of the job."""

        @property
        def hardware(self) -> str:
            """Name of the GPU or of the platform."""

        @property
        def step(self) -> Quantiles:
            """Step time: the median of steps with the 90% interval of that prediction, presage's own error included."""

        @property
        def jitter(self) -> float:
            """How much steps of a run differ from one another: p95 over p50, less one."""

        @property
        def memory_bytes(self) -> float:
            """Peak memory of the fullest GPU."""

        @property
        def gpu_memory(self) -> float:
            """Memory capacity of one GPU."""

        @property
        def breakdown(self) -> dict[str, float]:
            """Seconds by part: of the step's kernels, of the job's step, or of the run's wall-clock time."""

        @property
        def notes(self) -> tuple[str, ...]: ...

        @property
        def draws(self) -> Floats:
            """Step time of every draw; empty without draws."""

        @property
        def memory(self) -> MemoryProfile | JobMemory:
            """What memory is used for."""

        @property
        def timeline(self) -> Timeline:
            """Start and end of every task of the simulated steps."""

        def to_json(self) -> dict[str, Any]:
            """Plain values with the units in their keys."""

    @property
    def program(self) -> Program:
        """Tasks, lanes and dependencies that `timeline` is the simulation of."""
        return self.timeline.program

    @property
    def memory_left_bytes(self) -> float:
        """Free memory of the fullest GPU; negative: what is missing."""
        return self.gpu_memory - self.memory_bytes

    @property
    def memory_known(self) -> bool:
        """Whether it can be told what memory is used: not from a profiler's trace."""
        return True

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has enough memory, as far as it is known."""
        return not self.memory_known or self.memory_left_bytes >= 0

    def verdict_json(self) -> dict[str, Any]:
        """Keys that the JSON of every step and job has: does it fit, and how much do its steps differ?"""
        return {
            "fits": self.fits if self.memory_known else None,
            "memory_left_bytes": self.memory_left_bytes if self.memory_known else None,
            "step_p95_over_p50": 1 + self.jitter,
        }

    def frame_rows(self) -> list[dict[str, Any]]:
        """Parts of the breakdown with their shares."""
        return share_rows(self.breakdown)


# ---- ModelError: how far presage's own step times are off, by kind of prediction, from its accuracy tables.

MODEL_ERRORS = Path(__file__).resolve().parent.parent / "data" / "model_error.toml"
NORMAL_90 = 2 * 1.6448536  # width of a normal distribution's 90% interval, in standard deviations


@dataclass(frozen=True)
class ModelError:
    """Measured over predicted step time: 5th and 95th percentile over published runs that nothing was fitted to."""

    what: str
    low: float
    high: float
    runs: int
    sources: int
    coverage: float | None = None  # of sources that were left out

    @property
    def sd(self) -> float:
        """Standard deviation of log(measured / predicted), from the width of the interval."""
        return math.log(self.high / self.low) / NORMAL_90

    @property
    def note(self) -> str:
        """Where the interval is from, in a line."""
        where = f"{self.sources} source{'' if self.sources == 1 else 's'}"
        return f"90% interval: presage's error on {self.runs:,} published runs of {self.what}, from {where}"

    def interval(self, median: float, spread: float = 1.0) -> tuple[float, float]:
        """90% interval around a predicted median; `spread` is p95 over p50 of what varies besides, run to run."""
        low, high = min(self.low, 1.0), max(self.high, 1.0)
        own = math.log(spread)
        return median * math.exp(-math.hypot(math.log(low), own)), median * math.exp(math.hypot(math.log(high), own))


@cache
def model_error(kind: str) -> ModelError:
    """The error of a kind of prediction: dense, moe, recommendation, recommendation_pcie (jobs) or ranks (captured
    steps on several)."""
    return ModelError(**load_toml(MODEL_ERRORS)[kind])
