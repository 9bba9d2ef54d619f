"""`search(job, gpus) -> SearchResult`: all legal layouts of a job, those that fit in memory, and the best of them.

First every layout is surveyed: does it fit, and what does its step take at least? Then layouts are priced in rounds,
those with the least bounds first, until none that is left could matter (see `PruningQueue`). The rounds are the same
however many workers there are, and so is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.check import check, problems
from presage.configs.job import Job
from presage.errors import PresageError, near
from presage.memory.job_memory import plans_needed
from presage.noise.model import NoiseModel
from presage.noise.sampling import Estimate
from presage.pool import SERIAL, THREADS_2, Pool, open_pool
from presage.prediction.draws import DrawRequest, draw_all, step_model, without_fitted_stragglers
from presage.prediction.draws.distribution import belief_of
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.plan_bounds import plan_lower_bounds
from presage.search.plan_space import Keep, PlanFamily, PlanGrid, PlanSpace
from presage.search.plans import KNOBS, JobPlan, apply_plan
from presage.search.search_result import (
    OnProgress,
    PricedPlan,
    SearchCounts,
    SearchProgress,
    SearchResult,
    StopSearch,
    predict_plan,
)

OBJECTIVES = ("mean", "cost", "p95")
ROUND = 128  # layouts that are priced before others are set aside anew
PIECE = 16  # of them in one piece of work
FAMILIES = 8  # in one piece of work
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    """The best layouts of a job on a number of GPUs, or on the best of several numbers.

    The best has the shortest step (`mean`), the fewest GPU-seconds per step (`cost`), or the shortest p95 step time
    (`p95`: of the `CANDIDATES` with the shortest steps, with `noise` and `seed` as in `presage job`). The work runs in
    `workers` processes or on a `ray` cluster. `keep` fixes knobs: {"tp": {"8"}}. At most `limit` layouts are evaluated;
    without `prune` all that fit.
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
        field = Field(space, families, _surveyed(space, families, efficiency, pool, tell or _nothing))
        race = _race(field, objective, max(top, CANDIDATES) if surely else top, prune)
        one = partial(price_plans, job, efficiency)
        priced = _run(race, field, one, pool, objective, limit, tell or _nothing)
        found = _found(field, race, objective, efficiency, field.survey.complete and priced, begun)
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
    parts, done, legal = [Survey.nothing()], 0, 0
    pieces = [families[i : i + FAMILIES] for i in range(0, len(families), FAMILIES)]
    for piece, part in zip(pieces, pool.map(partial(survey_families, space, efficiency), pieces), strict=True):
        parts.append(part._replace(family=part.family + done))  # arrays of another process may be read-only
        done, legal = done + len(piece), legal + part.legal
        try:
            tell(SearchProgress("surveying", done, len(families), legal, float("inf")))
        except StopSearch:
            return Survey.joined(parts)._replace(complete=False)
    return Survey.joined(parts)


@dataclass(frozen=True)
class Field:
    """The plans of a survey, made where they are asked for."""

    space: PlanSpace
    families: Sequence[PlanFamily]
    survey: Survey

    @cached_property
    def grids(self) -> dict[int, PlanGrid]:
        return {i: self.space.grid(self.families[i]) for i in dict.fromkeys(self.survey.family.tolist())}

    def plan(self, i: int) -> JobPlan:
        return self.grids[int(self.survey.family[i])].plan(int(self.survey.place[i]))

    def gpus(self) -> Ints:
        return np.array([f.gpus for f in self.families])[self.survey.family]

    def words(self) -> dict[str, tuple[list[str], Ints]]:
        """By knob, the words there are, and the number of each plan's."""
        numbers: dict[str, dict[str, int]] = {name: {} for name in COMPARED}
        codes = {name: np.empty(len(self.survey.family), np.int64) for name in COMPARED}
        begin = np.searchsorted(self.survey.family, [*self.grids, len(self.families)]).tolist()
        for grid, start, end in zip(self.grids.values(), begin, begin[1:], strict=False):
            at = np.unravel_index(self.survey.place[start:end], grid.shape)
            for name, known in numbers.items():
                axis, words = grid.words(name)
                own = np.array([known.setdefault(word, len(known)) for word in words])
                codes[name][start:end] = own[at[axis]]
        return {name: (list(known), codes[name]) for name, known in numbers.items()}


def _race(field: Field, objective: str, top: int, prune: bool) -> PruningQueue:
    bound = field.survey.bound * (field.gpus() if objective == "cost" else 1)
    return PruningQueue(field.words(), bound, field.survey.needed, top, prune)


