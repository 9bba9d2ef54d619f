"""What a search found: the best layouts with their steps, the front of time and memory, what each knob is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from presage.configs.check import problems
from presage.configs.job import Job
from presage.memory import job_memory
from presage.noise.sampling import Estimate
from presage.parallel.schedules import ONE_CHUNK, SEVERAL_CHUNKS
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_prediction import COMPUTE, JobResult
from presage.prediction.jobs.job_step import job_step
from presage.search.plans import KNOBS, RECOMPUTES, JobPlan, apply_plan, job_plan, knob, plan_words

MS = 1e3


def predict_plan(job: Job, efficiency: Efficiency | None = None) -> JobResult:
    """A job as it is, with all that is known of its step."""
    return JobResult(job, job_step(job, efficiency), job_memory(job), drawn=False)


class SearchProgress(NamedTuple):
    """How far a search has come."""

    what: str  # surveying, pricing, drawing
    done: int
    total: int
    plans: int  # surveyed or priced so far
    best: float  # of what is known


class StopSearch(Exception):
    """Raised by what is told of the progress: the search ends, with the best plans so far."""


OnProgress = Callable[[SearchProgress], None]


@dataclass(frozen=True)
class PricedPlan:
    """A layout with its time and memory alone."""

    layout: JobPlan
    seconds: float
    needed: float

    def to_json(self) -> dict[str, Any]:
        plan = {"plan": plan_words(self.layout), **self.layout.to_json()}
        return plan | {"step_ms": self.seconds * MS, "memory_bytes": self.needed}


@dataclass(frozen=True)
class SearchCounts:
    """How many layouts there were."""

    legal: int
    too_large: int  # that need more memory than a GPU has
    set_aside: int  # that were proven to be no better, without a price
    priced: int
    smallest: float  # bytes that the most frugal legal one needs

    @property
    def fit(self) -> int:
        return self.legal - self.too_large


@dataclass(frozen=True)
class SearchResult:
    """Best first. `own` is the job's own plan, where it can be run on these GPUs."""

    objective: str
    best: tuple[JobResult, ...]
    front: tuple[PricedPlan, ...]
    by_knob: dict[str, dict[str, PricedPlan]]
    own: JobResult | None
    counts: SearchCounts
    complete: bool  # whether all that had to be priced was
    took: float  # seconds
    efficiency: Efficiency | None
    cloud: tuple[PricedPlan, ...] = ()  # all that were priced, best first
    late: tuple[Estimate, ...] = ()  # of the best, and then of `own`: p95 step times
    noise: str = ""  # where that noise is from

    @cached_property
    def chosen(self) -> JobResult:
        """The best plan as `presage job` predicts it: with drawn steps and an interval."""
        return replace(self.best[0], drawn=True)

    @cached_property
    def too_large(self) -> tuple[PricedPlan, ...]:
        """Plans a step away from the best that would be faster if they fitted, the fastest first."""
        best, out = self.best[0], []
        for other in _near(best.job):
            made = predict_plan(other, self.efficiency)
            if not made.memory.fits and made.seconds < best.seconds:
                out.append(PricedPlan(job_plan(other), made.seconds, made.memory.needed))
        return tuple(sorted(out, key=lambda m: m.seconds))

    def to_json(self, job: Job) -> dict[str, Any]:
        """Plain values with the units in their keys; `job` is the one that was planned."""
        c = self.counts
        late = self.late or (None,) * (len(self.best) + 1)
        plans = [_result_json(p, e) for p, e in zip((*self.best, self.own), late, strict=False) if p is not None]
        return {
            "kind": "plan",
            "name": job.name,
            "platform": job.platform.key,
            "objective": self.objective,
            "complete": self.complete,
            "counts": {
                "legal": c.legal, "too_large": c.too_large, "set_aside": c.set_aside, "priced": c.priced,
                "smallest_bytes": c.smallest,
            },
            "best": plans[: len(self.best)],
            "own": plans[-1] if self.own else None,
            "front": [p.to_json() for p in self.front],
            "by_knob": {name: {word: p.to_json() for word, p in rows.items()} for name, rows in self.by_knob.items()},
        }  # fmt: skip


def _result_json(p: JobResult, late: Estimate | None) -> dict[str, Any]:
    plan = job_plan(p.job)
    return {
        "plan": plan_words(plan),
        **plan.to_json(),
        "step_ms": p.seconds * MS,
        "mfu": p.mfu,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "memory_bytes": p.memory.needed,
        "fits": p.memory.fits,
        "breakdown_ms": {name: seconds * MS for name, seconds in p.breakdown.items()},
        **({} if late is None else {"p95_step_ms": late.value * MS, "p95_standard_error_ms": late.error * MS}),
    }


