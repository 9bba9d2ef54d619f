"""Of the plans with the shortest steps, those whose steps are surely short: ranked by what 19 of 20 take at most."""

from __future__ import annotations

import time
from dataclasses import replace

from presage.noise.model import NoiseModel
from presage.noise.sampling import Estimate
from presage.pool import SERIAL, THREADS_2, Pool
from presage.prediction.draws import DrawRequest, draw_all, step_model, without_fitted_stragglers
from presage.prediction.draws.distribution import belief_of
from presage.prediction.jobs.job_prediction import JobResult
from presage.search.search_result import OnProgress, SearchProgress, SearchResult

__all__ = ["CANDIDATES", "rank_by_p95"]

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
    asked = [_asked(p, belief.noise, found) for p in plans]
    for i, draws in draw_all(asked, seed, THREADS_2 if pool == SERIAL else pool):
        late[i] = draws.p95
        tell(SearchProgress("drawing", len(late), len(plans), found.counts.legal, min(e.value for e in late.values())))
    order = sorted(range(len(found.best)), key=lambda i: late[i].value)[:top]
    best, chosen = tuple(found.best[i] for i in order), [late[i] for i in order]
    own = [late[i] for i in range(len(found.best), len(plans))]
    took = time.perf_counter() - begun
    return replace(found, best=best, late=(*chosen, *own), noise=source, took=took)


def _asked(p: JobResult, noise: NoiseModel, found: SearchResult) -> DrawRequest:
    return DrawRequest(without_fitted_stragglers(step_model(p.job, p.job_step, found.efficiency), noise), noise, DRAWS)