def _run(
    race: PruningQueue, field: Field, price_them: Callable[[list[JobPlan]], list[float]], pool: Pool,
    objective: str, limit: int | None, tell: OnProgress,
) -> bool:  # fmt: skip
    """Price until all is certain; False where the limit came first."""
    total, gpus = len(race.value), field.gpus() if objective == "cost" else np.ones(len(race.value))
    done, most = 0, limit if limit is not None else total
    while len(now := race.next(ROUND)):
        now = now[: most - done]
        if not len(now):
            return False
        pieces = [now[i : i + PIECE] for i in range(0, len(now), PIECE)]
        found = pool.map(price_them, [[field.plan(i) for i in piece] for piece in pieces])
        for piece, seconds in zip(pieces, found, strict=True):
            race.value[piece] = np.array(seconds) * gpus[piece]
            done += len(piece)
            try:
                tell(SearchProgress("pricing", done, total, field.survey.legal + done, float(race.value.min())))
            except StopSearch:
                return False
    return True


def _found(
    field: Field, race: PruningQueue, objective: str, efficiency: Efficiency | None, complete: bool, begun: float
) -> SearchResult:
    job, survey, ranked = field.space.job, field.survey, race.ranked()
    fit = len(survey.needed)
    counts = SearchCounts(survey.legal, survey.legal - fit, fit - len(ranked), len(ranked), survey.smallest)

    def short(i: int) -> PricedPlan:
        x = field.plan(i)
        return PricedPlan(x, float(race.value[i]) / (x.gpus if objective == "cost" else 1), float(survey.needed[i]))

    best = tuple(predict_plan(apply_plan(job, field.plan(i)), efficiency) for i in ranked[: race.top])
    by_knob = {name: {word: short(i) for word, i in found.items()} for name, found in race.best_by_knob().items()}
    edge = tuple(short(i) for i in pareto_front(race.needed, ranked))
    own, cloud = _own(job, field.space.gpus, efficiency), tuple(short(i) for i in ranked)
    took = time.perf_counter() - begun
    return SearchResult(objective, best, edge, by_knob, own, counts, complete, took, efficiency, cloud)


def _own(job: Job, counted: tuple[int, ...], efficiency: Efficiency | None) -> JobResult | None:
    """The job's own plan on the GPUs searched for (of several numbers, its own), where it is legal there."""
    gpus = job.gpus if job.gpus in counted else counted[0] if len(counted) == 1 else 0
    made = replace(job, gpus=gpus)
    return predict_plan(made, efficiency) if gpus and not problems(made) else None


def _nothing(_: SearchProgress) -> None:
    pass


# ---- PruningQueue: which layouts must still be priced before the best ones are certain.

COMPARED = tuple(name for name in KNOBS if name not in ("dp", "zero"))


class PruningQueue:
    """Arrays over all layouts that fit. `value` is what is sought to be small; infinite until it is known."""

    def __init__(
        self, words: dict[str, tuple[list[str], Ints]], bound: Floats, needed: Floats, top: int, prune: bool
    ) -> None:
        self.words, self.bound, self.needed, self.top, self.prune = words, bound, needed, top, prune
        self.value = np.full(len(bound), np.inf)
        self.left = np.argsort(bound, kind="stable")  # that may still matter, those with the least bounds first

    def next(self, most: int) -> Ints:
        """The next to be priced; none when all is certain."""
        known = np.flatnonzero(np.isfinite(self.value))
        if self.prune and len(known):
            self.left = self.left[~self._aside(self.left, known)]
        now, self.left = self.left[:most], self.left[most:]
        return now

    def _aside(self, of: Ints, known: Ints) -> NDArray[np.bool_]:
        bound, value = self.bound[of], self.value[known]
        aside = bound > (np.partition(value, self.top - 1)[self.top - 1] if len(value) >= self.top else np.inf)
        for words, codes in self.words.values():
            best = np.full(len(words), np.inf)
            np.minimum.at(best, codes[known], value)
            aside &= bound > best[codes[of]]
        return np.asarray(aside & (bound > self._least_within(self.needed[of], known)))

    def _least_within(self, memory: Floats, known: Ints) -> Floats:
        """The least value known of layouts that need no more memory."""
        order = known[np.argsort(self.needed[known], kind="stable")]
        least = np.append(np.inf, np.minimum.accumulate(self.value[order]))
        return np.asarray(least[np.searchsorted(self.needed[order], memory, side="right")])

    def ranked(self) -> Ints:
        """The priced ones, best first; of equals the one that needs less memory, then the one made first."""
        known = np.flatnonzero(np.isfinite(self.value))
        return np.asarray(known[np.lexsort((known, self.needed[known], self.value[known]))])

    def best_by_knob(self) -> dict[str, dict[str, int]]:
        """The best plan's number for each word of each knob; the best words first."""
        ranked = self.ranked()
        out: dict[str, dict[str, int]] = {}
        for name, (words, codes) in self.words.items():
            firsts, at = np.unique(codes[ranked], return_index=True)
            order = np.argsort(at, kind="stable")
            out[name] = {words[c]: int(ranked[i]) for c, i in zip(firsts[order], at[order], strict=True)}
        return out


