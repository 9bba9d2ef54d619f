"""Why the best layout is the best, in sentences: what it does better than others, and what holds it back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from presage.configs.check import problems
from presage.configs.job import Job
from presage.prediction.jobs.job_prediction import COMPUTE, JobResult
from presage.search.layout import KNOBS, RECOMPUTES, Layout, knob, laid, layout_of
from presage.search.search_result import Found, priced

__all__ = ["Difference", "Missed", "differences", "losses", "missed"]

LEAST = 0.002  # of a step: smaller differences are left unsaid


@dataclass(frozen=True)
class Difference:
    """Between two plans: knobs as (name, here, there), and seconds by part that the other one takes more."""

    knobs: tuple[tuple[str, str, str], ...]
    parts: tuple[tuple[str, float], ...]
    seconds: float


def differences(best: JobResult, other: JobResult) -> Difference:
    """What the other plan does otherwise, and what it costs it; the largest first."""
    a, b = layout_of(best.job), layout_of(other.job)
    pairs = ((name, knob(a, name), knob(b, name)) for name in KNOBS if name != "zero")
    ours, theirs = best.breakdown, other.breakdown
    names = [*ours, *(n for n in theirs if n not in ours)]
    parts = [(n, theirs.get(n, 0.0) - ours.get(n, 0.0)) for n in names]
    told = sorted((p for p in parts if abs(p[1]) > LEAST * best.seconds), key=lambda p: -abs(p[1]))
    return Difference(tuple(p for p in pairs if p[1] != p[2]), tuple(told), other.seconds - best.seconds)


@dataclass(frozen=True)
class Missed:
    """A plan a step away from the best that would be faster, if it fitted."""

    layout: Layout
    seconds: float
    needed: float


def missed(found: Found) -> list[Missed]:
    """Those that memory rules out, the fastest first."""
    best = found.best[0]
    out = []
    for other in _near(best.job):
        made = priced(other, found.efficiency)
        if not made.memory.fits and made.seconds < best.seconds:
            out.append(Missed(layout_of(other), made.seconds, made.memory.needed))
    return sorted(out, key=lambda m: m.seconds)


def _near(job: Job) -> Iterator[Job]:
    """Plans that differ in a knob, or in two that go together; legal ones."""
    x = layout_of(job)
    others = [x._replace(recompute=r) for r in RECOMPUTES.values()]
    others += [x._replace(micro_batch=2 * x.micro_batch), x._replace(virtual=2 * x.virtual, schedule="interleaved")]
    others += [x._replace(zero=z, fsdp=False, shard=0) for z in range(x.zero)]
    others += [x._replace(tp=x.tp // 2, sequence=x.sequence and x.tp > 2)] if x.tp > 1 else []
    others += [x._replace(pp=x.pp // 2, schedule="1f1b" if x.pp == 2 else x.schedule)] if x.pp > 1 else []
    others += [x._replace(cp=x.cp // 2)] if x.cp > 1 else []
    for other in others:
        made = laid(job, other)
        if other != x and not problems(made):
            yield made


def losses(best: JobResult) -> list[tuple[str, float]]:
    """Seconds that are no compute, the most first."""
    rest = [(name, took) for name, took in best.breakdown.items() if name not in COMPUTE]
    return sorted((p for p in rest if p[1] > LEAST * best.seconds), key=lambda p: -p[1])
