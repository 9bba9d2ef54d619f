"""Why an edit is worth what it is: what limits the step before and after, and whether the work it saves did."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.text import percent, seconds
from presage.whatif.trial import CriticalPath, TimedScenario, unmatched

LIMIT = 0.8  # of the critical path: what has this much of it is the limit
LEAST = 0.005  # of a step: less is left unsaid


@dataclass(frozen=True)
class Effect:
    """What an edit does to a step: seconds it adds (or, below 0, takes away), and how much of what it touches counted.

    Touched is what the step had and has no more (or at another speed), its seconds on the critical path beside it.
    """

    before: CriticalPath
    after: CriticalPath
    gpu: float
    host: float
    touched_gpu: float
    touched_gpu_path: float
    touched_host: float
    touched_host_path: float

    @property
    def gained(self) -> float:
        return self.before.step - self.after.step


def edit_effect(before: TimedScenario, after: TimedScenario) -> Effect:
    """From two settings, at the usual pace."""
    gpu, host = _touched(before, after)
    took = np.array([t.seconds / t.at_once for t in before.times])
    cost = before.built.host_seconds
    path = before.path
    return Effect(
        path,
        after.path,
        after.path.busy - path.busy,
        after.built.host_total - before.built.host_total,
        float(took[gpu].sum()),
        float(path.on_gpu[:-1][gpu].sum()),
        float(cost[host].sum()),
        float(path.on_host[:-1][host].sum()),
    )


def _touched(before: TimedScenario, after: TimedScenario) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which ops of the first setting are gone or changed, for the GPU and for the host."""
    everything = np.ones(len(before.times), np.bool_)
    here, there = before.scenario, after.scenario
    gpu = everything
    if here.machine.kernels.gpu == there.machine.kernels.gpu:
        gpu = unmatched(_speeds(before), _speeds(after))
    host = everything if here.machine.host != there.machine.host else unmatched(before.hosts, after.hosts)
    return gpu, host


def _speeds(timed: TimedScenario) -> list[tuple[object, float]]:
    return [(key, op.speed) for key, op in zip(timed.kernels, timed.scenario.graph.ops, strict=True)]


def explain_change(e: Effect) -> str:
    """A sentence without its end: what the edit changes, and what limits the step then."""
    small = abs(e.gained) < 2 * LEAST * e.before.step
    none = "hardly any work changes" if small else f"the work stays, waits {'go' if e.gained > 0 else 'come'}"
    verdict = _nothing(e) if small else _then(e) if e.gained > 0 else f"the step gets longer, and {_then(e)}"
    return f"{_listed(_changes(e)) or none}; {verdict}"


def describe_limit(p: CriticalPath) -> str:
    """What sets the pace of a step."""
    share = {"host": p.host / (p.step or 1.0), "gpu": p.gpu / (p.step or 1.0)}
    if share["gpu"] >= LIMIT:
        return f"the GPU is the limit ({percent(share['gpu'], 0)} of the critical path)"
    if share["host"] >= LIMIT:
        idle = f", the GPU waits {seconds(p.idle)} a step" if p.idle > LEAST * p.step else ""
        return f"the host is the limit ({percent(share['host'], 0)} of the critical path{idle})"
    both = f"{percent(share['host'], 0)} and {percent(share['gpu'], 0)} of the critical path"
    return f"host and GPU are the limit by turns ({both})"


def _changes(e: Effect) -> list[str]:
    """What goes and what comes, as far as it is worth telling."""
    out = []
    for what, change, touched, on_path in (
        ("host", e.host, e.touched_host, e.touched_host_path),
        ("GPU", e.gpu, e.touched_gpu, e.touched_gpu_path),
    ):
        if abs(change) > LEAST * e.before.step:
            verb = "more" if change > 0 else "less"
            note = _counted(change, touched, on_path) if _who(e.before) == _who(e.after) else ""
            out.append(f"{seconds(abs(change))} {verb} {what} work{note}")
    closer = e.before.gaps - e.after.gaps
    if _who(e.before) == "gpu" and closer > LEAST * e.before.step:
        out.append(f"{seconds(closer)} less between kernels")
    return out


def _listed(some: list[str]) -> str:
    return " and ".join([*([", ".join(some[:-1])] if some[1:] else []), *some[-1:]])


def _counted(change: float, touched: float, on_path: float) -> str:
    """How much of what was there before lay on the path."""
    if change > 0 or touched <= 0:
        return ""
    share = min(1.0, on_path / touched)
    return " (off the critical path)" if share < 0.05 else "" if share > 0.9 else f" ({percent(share, 0)} on the path)"


def _nothing(e: Effect) -> str:
    """Why nothing, or nearly nothing, is gained."""
    p = e.before
    if e.gpu < 0 <= e.host + LEAST * p.step and p.gpu < LIMIT * p.step:
        return f"nothing gained, as the GPU waits for the host {seconds(p.idle)} a step anyway"
    if e.host < 0 and p.gpu >= LIMIT * p.step:
        return "nothing gained, as the host is ahead of the GPU anyway"
    return "nothing gained" if e.gained <= LEAST * p.step else f"{seconds(e.gained)} gained"


def _then(e: Effect) -> str:
    """What is the limit afterwards."""
    a, b = (_who(p) for p in (e.before, e.after))
    if a == b:
        return f"{_named(b)} the limit still"
    work = {"gpu": f" ({seconds(e.after.busy)} of work)", "host": f" ({seconds(e.after.host)} of work)"}.get(b, "")
    return f"then {_named(b)} the limit{work}"


def _who(p: CriticalPath) -> str:
    return "gpu" if p.gpu >= LIMIT * p.step else "host" if p.host >= LIMIT * p.step else "both"


def _named(who: str) -> str:
    return {"gpu": "the GPU is", "host": "the host is", "both": "both are"}[who]
