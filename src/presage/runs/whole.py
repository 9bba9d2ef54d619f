"""RunResult: wall-clock time of a whole training run with failures, and what it depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.costs.closed_form import ClosedFormKernels
from presage.engine import Timeline
from presage.memory import JobMemory
from presage.pool.pool import Pool
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.result import Floats, Quantiles, Result, ResultKind
from presage.runs.failures import DAY, Reliability
from presage.runs.outcome import CAUSES, RunOutcome, quantiles
from presage.runs.policies import PolicyOutcome, PolicyRun, draw_policies, policies_json
from presage.runs.run import CheckpointPlan, TrainingRun, checkpoints_of
from presage.runs.sets import DEFAULT, reliability
from presage.runs.simulate import simulate
from presage.runs.steps import StepTimes, step_times
from presage.runs.study import CheckpointInterval, RunChange, SparesOutcome, changes, intervals, with_spares

STUDIED = 500  # draws of each what-if
COMPARED = 1000  # draws of each policy
SINGLE = 100_000  # draws of single steps
KWH = 3.6e6


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(Result):
    """A training run of a job."""

    job: JobResult
    run: TrainingRun
    draw_count: int = 2000
    seed: int = 0
    deadline: float | None = None  # seconds after the start
    noise: str = "as said"  # where the step times' spread is from
    policies: tuple[PolicyRun, ...] = ()  # that are compared

    # ---- what every result has

    @property
    def kind(self) -> ResultKind:
        return "run"

    @property
    def title(self) -> str:
        return self.job.title

    @property
    def hardware(self) -> str:
        return self.job.hardware

    @cached_property
    def step(self) -> Quantiles:
        """That of the job; with a measured step time, or without model error, of single drawn steps."""
        return self.job.step if self.run.times.model_sd else Quantiles.of(self.steps)

    @property
    def jitter(self) -> float:
        return self.job.jitter

    @property
    def draws(self) -> Floats:
        return self.steps

    @property
    def memory(self) -> JobMemory:
        return self.job.memory

    @property
    def memory_bytes(self) -> float:
        return self.job.memory_bytes

    @property
    def gpu_memory(self) -> float:
        return self.job.gpu_memory

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean wall-clock seconds by cause."""
        return {cause: float(self.outcome.parts[cause].mean()) for cause in CAUSES}

    @property
    def notes(self) -> tuple[str, ...]:
        return self.job.notes

    @property
    def timeline(self) -> Timeline:
        """One step of the job."""
        return self.job.timeline

    # ---- drawn runs

    @cached_property
    def outcome(self) -> RunOutcome:
        """The drawn runs, with the model error of the step time and the spread of failure rates between sites."""
        return simulate(self.run, self.draw_count, self.seed)

    @cached_property
    def exact(self) -> RunOutcome:
        """The drawn runs if step time and failure rates were known exactly."""
        if not self.has_model_error:
            return self.outcome
        return simulate(self.run.exact(), self.draw_count, self.seed)

    @property
    def has_model_error(self) -> bool:
        """Whether the draws include model error."""
        return self.run != self.run.exact()

    @cached_property
    def steps(self) -> Floats:
        """Seconds of single steps, without model error."""
        return self.run.exact().single_steps(np.random.default_rng([self.seed, 1]), SINGLE)

    # ---- energy and cost

    @property
    def idle(self) -> float:
        """Power of all GPUs while the run is stopped, W."""
        p, terms = self.job.job.platform.gpu, self.job.terms
        share = 1.0 if terms.power is None else terms.power / p.power_limit
        return float(ClosedFormKernels.of(p).power.base * share * terms.pue * self.run.gpus)

    @cached_property
    def kwh(self) -> Floats:
        return self.outcome.energy(self.job.watts, self.idle) / KWH

    @cached_property
    def cost(self) -> Floats | None:
        return None if self.job.terms.price is None else self.outcome.cost(self.job.terms.price)

    # ---- sensitivity

    @cached_property
    def intervals(self) -> tuple[CheckpointInterval, ...]:
        return intervals(self.run)

    @cached_property
    def changes(self) -> tuple[RunChange, ...]:
        return changes(self.run, min(self.draw_count, STUDIED), self.seed)

    @cached_property
    def spares(self) -> tuple[SparesOutcome, ...]:
        return with_spares(self.run, min(self.draw_count, STUDIED), self.seed)

    @cached_property
    def policy_outcomes(self) -> tuple[PolicyOutcome, ...]:
        return draw_policies(self.policies, min(self.draw_count, COMPARED), self.seed)

    def computed(self, pool: Pool) -> RunResult:
        """This result with all draws done, on a pool."""
        result, few = replace(self), min(self.draw_count, STUDIED)
        outcome = simulate(self.run, self.draw_count, self.seed, pool)
        exact = simulate(self.run.exact(), self.draw_count, self.seed, pool) if self.has_model_error else outcome
        changed, spared = changes(self.run, few, self.seed, pool), with_spares(self.run, few, self.seed, pool)
        compared = draw_policies(self.policies, min(self.draw_count, COMPARED), self.seed, pool)
        result.__dict__.update(outcome=outcome, exact=exact, changes=changed, spares=spared, policy_outcomes=compared)
        return result

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
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
    """Predict the wall-clock time of a run of `steps` steps.

    Defaults: the failure rates of Llama 3's training, checkpoints by their size, the noise preset of the GPU, and the
    measured error of step-time predictions.
    """
    kind, source = kind or reliability(DEFAULT), "as said"
    if times is None:
        times, source = step_times(job, episodes=bool(kind.slow), seed=seed)
    run = TrainingRun(steps, job.job.gpus, times, kind, saves or checkpoints_of(job.job, kind), spares)
    return RunResult(job, run, draws, seed, deadline, source)


