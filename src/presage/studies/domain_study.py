"""Larger NVLink domains: the same GPUs and the same network between domains, of 8 or 72 GPUs each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from presage.configs.job import Job
from presage.errors import PresageError
from presage.hardware import Platform
from presage.prediction.draws.distribution import belief_of
from presage.search import job_plan, plan_words, search
from presage.studies.study_point import SETUP, Point, Setup, Skipped, Study, at

__all__ = ["DOMAINS", "domain_study", "with_domain"]

DOMAINS = (8, 72)
MESH = 4  # GPUs that links without a switch join


def domain_study(
    job: Job,
    domains: Sequence[int] = DOMAINS,
    setup: Setup = SETUP,
    best: bool = False,
    workers: int = 1,
    ray: str | None = None,
) -> Study:
    """The job's own plan in each; `best`: beside it the best that a search finds there."""
    found: list[Point | Skipped] = []
    for size in sorted(domains):
        moved = replace(job, platform=with_domain(job.platform, size))
        found.append(_noted(at(f"NVL{size}", moved, setup)))
        if best:
            found.append(_best(moved, size, setup, workers, ray))
    points = [p for p in found if isinstance(p, Point)]
    points = [p.with_more(speedup=points[0].mean / p.mean) for p in points]
    source = belief_of(job, 1.0, setup.noise)[1]
    return Study("domain", job, tuple(points), tuple(p for p in found if isinstance(p, Skipped)), source)


def _best(job: Job, size: int, setup: Setup, workers: int, ray: str | None) -> Point | Skipped:
    name, found = f"NVL{size}, best plan", search(job, job.gpus, top=1, workers=workers, ray=ray)
    if not found.best:
        return Skipped(name, "no plan fits in memory")
    return _noted(at(name, found.best[0].job, setup))


def _noted(p: Point | Skipped) -> Point | Skipped:
    return replace(p, note=plan_words(job_plan(p.job))) if isinstance(p, Point) else p


def with_domain(platform: Platform, size: int) -> Platform:
    """The platform with so many GPUs on one NVLink, of the same rate each; between domains the network is as it was."""
    if platform.gpu.link is None or len(platform.links) < 2:
        raise PresageError(f"{platform.key}: its GPUs have no links of their own, or no network between nodes")
    if size < 2:
        raise PresageError(f"an NVLink domain of {size}: it should have 2 GPUs or more")
    near, far = platform.links[0], platform.links[-1]
    if size == near.ranks:
        return platform
    topology = "switch" if size > MESH else near.topology
    inner = replace(near, ranks=size, bandwidth=platform.gpu.link, topology=topology)
    outer = replace(far, ranks=size * -(-far.ranks // size))
    return replace(platform, key=f"{platform.key}-nvl{size}", links=(inner, outer))
