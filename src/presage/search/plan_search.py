"""`search(job, gpus) -> Found`: all legal layouts of a job, those that fit in memory, and the best of them.

First every layout is surveyed: does it fit, and what does its step take at least? Then layouts are priced in rounds,
those with the least bounds first, until none that is left could matter (see `race`). The rounds are the same however
many workers there are, and so is what is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from presage.configs.check import check, problems
from presage.configs.job import Job
from presage.errors import PresageError, near
from presage.pool import Pool, open_pool
from presage.prediction.draws.distribution import belief_of
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_prediction import JobResult
from presage.search.layout import JobPlan, apply_plan
from presage.search.plan_pricing import Survey, price_plans, survey_families
from presage.search.plan_space import Keep, PlanFamily, PlanSpace
from presage.search.race import PruningQueue, pareto_front
from presage.search.robust import CANDIDATES, rank_by_p95
from presage.search.search_result import (
    OnProgress,
    PricedPlan,
    SearchCounts,
    SearchProgress,
    SearchResult,
    predict_plan,
)

__all__ = ["OBJECTIVES", "search"]

OBJECTIVES = ("mean", "cost", "p95")
ROUND = 64, 1024  # layouts that are priced before others are set aside anew: in the first round, in any at most
PIECE = 32  # of them in one piece of work
FAMILIES = 8  # in one piece of work, at least


def search(
    job: Job,
    gpus: int | Sequence[int],
    *,
    objective: str = "mean",
    limit: int | None = None,
    workers: int = 1,
    ray: str | None = None,
    keep: Keep | None = None,
    top: int = 10,
    prune: bool = True,
    efficiency: Efficiency | None = None,
    noise: str | None = None,
    seed: int = 0,
    tell: OnProgress | None = None,
) -> SearchResult:
    """The best layouts of a job on so many GPUs, or on the best of several numbers of them.

    The best has the shortest step (`mean`), the fewest GPU-seconds a step (`cost`: for several numbers of GPUs), or the
    shortest time that 19 of 20 steps take at most (`p95`: of the `CANDIDATES` with the shortest steps, with `noise` and
    `seed` as in `presage job`).
    `workers` processes or a `ray` cluster do the work. `keep` holds knobs fast: {"tp": {"8"}}. At most `limit` layouts
    are priced. Without `prune` all that fit are.
    """
    begun = time.perf_counter()
    if objective not in OBJECTIVES:
        raise PresageError(
            f"unknown objective {objective!r}: choose from {', '.join(OBJECTIVES)}{near(objective, OBJECTIVES)}"
        )
    surely = objective == "p95"
    if surely:
        belief_of(job, 1.0, noise)  # what is wrong with it is said at once
    space = PlanSpace(job, (gpus,) if isinstance(gpus, int) else tuple(gpus), keep or {})
    families = _families(space)
    with open_pool(workers, ray) as pool:
        field = _surveyed(space, families, efficiency, pool, tell or _nothing)
        race = _race(field, objective, max(top, CANDIDATES) if surely else top, prune)
        one = partial(price_plans, job, efficiency)
        complete = _run(race, field.layouts, one, pool, objective, limit, tell or _nothing, field.legal)
        found = _found(space, field, race, objective, efficiency, complete, begun)
        return rank_by_p95(found, noise, seed, top, begun, tell or _nothing, pool) if surely else found


def _families(space: PlanSpace) -> list[PlanFamily]:
    for gpus in space.gpus:
        reach = space.job.platform.links[-1].ranks
        if not 1 <= gpus <= reach:
            raise PresageError(f"{gpus} GPUs: {space.job.platform.key} has 1 to {reach}")
    found = list(space.families())
    first = next((x for f in found for x in space.layouts(f)), None)
    if first is None:
        held = "".join(f", {k} {' or '.join(sorted(v))}" for k, v in space.keep.items())
        raise PresageError(
            f"no legal plan on {' or '.join(map(str, space.gpus))} GPUs with a global batch of "
            f"{space.job.global_batch} samples{held}: the number of replicas must divide the batch"
        )
    check(apply_plan(space.job, first))  # what is wrong with one is wrong with all
    return found


def _surveyed(
    space: PlanSpace, families: list[PlanFamily], efficiency: Efficiency | None, pool: Pool, tell: OnProgress
) -> Survey:
    """All families, a few at a time."""
    total = Survey(0, float("inf"), [], [], [])
    pieces, done = _pieces(families), 0
    for piece, part in zip(pieces, pool.map(partial(survey_families, space, efficiency), pieces), strict=True):
        done += len(piece)
        total = total._replace(legal=total.legal + part.legal, smallest=min(total.smallest, part.smallest))
        for whole, more in zip(total[2:], part[2:], strict=True):
            whole.extend(more)  # type: ignore[attr-defined]
        tell(SearchProgress("surveying", done, len(families), total.legal, float("inf")))
    return total


def _pieces(families: list[PlanFamily]) -> list[list[PlanFamily]]:
    """Those that differ in the size of microbatches alone stay together, the smaller sizes first."""
    out: list[list[PlanFamily]] = []
    for _, alike in groupby(families, key=lambda f: f._replace(micro_batch=0)):
        if out and len(out[-1]) < FAMILIES:
            out[-1].extend(alike)
        else:
            out.append(list(alike))
    return out


def _race(field: Survey, objective: str, top: int, prune: bool) -> PruningQueue:
    bound = np.array(field.bound)
    if objective == "cost":
        bound = bound * [x.gpus for x in field.layouts]
    return PruningQueue(field.layouts, bound, np.array(field.needed), top, prune)


def _run(
    race: PruningQueue, layouts: list[JobPlan], price_them: Callable[[list[JobPlan]], list[float]], pool: Pool,
    objective: str, limit: int | None, tell: OnProgress, surveyed: int,
) -> bool:  # fmt: skip
    """Price until all is certain; False where the limit came first."""
    done, most = 0, limit if limit is not None else len(layouts)
    while len(now := race.next(min(max(ROUND[0], done), ROUND[1]))):
        now = now[: most - done]
        if not len(now):
            return False
        pieces = [now[i : i + PIECE] for i in range(0, len(now), PIECE)]
        found = pool.map(price_them, [[layouts[i] for i in piece] for piece in pieces])
        for piece, seconds in zip(pieces, found, strict=True):
            many = np.array([layouts[i].gpus for i in piece]) if objective == "cost" else 1
            race.value[piece] = np.array(seconds) * many
            done += len(piece)
            tell(SearchProgress("pricing", done, len(layouts), surveyed + done, float(race.value.min())))
    return True


def _found(
    space: PlanSpace,
    field: Survey,
    race: PruningQueue,
    objective: str,
    efficiency: Efficiency | None,
    complete: bool,
    begun: float,
) -> SearchResult:
    job, ranked = space.job, race.ranked()
    counts = SearchCounts(
        field.legal, field.legal - len(field.layouts), len(field.layouts) - len(ranked), len(ranked), field.smallest
    )

    def short(i: int) -> PricedPlan:
        x = field.layouts[i]
        return PricedPlan(x, float(race.value[i]) / (x.gpus if objective == "cost" else 1), field.needed[i])

    best = tuple(predict_plan(apply_plan(job, field.layouts[i]), efficiency) for i in ranked[: race.top])
    by_knob = {name: {word: short(i) for word, i in found.items()} for name, found in race.best_by_knob().items()}
    edge = tuple(short(i) for i in pareto_front(race.needed, ranked))
    own, cloud = _own(job, space.gpus, efficiency), tuple(short(i) for i in ranked)
    took = time.perf_counter() - begun
    return SearchResult(objective, best, edge, by_knob, own, counts, complete, took, efficiency, cloud)


def _own(job: Job, counted: tuple[int, ...], efficiency: Efficiency | None) -> JobResult | None:
    """The job's own plan on the GPUs searched for (of several numbers, its own), where it is legal there."""
    gpus = job.gpus if job.gpus in counted else counted[0] if len(counted) == 1 else 0
    made = replace(job, gpus=gpus)
    return predict_plan(made, efficiency) if gpus and not problems(made) else None


def _nothing(_: SearchProgress) -> None:
    pass
