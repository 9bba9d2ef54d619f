"""`repair(job)`: the nearest job that can be run, for a job whose degrees, batch or precision are not legal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import log2
from typing import NamedTuple

from presage.configs.check import problems, supported
from presage.configs.job import PRECISIONS, Job
from presage.memory.job_memory import most_needed
from presage.parallel.schedules import ONE_CHUNK, default_schedule, schedule_kind
from presage.search.plan_space import LEAST_TOKENS, MOST_TP, divisors

# What a change by a factor of two counts. A batch is changed only where degrees would have to change a lot.
WEIGHTS = {"tp": 1.0, "cp": 1.0, "pp": 1.0, "ep": 0.5, "virtual": 0.4, "micro_batch": 0.5, "global_batch": 4.0}
OTHER_BATCH = 3.0  # counts in itself
FARTHER, TRIED = 3.0, 64  # how much farther a plan that fits may be, and how many are tried
PREFERRED = ("bf16", "fp16", "tf32", "fp32")


class PlanDegrees(NamedTuple):
    """The numbers of a plan that a repair changes."""

    tp: int
    cp: int
    pp: int
    ep: int
    virtual: int
    micro_batch: int
    global_batch: int


def repair(job: Job, keep: Collection[str] = ()) -> Job | None:
    """The legal job nearest to this one, of those near it one that fits in memory; the job itself where it is legal.

    `keep` names what must stay as it is (tp, gpus, global_batch, ...); None where nothing legal is left. A platform's
    size, a GPU's precisions and a model's longest sequence bound what they bound, whatever is kept.
    """
    if not problems(job):
        return job
    job = _bounded(job)
    if not problems(job):
        return job
    now = _degrees(job)
    near = sorted((_distance(now, d), d) for d in _candidates(job, now) if not any(_moved(now, d, k) for k in keep))
    first: tuple[float, Job] | None = None
    tried = 0
    for far, degrees in near:
        if first and (tried >= TRIED or far > first[0] + FARTHER):
            break
        made = _apply(job, degrees)
        if problems(made):
            continue
        tried, first = tried + 1, first or (far, made)
        if most_needed(made) <= job.platform.gpu.memory:
            return made
    return first[1] if first else None


def _bounded(job: Job) -> Job:
    """Not more GPUs than the platform has, no longer sequences than positions, a precision that the GPU has."""
    gpu, m = job.platform.gpu, job.model
    job = replace(job, gpus=min(job.gpus, job.platform.links[-1].ranks))
    if m.positions == "learned" and 0 < m.max_positions < job.sequence:
        job = replace(job, sequence=m.max_positions)
    if job.precision in PRECISIONS and not supported(job.precision, gpu.peak, gpu.architecture):
        job = replace(job, precision=next(p for p in PREFERRED if supported(p, gpu.peak, gpu.architecture)))
    return job


def _degrees(job: Job) -> PlanDegrees:
    p = job.parallel
    return PlanDegrees(p.tp, p.cp, p.pp, p.ep, p.virtual, job.micro_batch, job.global_batch)


def _distance(now: PlanDegrees, then: PlanDegrees) -> float:
    octaves = sum(w * abs(log2(getattr(then, k) / getattr(now, k))) for k, w in WEIGHTS.items())
    return octaves + (OTHER_BATCH if then.global_batch != now.global_batch else 0.0)


def _moved(now: PlanDegrees, then: PlanDegrees, name: str) -> bool:
    return name in WEIGHTS and getattr(now, name) != getattr(then, name)


def _candidates(job: Job, now: PlanDegrees) -> Iterator[PlanDegrees]:
    m, gpus = job.model, job.gpus
    most = max(MOST_TP, job.platform.domain, now.tp)
    for tp in (t for t in divisors(gpus) if t <= most and not m.heads % t and not m.ffn % t):
        for cp in (c for c in divisors(gpus // tp) if c == 1 or job.sequence // c >= LEAST_TOKENS or c == now.cp):
            for pp in (p for p in divisors(gpus // (tp * cp)) if p <= m.layers + 2):
                yield from _with_batch(job, now, tp, cp, pp)


def _with_batch(job: Job, now: PlanDegrees, tp: int, cp: int, pp: int) -> Iterator[PlanDegrees]:
    """The batch as it is or the nearest that replicas can share, with the largest microbatch up to the job's own."""
    dp = job.gpus // (tp * cp * pp)
    batch = now.global_batch if not now.global_batch % dp else max(1, round(now.global_batch / dp)) * dp
    replica = batch // dp
    size = max(s for s in range(1, min(now.micro_batch, replica) + 1) if not replica % s)
    for ep in divisors(job.model.experts.experts) if job.model.experts else [1]:
        for virtual in _chunks(job, now, pp):
            yield PlanDegrees(tp, cp, pp, ep, virtual, size, batch)


def _chunks(job: Job, now: PlanDegrees, pp: int) -> list[int]:
    """One, and as many as the layers leave of the job's own."""
    if pp == 1 or now.virtual == 1:
        return [1]
    return sorted({1, max(1, min(now.virtual, job.model.layers // pp, 1024 // pp))} | ({now.virtual}))


def _apply(job: Job, d: PlanDegrees) -> Job:
    """The job with other degrees, and what follows from them: schedule, sequence parallelism, shares of the state."""
    p, layers, slots = job.parallel, job.model.layers, d.pp * d.virtual
    sequence = d.tp > 1 and (p.sequence_parallel if p.tp > 1 else job.framework.sequence)
    holders = job.gpus // (d.tp * d.pp)
    experts = p.expert_tp if job.model.experts and not holders * d.tp % (d.ep * p.expert_tp) else 1
    several = schedule_kind(p.schedule).chunks in ("two", "several")
    own = d.pp > 1 and several == (d.virtual > 1)
    ends = slots > 1 and bool(layers % slots) and (slots > layers or not (layers + 2) % slots)
    parallel = replace(
        p, tp=d.tp, cp=d.cp, pp=d.pp, ep=d.ep, virtual=d.virtual, expert_tp=experts,
        schedule=p.schedule if own else default_schedule(d.virtual) if d.pp > 1 else ONE_CHUNK,
        sequence_parallel=sequence and not job.sequence % (d.tp * d.cp),
        shard=p.shard if p.shard and not holders % p.shard else 0,
        layers_as=(), ends_as_layers=ends,
    )  # fmt: skip
    return replace(job, parallel=parallel, micro_batch=d.micro_batch, global_batch=d.global_batch)
