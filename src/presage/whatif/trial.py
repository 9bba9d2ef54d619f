"""A Trial: a scenario predicted, draw by draw, so that scenarios can be compared under the same luck.

What an edit brings in is known less well than what is there already: kernels (and host time) of ops that the first
scenario does not have are wrong by a factor of their own in each draw. NEW_KERNELS and NEW_HOST are its standard
deviation (of the logarithm): kernel models miss single ops by about 8%, host terms by about 15%. An op is new if the
first scenario has no other like it in name, shapes, types and strides (for the host: in name and in what is around it).
And an edit's effect as a whole is known to about a fifth of itself (EFFECT): set so that ranges hold 95% of the pairs
of data/h200_edits/run1.json and run2.json, their own noise allowed for; the pairs of later runs are the check. What is
only supposed (a kernel or a host twice as fast) has no such error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.costs.call import from_graph
from presage.costs.kernel_model import OpTime
from presage.engine import Durations
from presage.noise.sampling import pace_factors
from presage.prediction.api import own_times
from presage.prediction.breakdown import MODELLED
from presage.prediction.result import Quantiles
from presage.prediction.step import StepProgram, StepResult, step_bound, step_program, step_result
from presage.prediction.step_program import STREAM, draw_durations, program, step_seconds, with_loading
from presage.whatif.scenario import Scenario

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
NEW_KERNELS, NEW_HOST, EFFECT = 0.08, 0.15, 0.2


@dataclass(frozen=True)
class Drawing:
    """How many runs, of how many steps, with which seed."""

    draws: int
    steps: int
    seed: int


@dataclass(frozen=True, eq=False)
class TimedScenario:
    """A scenario with what its ops take."""

    scenario: Scenario
    times: tuple[OpTime, ...]
    built: StepProgram
    notes: tuple[str, ...] = ()

    @cached_property
    def path(self) -> CriticalPath:
        return critical_path(self.built, sum(t.seconds / t.at_once for t in self.times))

    @cached_property
    def kernels(self) -> tuple[Any, ...]:
        """Every op as the kernel models see it; None for those that launch nothing."""
        graph = self.scenario.graph
        return tuple(from_graph(graph, op).key if op.kernels else None for op in graph.ops)

    @cached_property
    def hosts(self) -> tuple[Any, ...]:
        """Every op as the host sees it."""
        return tuple((op.name, op.within, op.phase, op.thread, bool(op.replayed)) for op in self.scenario.graph.ops)


@dataclass(frozen=True, eq=False)
class Trial:
    """What is predicted for a scenario."""

    timed: TimedScenario
    seconds: Floats  # a step, by draw
    result: StepResult
    modelled: float = 1.0  # of the GPU time of new ops, the share that comes from models of the ops themselves


def baseline_trial(scenario: Scenario, how: Drawing) -> Trial:
    """The scenario that others are compared with."""
    timed = _timed(scenario)
    return _trial(timed, _usual(timed, how), how)


def edited_trial(scenario: Scenario, how: Drawing, base: Trial) -> Trial:
    """Another scenario under the same luck, with what is not known of its new ops."""
    timed = _timed(scenario)
    kernels, hosts = _new(timed, base.timed)
    seconds = _usual(timed, how)
    if seconds.count > 1:
        seconds = _less_known(seconds, timed.built, kernels, hosts, how)
    same = (timed.kernels, timed.hosts) == (base.timed.kernels, base.timed.hosts)
    found = _trial(timed, seconds, how, None if same else base.seconds)
    return replace(found, modelled=_modelled(timed, kernels))


def _timed(scenario: Scenario) -> TimedScenario:
    times, notes = own_times(scenario.graph, scenario.machine)
    built = step_program(scenario.graph, times, scenario.machine.host)
    return TimedScenario(scenario, tuple(times), built, notes)


def _usual(timed: TimedScenario, how: Drawing) -> Durations:
    """The draws as any prediction has them."""
    rng = np.random.default_rng(how.seed)
    return draw_durations(
        timed.built.tasks, how.steps, how.draws, timed.scenario.machine.spread(timed.built.graph), rng
    )


def _trial(timed: TimedScenario, took: Durations, how: Drawing, before: Floats | None = None) -> Trial:
    built = timed.built
    many = program(built.tasks, how.steps, built.host.calls, [op.name for op in built.graph.ops])
    step = np.repeat(np.arange(how.steps, dtype=np.int32), len(built.tasks))
    seconds = step_seconds(many, took, step, how.steps)
    if before is not None and len(seconds) > 1:
        change = abs(float(np.log(np.median(seconds) / np.median(before))))
        seconds = seconds * pace_factors(np.random.default_rng([how.seed, 2]), EFFECT * change, len(seconds))
    drawn = with_loading(built.graph, seconds, how.seed)
    return Trial(timed, drawn, _result(timed, drawn, seconds, how))


def _new(timed: TimedScenario, base: TimedScenario) -> tuple[Mask, Mask]:
    """Which ops are new to the GPU, and which to the host."""
    kernels = unmatched(timed.kernels, base.kernels)
    if timed.scenario.machine.kernels.gpu != base.scenario.machine.kernels.gpu:
        kernels = np.array([t.launches > 0 for t in timed.times], np.bool_)
    return kernels, unmatched(timed.hosts, base.hosts)


def unmatched(these: Iterable[Any], others: Iterable[Any]) -> Mask:
    """Which of these the others do not have, each of the others standing for one."""
    left = Counter(others)
    out = []
    for one in these:
        out.append(left[one] <= 0)
        left[one] -= 1
    return np.array(out, np.bool_)


def _less_known(took: Durations, built: StepProgram, kernels: Mask, hosts: Mask, how: Drawing) -> Durations:
    """The durations with the new ops' own error: one factor a draw for all kernels, one for all host time."""
    rng = np.random.default_rng([how.seed, 1])
    on_gpu, on_host = (pace_factors(rng, sd, how.draws) for sd in (NEW_KERNELS, NEW_HOST))
    tasks = built.tasks
    gpu = tasks.lane >= STREAM
    own = np.ones((len(tasks), how.draws))
    for mask, some, factor in ((kernels, gpu, on_gpu), (hosts, ~gpu, on_host)):
        own[some & np.append(mask, False)[tasks.op]] = factor
    table = took.draws.reshape(how.steps, len(tasks), how.draws) * own
    return Durations.of(table.reshape(took.draws.shape))


