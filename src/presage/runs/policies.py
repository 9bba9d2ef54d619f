"""Policies against failures by their names, applied to a run, and drawn side by side.

A policy is a name with a value where it takes one (`spares=8`), or several joined by + (`hot-spare=2+elastic`). All
are drawn with the random numbers of the run they change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import exp, expm1, log

from presage.configs.job import Job
from presage.errors import PresageError, near
from presage.noise.distribution import LogNormal
from presage.pool.pool import SERIAL, Pool
from presage.runs.failures import DAY, Repair
from presage.runs.outcome import RunOutcome
from presage.runs.run import GB, CheckpointPlan, TrainingRun, checkpoint_bytes
from presage.runs.simulate import simulate

COMPARE = "compare"
HOUR = 3600.0
COPY_RATE, COPY_SETUP = 20 * GB, 1.0  # bytes/s from a GPU to host memory and to a peer; seconds to stop: both assumed
MEMORY_LOST = 0.05  # share of failures that take a node and the peer that has its copy: assumed
ASYNC = 0.95  # share of writing that overlaps training
USUAL_REPLICAS = 16  # that an elastic run is split into at most, where the job does not say
ENOUGH = 0.95  # of the time no more nodes than so many are in repair


@dataclass(frozen=True)
class PolicyRun:
    """A run under a policy, and what had to be assumed for it."""

    name: str
    run: TrainingRun
    assumed: tuple[str, ...] = ()

    @property
    def extra_nodes(self) -> int:
        return (self.run.spares or 0) + self.run.policy.hot


@dataclass(frozen=True)
class PolicyOutcome:
    """Drawn runs under a policy."""

    policy: PolicyRun
    outcome: RunOutcome

    @property
    def goodput(self) -> float:
        return float(self.outcome.goodput.mean())


def needed_spares(run: TrainingRun, share: float = ENOUGH) -> int:
    """Nodes in repair at once that are not exceeded in this share of time: Poisson, whatever the repair times are."""
    from scipy.special import gammaincc

    kind = run.reliability
    each = (f.node * (f.repair or kind.repair).mean for f in kind.failures)
    mean = float(sum(r * seconds for r, seconds in zip(run.risk.rates, each, strict=True)))
    return next(n for n in range(10_000_000) if gammaincc(n + 1, mean) >= share) if mean else 0


def compared_policies(run: TrainingRun, job: Job) -> str:
    """The policies that --policy compare is about, those that need something the run lacks left out."""
    hot, kind = max(1, min(4, needed_spares(run))), run.reliability
    names = ["restart", f"spares={needed_spares(run)}", f"hot-spare={hot}", "async-checkpoint", "in-memory-checkpoint"]
    names += ["evict=2"] if kind.frailty else []
    names += ["burn-in=24"] if kind.relapse else []
    names += ["watch=10"] if kind.slow else []
    if job.dp > 1:
        names += [f"elastic={_replicas(job)}"]
    return ",".join([*names, f"hot-spare={hot}+in-memory-checkpoint"])


def policy_runs(text: str, run: TrainingRun, job: Job) -> tuple[PolicyRun, ...]:
    """The run under each policy of a list; `compare` is all that go with it."""
    text = compared_policies(run, job) if text.strip() == COMPARE else text
    return tuple(_combined(one.strip(), run, job) for one in text.split(","))


def draw_policies(
    policies: tuple[PolicyRun, ...], draws: int, seed: int, pool: Pool = SERIAL
) -> tuple[PolicyOutcome, ...]:
    """Each with the same random numbers."""
    found = pool.map(partial(_simulated, draws, seed), [p.run for p in policies])
    return tuple(PolicyOutcome(p, o) for p, o in zip(policies, found, strict=True))


def _simulated(draws: int, seed: int, run: TrainingRun) -> RunOutcome:
    return simulate(run, draws, seed)


def _combined(text: str, run: TrainingRun, job: Job) -> PolicyRun:
    out = PolicyRun(text, replace(run, policy=replace(run.policy, name=text)))
    for part in text.split("+"):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in POLICIES:
            known = f"choose from {', '.join(POLICIES)}, or {COMPARE} for all"
            raise PresageError(f"--policy {part.strip()!r} is unknown: {known}{near(name, POLICIES)}")
        out = POLICIES[name](out, value, job)
    return out


def _number(name: str, value: str, least: float, most: float, default: float | None = None) -> float:
    try:
        found = default if value == "" and default is not None else float(value)
    except ValueError:
        found = None
    if found is None or not least <= found <= most:
        raise PresageError(f"--policy {name}={value}: write a number from {least:g} to {most:g}")
    return found


def _whole(name: str, value: str, least: int, default: int | None = None) -> int:
    found = _number(name, value, least, 1e6, default)
    if found != int(found):
        raise PresageError(f"--policy {name}={value}: write a whole number")
    return int(found)


def _with(p: PolicyRun, note: str = "", **changes: object) -> PolicyRun:
    """The policy run with other fields of its policy, and one more assumption."""
    run = replace(p.run, policy=replace(p.run.policy, **changes))  # type: ignore[arg-type]
    return replace(p, run=run, assumed=(*p.assumed, note) if note else p.assumed)


# ---- the policies


def _restart(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    if value:
        raise PresageError(f"--policy restart={value}: restart takes no value; --restart-seconds says how long")
    return p


def _spares(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    return replace(p, run=replace(p.run, spares=_whole("spares", value, 0)))


def _hot(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    note = f"a hot standby node takes over in {p.run.policy.hot_restart:g} s"
    return _with(p, note, hot=_whole("hot-spare", value, 1, 1))


def _replicas(job: Job) -> int:
    """Replicas that a failure can leave alone: copies of the whole state, or where there is one a usual split."""
    copies = job.dp // max(1, job.sharding)
    return copies if copies > 1 else max(n for n in range(1, USUAL_REPLICAS + 1) if job.dp % n == 0)


def _elastic(p: PolicyRun, value: str, job: Job) -> PolicyRun:
    if job.dp < 2:
        raise PresageError("--policy elastic needs data-parallel replicas: this job has one; use hot-spare=N instead")
    many = _whole("elastic", value, 2, job.dp // job.sharding if value == "" else None)
    if value and job.dp % many:
        raise PresageError(f"--policy elastic={value}: {job.dp} data-parallel ranks do not split into {many} replicas")
    kind = p.run.reliability
    heal = kind.restart.at(p.run.gpus / many) + kind.load
    note = f"elastic: {many} replicas with a whole copy of the state each, its memory and step time as before"
    out = _with(p, note, replicas=many, heal=heal)
    rare = replace(p.run, reliability=kind.scaled(rates=1 / many))  # nothing is rolled back while one replica is left
    every = p.run.checkpoints.every or rare.every
    return replace(out, run=replace(out.run, checkpoints=replace(out.run.checkpoints, every=every)))


def _memory(p: PolicyRun, value: str, job: Job) -> PolicyRun:
    usual = COPY_SETUP + checkpoint_bytes(job) / job.gpus / COPY_RATE
    save = _number("in-memory-checkpoint", value, 1e-3, 1e6, usual)
    stored = p.run.every
    plan = CheckpointPlan(save, 0.0, None, "copies in memory")
    out = replace(p, run=replace(p.run, checkpoints=plan))
    note = f"copies in memory stop a step for {save:.3g} s, and {MEMORY_LOST:.0%} of failures destroy them"
    return _with(out, note, stored=stored, memory_lost=MEMORY_LOST)


def _async(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    share, k = _number("async-checkpoint", value, 0.0, 1.0, ASYNC), p.run.checkpoints
    writing = k.save + k.delay
    plan = CheckpointPlan(max((1 - share) * writing, 1e-3), share * writing, k.every, "written in the background")
    note = f"{share:.0%} of a checkpoint is written while training goes on, at no cost to steps"
    return replace(p, run=replace(p.run, checkpoints=plan), assumed=(*p.assumed, note))


def _evict(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    if not p.run.reliability.frailty:
        fix = "fit one to a log of faults with presage fit FAULTS.csv, or add frailty = V to its file"
        raise PresageError(f"--policy evict: the failure set {p.run.reliability.name!r} has no repeat offenders: {fix}")
    note = "an evicted node is replaced by one that fails as often as an average one"
    return _with(p, note, evict=_whole("evict", value, 1, 2))


def _burn_in(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    kind = p.run.reliability
    if not kind.relapse:
        fix = "fit one to a log of faults with presage fit FAULTS.csv, or add relapse = SHARE to its file"
        raise PresageError(f"--policy burn-in: the failure set {kind.name!r} has no relapses: {fix}")
    hours = _number("burn-in", value, 0.0, 1e5, 24.0)
    left = 1 - kind.relapse * -expm1(-hours * HOUR / kind.relapse_after)
    failures = tuple(
        replace(f, per_node_day=f.per_node_day * left, repair=_longer(f.repair, hours))
        if f.node and not f.planned
        else f
        for f in kind.failures
    )
    note = f"a repaired node is tested for {hours:g} h, in which {1 - left:.0%} of node failures show and stop nothing"
    tested = replace(kind, failures=failures, repair=_longer(kind.repair, hours) or kind.repair)
    return replace(p, run=replace(p.run, reliability=tested), assumed=(*p.assumed, note))


def _longer(repair: Repair | None, hours: float) -> Repair | None:
    return None if repair is None else replace(repair, mean=repair.mean + hours * HOUR)


def _watch(p: PolicyRun, value: str, _: Job) -> PolicyRun:
    if not p.run.reliability.slow:
        raise PresageError("--policy watch: this failure set has no slow episodes ([[slow]]) to be found sooner")
    minutes = _number("watch", value, 1e-3, 1e6, 10.0)
    slow = tuple(replace(e, minutes=_at_most(e.minutes, minutes)) for e in p.run.reliability.slow)
    note = f"slow nodes are found and mended after {minutes:g} minutes at most"
    kind = replace(p.run.reliability, slow=slow)
    return replace(p, run=replace(p.run, reliability=kind), assumed=(*p.assumed, note))


def _at_most(minutes: LogNormal, most: float) -> LogNormal:
    """A log-normal with the mean that these minutes have once none is longer than `most`."""
    from scipy.special import ndtr

    z = (log(most) - log(minutes.median)) / max(minutes.log_sd, 1e-9)
    mean = minutes.mean * float(ndtr(z - minutes.log_sd)) + most * float(1 - ndtr(z))
    wide = min(minutes.log_sd, 0.5)
    return LogNormal(mean / exp(wide**2 / 2), wide)


POLICIES: dict[str, Callable[[PolicyRun, str, Job], PolicyRun]] = {
    "restart": _restart,
    "spares": _spares,
    "hot-spare": _hot,
    "elastic": _elastic,
    "in-memory-checkpoint": _memory,
    "async-checkpoint": _async,
    "evict": _evict,
    "burn-in": _burn_in,
    "watch": _watch,
}


def policies_json(found: tuple[PolicyOutcome, ...], price: float | None) -> list[dict[str, object]]:
    """Plain values with the units in their keys."""
    return [
        {
            "policy": p.policy.name,
            "goodput": p.goodput,
            "days": {f"p{100 * q:.0f}": p.outcome.quantile(q) / DAY for q in (0.05, 0.5, 0.9, 0.95)},
            "extra_nodes": p.policy.extra_nodes,
            "gpu_hours": float(p.outcome.cost(1.0).mean()),
            "cost": None if price is None else float(p.outcome.cost(price).mean()),
            "assumed": list(p.policy.assumed),
        }
        for p in found
    ]