def pareto_front(needed: Floats, ranked: Ints) -> list[int]:
    """Those of the ranked plans that no other beats in both time and memory, the fastest first."""
    out: list[int] = []
    for i in ranked.tolist():
        if not out or needed[i] < needed[out[-1]]:
            out.append(i)
    return out


# ---- rank the plans with the shortest mean steps by p95

CANDIDATES = 24  # plans that are drawn
DRAWS = 4_000


def rank_by_p95(
    found: SearchResult, noise: str | None, seed: int, top: int, begun: float, tell: OnProgress, pool: Pool
) -> SearchResult:
    """The plans found, ranked anew, and each one's p95: all with the same random numbers."""
    if not found.best:
        return found
    belief, source = belief_of(found.best[0].job, found.best[0].seconds, noise)
    plans, late = [*found.best, *([found.own] if found.own else [])], dict[int, Estimate]()
    asked = [_draw_request(p, belief.noise, found) for p in plans]
    for i, draws in draw_all(asked, seed, THREADS_2 if pool == SERIAL else pool):
        late[i] = draws.p95
        tell(SearchProgress("drawing", len(late), len(plans), found.counts.legal, min(e.value for e in late.values())))
    order = sorted(range(len(found.best)), key=lambda i: late[i].value)[:top]
    best, chosen = tuple(found.best[i] for i in order), [late[i] for i in order]
    own = [late[i] for i in range(len(found.best), len(plans))]
    took = time.perf_counter() - begun
    return replace(found, best=best, late=(*chosen, *own), noise=source, took=took)


def _draw_request(p: JobResult, noise: NoiseModel, found: SearchResult) -> DrawRequest:
    return DrawRequest(without_fitted_stragglers(step_model(p.job, p.job_step, found.efficiency), noise), noise, DRAWS)


# ---- What layouts need and take: pure functions of a job and a few layouts, to be run anywhere.


class Survey(NamedTuple):
    """Plans of some families: how many are legal, and those that fit."""

    legal: int
    smallest: float  # bytes that the most frugal of all legal ones needs
    family: Ints  # of each that fits: the number of its family
    place: Ints  # and its place in that family's grid
    needed: Floats  # bytes
    bound: Floats  # seconds: no step takes less
    complete: bool = True  # whether all families were looked at

    @staticmethod
    def nothing() -> Survey:
        none = np.empty(0, np.int64)
        return Survey(0, float("inf"), none, none, np.empty(0), np.empty(0))

    @staticmethod
    def joined(parts: Sequence[Survey]) -> Survey:
        legal, smallest = sum(p.legal for p in parts), min(p.smallest for p in parts)
        family, place, needed, bound = (np.concatenate(each) for each in list(zip(*parts, strict=True))[2:6])
        return Survey(legal, smallest, family, place, needed, bound)


def survey_families(space: PlanSpace, efficiency: Efficiency | None, families: Sequence[PlanFamily]) -> Survey:
    """All layouts of families: which fit, and what their steps take at least."""
    job, memory, parts = _same(space.job), float(space.job.platform.gpu.memory), [Survey.nothing()]
    for number, f in enumerate(families):
        grid = space.grid(f)
        made, rest = job.changed(gpus=f.gpus, parallel=f.parallel), grid[1:4]
        if not grid.legal:
            continue
        legal = np.broadcast_to(grid.allowed[:, :, None, None], grid.shape)
        needed = np.where(legal, plans_needed(made, f.sizes, *rest), np.inf)
        fits = np.flatnonzero(needed <= memory)
        sizes = int(fits[-1]) // needed[0].size + 1 if len(fits) else 0  # beyond which nothing fits
        bound = plan_lower_bounds(made, f.sizes[:sizes], *rest, efficiency).ravel()[fits] if sizes else np.empty(0)
        own = np.full(len(fits), number)
        parts.append(Survey(grid.legal, float(needed.min()), own, fits, needed.ravel()[fits], bound))
    return Survey.joined(parts)


def price_plans(job: Job, efficiency: Efficiency | None, layouts: Sequence[JobPlan]) -> list[float]:
    """Seconds of a step of each plan."""
    job = _same(job)
    return [float(job_step(apply_plan(job, x), efficiency).seconds) for x in layouts]


@lru_cache(8)
def _same(job: Job) -> Job:
    """The first job that equals this one: copies that come from elsewhere are slower to look up things by."""
    return job
