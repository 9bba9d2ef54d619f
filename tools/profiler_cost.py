"""What the profiler itself costs the host, per event it records: measured, not assumed.

A trace alone does not show it, but shows how fast its host was: where an op holds just one event, and that an op, the
difference of their durations is the time to enter and leave an op under the profiler, dispatch included. The mean of
the shorter half of these is the trace's `pace`. With the step time measured without a profiler the cost shows itself:

    cost per event = (profiled step - waits for the GPU - unprofiled step) / host events in the step

On the 12 host-bound steps measured on an H200 (second profiled step against `step_ms` of the run that took the trace)
this is 1.9 us in the median, 0.7 to 2.8 us from the 10th to the 90th percentile: much of that range is the host, which
in one trace runs up to twice as fast as in another. As a multiple of each trace's own pace it is 1.14 (0.69 to 1.92).
Predicting the unprofiled step of a case from the other eleven errs by (mean / median / largest of the absolute errors)

    as seen: profiled step                                       40 % / 41 % / 70 %
    per event: profiled - cost x events                          18 % / 17 % / 51 %
    per pace: profiled - multiple x pace x events                12 % / 11 % / 33 %
    factor: profiled x median(unprofiled / profiled) = 0.71      13 % / 13 % / 26 %

where three runs of the same step differ by 15 % themselves. The second profiled step is the one to use: the first also
pays for the profiler's buffers (up to 1.9 times as long). Twelve steps cannot tell more: a fit of one cost for ops and
one for calls has the second negative, and other ways to sum up the pace do as well (11 to 14 %). The multiple was
never checked on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces import waits
from presage.traces.trace import HostKind, Step, Trace

__all__ = ["PER_EVENT", "PER_PACE", "ProfiledStep", "ProfilerCost", "Spread", "pace", "per_event_cost"]
__all__ += ["profiled_step", "profiler_cost"]

NS = 1e-9
# The medians told above: seconds per event, and the multiple of a trace's pace.
PER_EVENT = 1.93e-6
PER_PACE = 1.14
# With fewer nested ops than this a trace has no pace to speak of.
LEAST_NESTED = 8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ProfiledStep:
    """One step under the profiler beside the same step without; seconds."""

    name: str
    profiled: float  # without the host's waits for the GPU
    unprofiled: float
    events: int  # host events the profiler recorded in it
    pace: float


@dataclass(frozen=True)
class Spread:
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class ProfilerCost:
    """The profiler's cost over some steps, and by rule the signed relative error of each step told from the others."""

    n: int
    per_event: Spread  # seconds
    per_pace: Spread  # multiples of the trace's pace
    left_out: Mapping[str, tuple[float, ...]]

    def mean_error(self, rule: str) -> float:
        return float(np.abs(self.left_out[rule]).mean())


def pace(trace: Trace, step: Step | None = None) -> float | None:
    """Seconds to enter and leave a nested op, over a step or the whole trace. None where too few ops nest so."""
    host, parent = trace.host, trace.host.parent
    op = host.kind == HostKind.OP
    children = np.bincount(parent[parent >= 0], minlength=len(host))
    alone = op & (parent >= 0) & op[parent] & (children[parent] == 1)
    if step is not None:
        alone &= (host.start >= step.start) & (host.start < step.end)
    took = host.end - host.start
    extra = np.sort(took[parent[alone]] - took[alone])
    return float(extra[: (len(extra) + 1) // 2].mean()) * NS if len(extra) >= LEAST_NESTED else None


def per_event_cost(trace: Trace) -> float:
    """The likely cost of one event in seconds, for a trace without an unprofiled measurement beside it."""
    found = pace(trace)
    return PER_EVENT if found is None else PER_PACE * found


def profiled_step(trace: Trace, unprofiled: float, step: int = -1) -> ProfiledStep:
    """A marked step of a trace beside the seconds it took without the profiler. The last step has the least warm-up."""
    window = trace.steps[step]
    host = trace.host
    events = int(((host.start >= window.start) & (host.start < window.end)).sum())
    s = waits.stretches(host)
    blocked = np.array([b.stretch for b in waits.blocking_calls(trace, s)], np.int64)
    blocked = blocked[(s.lo[blocked] >= window.start) & (s.hi[blocked] <= window.end)]
    waited = int((s.hi - s.lo)[blocked].sum())
    speed = pace(trace, window) or per_event_cost(trace) / PER_PACE
    return ProfiledStep(trace.path, (window.end - window.start - waited) * NS, unprofiled, events, speed)


def profiler_cost(steps: Sequence[ProfiledStep]) -> ProfilerCost:
    """The profiler's cost over two or more host-bound steps: of others the unprofiled time is not the host's."""
    profiled, unprofiled = np.array([x.profiled for x in steps]), np.array([x.unprofiled for x in steps])
    events, speed = np.array([float(x.events) for x in steps]), np.array([x.pace for x in steps])
    extra = profiled - unprofiled
    rules: dict[str, tuple[Floats, Callable[[Floats], Floats]]] = {
        "as seen": (extra, lambda _: profiled),
        "per event": (extra / events, lambda c: profiled - c * events),
        "per pace": (extra / (events * speed), lambda c: profiled - c * events * speed),
        "factor": (unprofiled / profiled, lambda c: profiled * c),
    }
    errors = {rule: tuple(predict(_others(c)) / unprofiled - 1) for rule, (c, predict) in rules.items()}
    spread = {rule: Spread(*map(float, np.quantile(c, [0.5, 0.1, 0.9]))) for rule, (c, _) in rules.items()}
    return ProfilerCost(len(steps), spread["per event"], spread["per pace"], errors)


def _others(values: Floats) -> Floats:
    """For each value the median of all others."""
    return np.array([np.median(np.delete(values, i)) for i in range(len(values))])