def _modelled(timed: TimedScenario, new: Mask) -> float:
    seconds = np.array([t.seconds for t in timed.times]) * new
    known = np.array([t.source in MODELLED for t in timed.times], np.bool_)
    return float(seconds[known].sum() / seconds.sum()) if seconds.sum() else 1.0


def _result(timed: TimedScenario, drawn: Floats, alone: Floats, how: Drawing) -> StepResult:
    where, built = timed.scenario.machine, timed.built
    bound = step_bound(built.graph, timed.times, alone)
    result = step_result(built, timed.times, where.kernels.gpu, Quantiles.of(drawn), bound, how.draws, how.steps)
    return replace(result, notes=(*result.notes, *where.notes, *timed.notes), draws=drawn)


# ---- The critical path of one step at the usual pace: how much of it is the host's, the GPU's, and waiting.

STEPS = 7  # the last but one is like all that follow it; the last has no successor to hurry for


@dataclass(frozen=True, eq=False)
class CriticalPath:
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


def critical_path(built: StepProgram, busy: float) -> CriticalPath:
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
    return CriticalPath(whole, float(on_host.sum()), float(on_gpu.sum()), waited, busy, gaps, on_host, on_gpu)


def _sums(place: NDArray[np.int64], seconds: Floats, sizes: int) -> Floats:
    return np.asarray(np.bincount(place, seconds, sizes), np.float64)
