"""Sensitivity of a run's wall-clock time: checkpoint interval, spares, and single changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from presage.noise.model import Stalls
from presage.pool.pool import SERIAL, Pool
from presage.runs import checkpoint as laws
from presage.runs.outcome import RunOutcome
from presage.runs.run import TrainingRun
from presage.runs.sets import GROWTH, reliability
from presage.runs.simulate import MOST_ATTEMPTS, simulate

SPARES = (0, *(2**k for k in range(11)))
ENOUGH = 1500  # failures in a draw: what-ifs of longer runs are drawn of a part of them
NEAR = 1e-3  # of the wall-clock time: waits below this are none


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """A choice of the time between checkpoints, and the share of time that is useful with it."""

    name: str
    seconds: float  # of work
    steps: int
    exact: float
    meta: float


@dataclass(frozen=True, slots=True)
class RunChange:
    """Wall-clock quantiles with one change of the run, in seconds."""

    name: str
    middle: float  # of the median
    late: float  # of the 95th percentile
    ettr: float  # the share afterwards


@dataclass(frozen=True, slots=True)
class SparesOutcome:
    spares: int
    middle: float  # seconds of the run, at the median
    late: float
    waits: float  # of these, waiting for a node, on average


def intervals(run: TrainingRun) -> tuple[CheckpointInterval, ...]:
    """Checkpoint intervals by formula, then that of the run."""
    o = run.outage
    if o.mttf == float("inf"):
        return ()
    choices = {
        "Young": laws.young(o),
        "Daly": laws.daly(o),
        "Daly, higher order": laws.daly_higher_order(o),
        "RFO": laws.rfo(o),
        "exact optimum": laws.best_interval(o),
    }
    found = [_interval(run, name, max(seconds, 0.0)) for name, seconds in choices.items()]
    return (*found, _interval(run, "this run", run.every * run.step))


def _interval(run: TrainingRun, name: str, seconds: float) -> CheckpointInterval:
    o = run.outage
    exact = laws.exact_efficiency(o, seconds) if seconds or not o.save else 0.0
    meta = laws.meta_ettr(o, seconds) if seconds or not o.save else 0.0
    return CheckpointInterval(name, seconds, run.whole_steps(seconds), exact, meta)


def grown(run: TrainingRun) -> TrainingRun:
    """With failures that grow with scale as at 98,304 GPUs of one cluster."""
    return replace(run, reliability=replace(run.reliability, growth=reliability(GROWTH).growth))


def changes(run: TrainingRun, draws: int = 500, seed: int = 0, pool: Pool = SERIAL) -> tuple[RunChange, ...]:
    """Each change by itself, with the same random numbers; checkpoints at their best interval, where that is free."""
    base, times = _shorter(run.exact())
    others = [(name, other) for name, other in _others(base) if not _hardly(other)]
    runs = [base, *(other for _, other in others)]
    before, *found = pool.map(partial(_simulated, draws, seed), runs)
    return tuple(_change(name, before, after, times) for (name, _), after in zip(others, found, strict=True))


def _simulated(draws: int, seed: int, run: TrainingRun) -> RunOutcome:
    return simulate(run, draws, seed)


def _shorter(run: TrainingRun) -> tuple[TrainingRun, float]:
    """A part of a run that has thousands of failures, and how many such parts it has."""
    many = run.steps * run.step / run.efficiency * run.risk.rate / ENOUGH
    steps = max(1, round(run.steps / max(1.0, many)))
    return replace(run, steps=steps), run.steps / steps


def _hardly(run: TrainingRun) -> bool:
    """Whether failures keep the run from making progress."""
    return run.efficiency * MOST_ATTEMPTS < 2 * run.steps * run.step * run.risk.rate


def _change(name: str, before: RunOutcome, after: RunOutcome, times: float) -> RunChange:
    middle, late = (after.quantile(p) - before.quantile(p) for p in (0.5, 0.95))
    return RunChange(name, middle * times, _longer(middle, late, times), float(after.ettr.mean()))


def _longer(middle: float, late: float, times: float) -> float:
    """The 95th percentile of so many parts: what lies beyond the median grows with their root."""
    return middle * times + (late - middle) * sqrt(times)


def _others(run: TrainingRun) -> Iterator[tuple[str, TrainingRun]]:
    r, saves = run.reliability, run.checkpoints
    yield "steps 10% quicker", run.changed(seconds=0.9)
    if saves.save:
        quick = replace(saves, save=saves.save / 2, delay=saves.delay / 2)
        yield "checkpoints in half the time", replace(run, checkpoints=quick)
    if run.risk.unplanned:
        yield "half as many failures", replace(run, reliability=r.scaled(rates=0.5))
        yield "twice as many failures", replace(run, reliability=r.scaled(rates=2.0))
        yield "failures noticed in half the time", replace(run, reliability=r.scaled(detect=0.5))
        yield "restarts in half the time", replace(run, reliability=r.scaled(restart=0.5))
    if grown(run).risk.unplanned > 1.001 * run.risk.unplanned:
        yield "failures that grow with scale", grown(run)
    if r.slow:
        yield "no slow episodes", replace(run, reliability=replace(r, slow=()))
    if run.times.stalls.per_node_hour:
        yield "no stalls", replace(run, times=replace(run.times, stalls=Stalls()))


def with_spares(run: TrainingRun, draws: int = 500, seed: int = 0, pool: Pool = SERIAL) -> tuple[SparesOutcome, ...]:
    """Outcomes with 0, 1, 2, 4, ... spares, until none waits."""
    if not any(f.node for f in run.reliability.failures):
        return ()
    base, times = _shorter(run.exact())
    found: list[SparesOutcome] = []
    asked = [replace(base, spares=many) for many in SPARES]
    for one, o in zip(asked, pool.map(partial(_simulated, draws, seed), asked), strict=True):
        waits, middle, late = float(o.parts["spares"].mean()), o.quantile(0.5), o.quantile(0.95)
        found.append(SparesOutcome(one.spares or 0, middle * times, _longer(middle, late, times), waits * times))
        if waits < NEAR * middle:
            break
    return tuple(found)
