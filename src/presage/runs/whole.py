"""RunPrediction: how long a whole training run takes, how sure that is, and what it depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.costs.closed_form import ClosedFormKernels
from presage.pool.pool import Pool
from presage.prediction.jobs.job_prediction import JobResult
from presage.runs.drawn import step_times
from presage.runs.failures import Reliability
from presage.runs.outcome import RunOutcome
from presage.runs.run import CheckpointPlan, TrainingRun
from presage.runs.save import checkpoints_of
from presage.runs.sets import DEFAULT, reliability
from presage.runs.simulate import simulate
from presage.runs.steps import StepTimes
from presage.runs.study import CheckpointInterval, RunChange, SparesOutcome, changes, intervals, with_spares

__all__ = ["RunResult", "predict_run"]

Floats = NDArray[np.float64]
STUDIED = 500  # draws of each what-if
SINGLE = 100_000  # draws of single steps
KWH = 3.6e6


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run of a job. What takes longer to work out is worked out when asked for."""

    job: JobResult
    run: TrainingRun
    draws: int = 2000
    seed: int = 0
    deadline: float | None = None  # seconds after the start
    noise: str = "as said"  # where the step times' spread is from

    @cached_property
    def outcome(self) -> RunOutcome:
        """With presage's own error of the step time, and how failure rates differ between sites."""
        return simulate(self.run, self.draws, self.seed)

    @cached_property
    def exact(self) -> RunOutcome:
        """Were the step time and the failure rates as said: the run's own chance alone."""
        if not self.unsure:
            return self.outcome
        return simulate(self.run.exact(), self.draws, self.seed)

    @property
    def unsure(self) -> bool:
        """Whether presage's own error is in the draws."""
        return self.run != self.run.exact()

    @cached_property
    def steps(self) -> Floats:
        """Seconds of single steps, without presage's own error."""
        return self.run.exact().single_steps(np.random.default_rng([self.seed, 1]), SINGLE)

    # ---- what it spends

    @property
    def idle(self) -> float:
        """Watts of all GPUs while the run stands still."""
        p, terms = self.job.job.platform.gpu, self.job.terms
        share = 1.0 if terms.power is None else terms.power / p.power_limit
        return float(ClosedFormKernels.of(p).power.base * share * terms.pue * self.run.gpus)

    @cached_property
    def kwh(self) -> Floats:
        return self.outcome.energy(self.job.watts, self.idle) / KWH

    @cached_property
    def cost(self) -> Floats | None:
        return None if self.job.terms.price is None else self.outcome.cost(self.job.terms.price)

    # ---- what it depends on

    @cached_property
    def intervals(self) -> tuple[CheckpointInterval, ...]:
        return intervals(self.run)

    @cached_property
    def changes(self) -> tuple[RunChange, ...]:
        return changes(self.run, min(self.draws, STUDIED), self.seed)

    @cached_property
    def spares(self) -> tuple[SparesOutcome, ...]:
        return with_spares(self.run, min(self.draws, STUDIED), self.seed)

    def worked_out(self, pool: Pool) -> RunResult:
        """The same, with all that takes long done at once, by a pool."""
        made, few = replace(self), min(self.draws, STUDIED)
        outcome = simulate(self.run, self.draws, self.seed, pool)
        exact = simulate(self.run.exact(), self.draws, self.seed, pool) if self.unsure else outcome
        changed, spared = changes(self.run, few, self.seed, pool), with_spares(self.run, few, self.seed, pool)
        made.__dict__.update(outcome=outcome, exact=exact, changes=changed, spares=spared)
        return made

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        from presage.runs.told import run_to_json

        return run_to_json(self)


def predict_run(
    job: JobResult,
    steps: int,
    kind: Reliability | None = None,
    saves: CheckpointPlan | None = None,
    times: StepTimes | None = None,
    spares: int | None = None,
    draws: int = 2000,
    seed: int = 0,
    deadline: float | None = None,
) -> RunResult:
    """How long so many steps of a job take, all in all. What is not said is usual: failures as in Llama 3's training,
    checkpoints by their size, noise as assumed of such GPUs, the step time as wrong as predictions are."""
    kind, source = kind or reliability(DEFAULT), "as said"
    if times is None:
        times, source = step_times(job, episodes=bool(kind.slow), seed=seed)
    run = TrainingRun(steps, job.job.gpus, times, kind, saves or checkpoints_of(job.job, kind), spares)
    return RunResult(job, run, draws, seed, deadline, source)