# ---- JSON

HOUR, MS = 3600.0, 1e3
QUANTILES = (0.05, 0.5, 0.8, 0.9, 0.95, 0.99)


def run_to_json(p: RunResult) -> dict[str, Any]:
    """Plain values with the units in their keys."""
    run = p.run
    return {
        "kind": "run",
        "name": p.job.job.name,
        "gpus": run.gpus,
        "steps": run.steps,
        "tokens": run.steps * p.job.job.tokens,
        "draws": p.draw_count,
        "seed": p.seed,
        "noise": p.noise,
        "step_ms": {name: value * MS for name, value in asdict(p.step).items()}
        | {"predicted": run.times.seconds * MS, "steps": spread(p.steps * MS), "run_mean": spread(p.exact.step * MS)},
        **p.verdict_json(),
        "days": _days(p.outcome),
        "days_without_model_error": _days(p.exact),
        "ettr": spread(p.outcome.ettr),
        "goodput": spread(p.outcome.goodput),
        "failures": spread(p.outcome.failures),
        "failures_without_model_error": spread(p.exact.failures),
        "planned_stops": spread(p.outcome.planned),
        "deadline": _deadline(p),
        "hours_by_cause": {c: spread(p.outcome.parts[c] / HOUR) for c in CAUSES},
        "classes": _classes(p),
        "reliability": _reliability(p),
        "checkpoints": _checkpoints(p),
        "spares": [
            {"spares": s.spares, "p50_days": s.middle / DAY, "p95_days": s.late / DAY, "waiting_days": s.waits / DAY}
            for s in p.spares
        ],
        "changes": [
            {"change": c.name, "p50_days": c.middle / DAY, "p95_days": c.late / DAY, "ettr": c.ettr} for c in p.changes
        ],
        "policies": policies_json(p.policy_outcomes, p.job.terms.price),
        "energy": {"kwh": spread(p.kwh), "power_w": p.job.watts, "idle_power_w": p.idle},
        "cost": None if p.cost is None else spread(p.cost) | {"price_per_gpu_hour": p.job.terms.price},
        "notes": list(p.job.notes),
    }


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean and quantiles."""
    found = quantiles(values, QUANTILES)
    return {"mean": float(values.mean())} | {f"p{100 * q:.0f}": float(x) for q, x in zip(QUANTILES, found, strict=True)}


def _days(o: RunOutcome) -> dict[str, float]:
    errors = {f"p{100 * q:.0f}_standard_error": o.quantile_error(q) / DAY for q in (0.5, 0.95, 0.99)}
    return spread(o.wall / DAY) | errors


def _deadline(p: RunResult) -> dict[str, float] | None:
    if p.deadline is None:
        return None
    return {
        "days": p.deadline / DAY,
        "probability": p.outcome.done_by(p.deadline),
        "probability_without_model_error": p.exact.done_by(p.deadline),
    }


def _classes(p: RunResult) -> list[dict[str, Any]]:
    detect = [f.detect for f in p.run.reliability.failures]
    return [
        {
            "class": s.name,
            "planned": s.planned,
            "per_1000_node_days": 1e3 * s.per_node_day,
            "count": s.count,
            "count_p5": s.low,
            "count_p95": s.high,
            "hours": s.seconds / HOUR,
            "detect_s": seconds,
        }
        for s, seconds in zip(p.exact.stops(), detect, strict=True)
    ]


def _reliability(p: RunResult) -> dict[str, Any]:
    r, risk = p.run.reliability, p.run.risk
    return {
        "name": r.name,
        "nodes": risk.nodes,
        "mttf_hours": risk.mttf / HOUR if risk.unplanned else None,
        "detect_s": risk.detect,
        "restart_s": risk.restart,
        "repair_hours": r.repair.mean / HOUR,
        "repair_shape": r.repair.shape,
        "frailty": r.frailty,
        "relapse": r.relapse,
        "spares": p.run.spares,
        "growth": r.growth.at(p.run.gpus),
        "rate_sd": r.rate_sd,
        "model_sd": p.run.times.model_sd,
        "sources": dict(r.sources),
    }


def _checkpoints(p: RunResult) -> dict[str, Any]:
    k = p.run.checkpoints
    return {
        "save_s": k.save,
        "background_s": k.delay,
        "from": k.source,
        "steps": p.run.every,
        "minutes": p.run.every * p.run.step / 60,
        "ettr": p.run.efficiency,
        "choices": [
            {"name": i.name, "minutes": i.seconds / 60, "steps": i.steps, "ettr": i.exact, "ettr_meta": i.meta}
            for i in p.intervals
        ],
    }