# ---- Why the best layout is the best, in sentences: what it does better than others, and what holds it back.

LEAST = 0.002  # of a step: smaller differences are left unsaid
SECOND = 3  # plans whose neighbours are tried as well
WORTH = 0.005  # of a step: smaller gains are not worth another plan


@dataclass(frozen=True)
class PlanDifference:
    """Between two plans: knobs as (name, here, there), and seconds by part that the other one takes more."""

    knobs: tuple[tuple[str, str, str], ...]
    parts: tuple[tuple[str, float], ...]
    seconds: float


def compare_plans(best: JobResult, other: JobResult) -> PlanDifference:
    """What the other plan does otherwise, and what it costs it; the largest first."""
    a, b = job_plan(best.job), job_plan(other.job)
    pairs = ((name, knob(a, name), knob(b, name)) for name in KNOBS if name != "zero")
    ours, theirs = best.breakdown, other.breakdown
    names = [*ours, *(n for n in theirs if n not in ours)]
    parts = [(n, theirs.get(n, 0.0) - ours.get(n, 0.0)) for n in names]
    told = sorted((p for p in parts if abs(p[1]) > LEAST * best.seconds), key=lambda p: -abs(p[1]))
    return PlanDifference(tuple(p for p in pairs if p[1] != p[2]), tuple(told), other.seconds - best.seconds)


def _near(job: Job) -> Iterator[Job]:
    """Plans that differ in a knob, or in two that go together; legal ones."""
    x = job_plan(job)
    others = [x._replace(recompute=r) for r in RECOMPUTES.values()]
    p, change = x.parallel, x.with_parallel
    others += [x._replace(micro_batch=2 * x.micro_batch), change(virtual=2 * p.virtual, schedule=SEVERAL_CHUNKS)]
    others += [change(zero=z, fsdp=False, shard=0) for z in range(p.zero)]
    others += [change(tp=p.tp // 2, sequence_parallel=p.sequence_parallel and p.tp > 2)] if p.tp > 1 else []
    others += [change(pp=p.pp // 2, schedule=ONE_CHUNK if p.pp == 2 else p.schedule)] if p.pp > 1 else []
    others += [change(cp=p.cp // 2)] if p.cp > 1 else []
    for other in others:
        made = apply_plan(job, other)
        if other != x and not problems(made):
            yield made


def better_neighbours(own: JobResult, most: int = 3) -> tuple[JobResult, ...]:
    """Plans that differ from a job's in a knob, fit in memory and are faster, the fastest first; where these are few,
    also plans that differ in two. Where the job does not fit, the fastest that do."""
    known = {job_plan(own.job): own}
    for start in (own.job, None):
        jobs = [start] if start else [p.job for p in sorted(known.values(), key=lambda p: p.seconds)[:SECOND]]
        near = {job_plan(j): j for job in jobs for j in (*_near(job), *_opposite(job))}
        known |= {plan: predict_plan(j) for plan, j in near.items() if plan not in known}
        others = [p for p in known.values() if p is not own and p.memory.fits]
        fit = [p for p in others if p.seconds < (1 - WORTH) * own.seconds or not own.memory.fits]
        if len(fit) >= most:
            break
    return tuple(sorted(fit, key=lambda p: p.seconds)[:most])


def _opposite(job: Job) -> Iterator[Job]:
    """Plans with the knobs of `_near` turned the other way, and with more sharding; legal ones."""
    x = job_plan(job)
    p, change = x.parallel, x.with_parallel
    others = [change(tp=2 * p.tp, sequence_parallel=True), change(pp=2 * p.pp), change(cp=2 * p.cp)]
    others += [change(zero=z, fsdp=False, shard=0) for z in range(p.zero + 1, 2)]
    others += [change(virtual=p.virtual // 2, schedule=ONE_CHUNK if p.virtual == 2 else p.schedule)]
    others += [x._replace(micro_batch=x.micro_batch // 2)]
    for other in others:
        if other.micro_batch and other.parallel.virtual and not problems(made := apply_plan(job, other)):
            yield made


def overheads(best: JobResult) -> list[tuple[str, float]]:
    """Seconds that are no compute, the most first."""
    rest = [(name, took) for name, took in best.breakdown.items() if name not in COMPUTE]
    return sorted((p for p in rest if p[1] > LEAST * best.seconds), key=lambda p: -p[1])
