"""Answers about jobs to make pages of, each worked out once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from presage.costs.lookups.table import draw_task
from presage.embeddings.sharding_plan import ShardingProblem
from presage.embeddings.sharding_search import ShardingResult as Sharded
from presage.embeddings.sharding_search import search as search_shards
from presage.hardware import platform
from presage.prediction.draws import step_distribution, step_model, without_fitted_stragglers
from presage.prediction.draws.distribution import StepDistribution, belief_of
from presage.prediction.draws.sensitivity import Sensitivity, sensitivity
from presage.prediction.jobs.job_prediction import JobResult, predict_job
from presage.runs.failures import DAY
from presage.runs.whole import RunResult, predict_run
from presage.search import SearchResult, parse_keep, search

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
LARGE, SMALL = JOBS / "llama3.1-405b.toml", JOBS / "own_model.toml"


@cache
def job() -> JobResult:
    return predict_job(LARGE)


@cache
def surely() -> StepDistribution:
    p = job()
    belief, source = belief_of(p.job, p.seconds)
    return replace(step_distribution(step_model(p.job, p.job_step), belief, 0, 400, intervals=False), source=source)


@cache
def plans() -> SearchResult:
    return search(predict_job(SMALL).job, 16, keep=parse_keep(["tp=2,cp=1,virtual=1"]), top=4)


@cache
def whole() -> RunResult:
    return predict_run(job(), 100_000, draws=60, deadline=6.5 * DAY)


@cache
def shards() -> tuple[ShardingProblem, Sharded]:
    h200 = platform("dgx-h200")
    tables = draw_task(4, float(h200.gpu.memory), np.random.default_rng(0))[:24]
    problem = ShardingProblem(tables, 16384, 4, h200, 0.0, "rowwise_adagrad", "fixed")
    return problem, search_shards(problem, seconds=30.0, rounds=40, kicks=2)


@cache
def moves() -> Sensitivity:
    shape = step_model(predict_job(SMALL).job)
    belief, _ = belief_of(shape.job, shape.seconds)
    return sensitivity(without_fitted_stragglers(shape, belief.noise), belief.noise, 0, 100)
