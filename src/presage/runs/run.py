"""TrainingRun: the steps of a job with its checkpoints, failure rates and spare nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.errors import PresageError
from presage.memory.optimizer_state import optimizer_state
from presage.runs.checkpoint import Outage, best_interval, exact_efficiency
from presage.runs.failures import Reliability, Risk
from presage.runs.policy import Policy
from presage.runs.steps import StepTimes


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """How checkpoints are written."""

    save: float  # seconds that each stops the job
    delay: float = 0.0  # seconds after that until it can be relied on: what is written in the background
    every: int | None = None  # steps; None: what the exact formula says is best
    source: str = ""  # of `save`

    def __post_init__(self) -> None:
        if self.save < 0 or self.delay < 0 or (self.every is not None and self.every < 1):
            raise PresageError("checkpoints take 0 seconds or more, and one comes after every 1 step or more")


@dataclass(frozen=True)
class TrainingRun:
    """A training run."""

    steps: int
    gpus: int
    times: StepTimes
    reliability: Reliability
    checkpoints: CheckpointPlan
    spares: int | None = None  # nodes; None: always one ready
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.gpus < 1 or (self.spares is not None and self.spares < 0):
            raise PresageError("a run needs a step, a GPU, and 0 spares or more")

    @property
    def risk(self) -> Risk:
        return self.reliability.at(self.gpus)

    @property
    def outage(self) -> Outage:
        return self.risk.outage(self.checkpoints.save, self.checkpoints.delay)

    @property
    def step(self) -> float:
        """Seconds of a step on average, with what stalls and slow episodes add."""
        stalls = self.times.stalls
        share = stalls.per_step(self.risk.nodes, 1.0) * stalls.seconds.mean if stalls.per_node_hour else 0.0
        slow = sum(self.risk.episodes(e) * e.lost.mean for e in self.reliability.slow)
        return self.times.seconds * (1 + share + slow)

    def single_steps(self, rng: np.random.Generator, draws: int) -> NDArray[np.float64]:
        """Seconds of single steps, each of a run of its own; some are in a slow episode."""
        steps = self.times.drawn(rng, draws, self.risk.nodes)
        for e in self.reliability.slow:
            time = self.risk.episodes(e) * e.minutes.mean * 60  # share of it that is slow
            share = time / e.factor / (1 - time + time / e.factor)
            steps = np.where(rng.random(draws) < share, steps * e.factor, steps)
        return steps

    @property
    def every(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoints.every or self.whole_steps(best_interval(self.outage))

    def whole_steps(self, interval: float) -> int:
        """Steps of an interval in seconds: one at least, and as long as writing in the background takes."""
        if interval == inf:
            return self.steps
        least = ceil(self.checkpoints.delay / self.step)
        return min(self.steps, max(1, least, round(interval / self.step)))

    @property
    def efficiency(self) -> float:
        """Share of time that is useful work, by the exact formula."""
        return exact_efficiency(self.outage, self.every * self.step)

    def exact(self) -> TrainingRun:
        """The run with step time and failure rates known exactly."""
        times, kind = replace(self.times, model_sd=0.0), replace(self.reliability, rate_sd=0.0)
        return replace(self, times=times, reliability=kind)

    def changed(self, seconds: float = 1.0, save: float = 1.0) -> TrainingRun:
        """The run with step and checkpoint times multiplied by these factors."""
        times = replace(self.times, seconds=self.times.seconds * seconds)
        checkpoints = replace(self.checkpoints, save=self.checkpoints.save * save)
        return replace(self, times=times, checkpoints=checkpoints)


# ---- durations and checkpoint intervals as people write them: 60d, 30min, 500 steps

UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0, "d": 86400.0,
         "days": 86400.0, "w": 604800.0, "weeks": 604800.0}  # fmt: skip
INTERVALS = "auto, a number of steps, or a time such as 30min"


def parse_duration(text: str, write: str) -> float:
    """Seconds of 60d, 900h or 30min; `write` says what to write instead of what is none."""
    match = re.fullmatch(r"([\d.]+) ?([a-z]+)", text.strip().lower())
    try:
        value = float(match[1]) * UNITS[match[2]] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < inf:
        raise PresageError(f"{text}: write {write}")
    return value


def parse_interval(text: str) -> int | float | None:
    """Whole steps, seconds (a float), or None for the best interval."""
    if text.strip() == "auto":
        return None
    whole = re.fullmatch(r"(\d{1,12})(?: ?steps?)?", text.strip())
    if whole and int(whole[1]) < 1:
        raise PresageError(f"{text}: should be at least 1 step")
    return int(whole[1]) if whole else parse_duration(text, INTERVALS)


def with_interval(run: TrainingRun, text: str) -> TrainingRun:
    """The run with checkpoints at the interval that a text says."""
    found = parse_interval(text)
    every = run.whole_steps(found) if isinstance(found, float) else None if found is None else min(found, run.steps)
    return replace(run, checkpoints=replace(run.checkpoints, every=every))


# ---- What a checkpoint of a job takes, from its size and the storage.

GB, TB = 1e9, 1e12
STORAGE = 2000 * GB / 3000  # bytes/s a node of 8 GPUs: 2 TB/s, sustained, for the 24,000 GPUs of Llama 3's cluster
SETUP = 5.0  # seconds to stop, plan and agree: assumed


def checkpoint_bytes(job: Job) -> float:
    """Weights and the optimizer's state, each once."""
    whole = optimizer_state(replace(job, parallel=replace(job.parallel, zero=0)))
    return job.model.parameters * (whole.weight + whole.optimizer)


def checkpoints_of(
    job: Job,
    reliability: Reliability,
    seconds: float | None = None,
    background: float = 0.0,
    storage: float | None = None,
    every: int | None = None,
) -> CheckpointPlan:
    """The given seconds, or 5 s + bytes / storage; `background` is the share of writing that overlaps training."""
    if not 0 <= background <= 1:
        raise PresageError(f"{background:g} of the writing in the background: it should be 0 to 1")
    if seconds is not None:
        return CheckpointPlan(seconds, 0.0, every, "as said")
    nodes = job.gpus / reliability.node_gpus
    rate, nbytes = storage or STORAGE * nodes, checkpoint_bytes(job)
    writing = nbytes / rate
    source = f"{SETUP:g} s + {nbytes / TB:.3g} TB at {rate / GB:,.4g} GB/s"
    source += f", {background:.0%} of the writing in the background" if background else ""
    return CheckpointPlan(SETUP + (1 - background) * writing, background * writing, every, source)
