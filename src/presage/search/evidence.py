"""Which published runs stand behind a plan, and how far from them it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import log2

import msgspec

from presage.configs.job import Job
from presage.files.decoding import convert_record
from presage.files.reading import DATA, shipped_toml
from presage.hardware.gpu import gpu
from presage.text import percent

FILE = DATA / "jobs/evidence.toml"
OTHER_CHIP, OTHER_FAMILY, OTHER_WAY = 2.0, 5.0, 1.5  # doublings that another GPU, architecture or dispatcher counts as
FAR = 1.0  # doublings beyond a range that are told
SHOWN = 2


class RunGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of one source on one GPU; with experts where a dispatcher is named. Ranges are least and most."""

    source: str
    gpu: str
    dispatcher: str
    runs: int
    gpus: tuple[int, int]
    tp: tuple[int, int]
    pp: tuple[int, int]
    ep: tuple[int, int]
    micro_batch: tuple[int, int]
    error: float  # mean of the absolute errors of steps, with the source left out of every fit


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: tuple[RunGroup, ...]


@cache
def run_groups() -> tuple[RunGroup, ...]:
    """The groups that ship."""
    return convert_record(shipped_toml("jobs/evidence.toml"), _File).groups


def evidence(job: Job) -> list[str]:
    """The nearest groups of runs of the same kind of model, in words, and how far the job is from each."""
    sent = job.dispatcher if job.model.experts else ""
    alike = [g for g in run_groups() if bool(g.dispatcher) == bool(sent)]
    nearest = sorted(alike, key=lambda g: (_distance(job, sent, g), -g.runs))[:SHOWN]
    return [f"evidence: {_words(g)}; {_apart(job, sent, g) or 'this plan is within their ranges'}" for g in nearest]


def _distance(job: Job, sent: str, g: RunGroup) -> float:
    """Doublings by which degrees are beyond a group's ranges; what differs in kind counts as some."""
    beyond = sum(abs(log2(times)) for _, _, times in _beyond(job, g))
    here = job.platform.gpu
    chip = 0.0 if here.key == g.gpu else OTHER_CHIP if here.architecture == gpu(g.gpu).architecture else OTHER_FAMILY
    return beyond + chip + (OTHER_WAY if sent != g.dispatcher else 0.0)


def _beyond(job: Job, g: RunGroup) -> Iterator[tuple[str, int, float]]:
    """Degrees outside a group's ranges: name, value, times the nearest end of the range."""
    p = job.parallel
    for name, value in (("gpus", job.gpus), ("tp", p.tp), ("pp", p.pp), ("ep", p.ep), ("micro_batch", job.micro_batch)):
        low, high = getattr(g, name)
        if not low <= value <= high:
            yield name, value, value / (high if value > high else low)


def _words(g: RunGroup) -> str:
    what = f"experts by {g.dispatcher}" if g.dispatcher else "dense"
    scale = f"{g.gpus[0]:,} to {g.gpus[1]:,}" if g.gpus[0] < g.gpus[1] else f"{g.gpus[0]:,}"
    count = f"{g.runs} run{'s' if g.runs > 1 else ''}"
    return f"{count} of {g.source} ({what}, {scale} {gpu(g.gpu).name}), off by {percent(g.error)}"


def _apart(job: Job, sent: str, g: RunGroup) -> str:
    """What of a job is unlike a group."""
    out = [] if job.platform.gpu.key == g.gpu else ["another GPU"]
    out += [f"another dispatcher ({sent})"] if sent != g.dispatcher else []
    for name, value, times in _beyond(job, g):
        if abs(log2(times)) >= FAR:
            out.append(f"{name} {value:,} ({times:g} times the nearest)")
    return f"unlike this plan: {', '.join(out)}" if out else ""
