"""Answers about jobs to make pages of, each worked out once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from presage.hardware import platform
from presage.jobs.draws import calmed, guarantee, shape_of
from presage.jobs.draws.sensitivity import Sensitivity, sensitivity
from presage.jobs.draws.sure import Sure, belief_of
from presage.jobs.predict import JobPrediction, predict_job
from presage.plan.layouts import Found, parse_keep, search
from presage.plan.problem import Problem
from presage.plan.search import Found as Sharded
from presage.plan.search import search as search_shards
from presage.plan.tasks import draw_task
from presage.runs.failures import DAY
from presage.runs.whole import RunPrediction, predict_run

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
LARGE, SMALL = JOBS / "llama3.1-405b.toml", JOBS / "own_model.toml"


@cache
def job() -> JobPrediction:
    return predict_job(LARGE)


@cache
def surely() -> Sure:
    p = job()
    belief, source = belief_of(p.job, p.seconds)
    return Sure(guarantee(shape_of(p.job, p.step), belief, 0, 400, sets=0), belief, source, 0)


@cache
def plans() -> Found:
    return search(predict_job(SMALL).job, 16, keep=parse_keep(["tp=2,cp=1,virtual=1"]), top=4)


@cache
def whole() -> RunPrediction:
    return predict_run(job(), 100_000, draws=60, deadline=6.5 * DAY)


@cache
def shards() -> tuple[Problem, Sharded]:
    h200 = platform("dgx-h200")
    tables = draw_task(4, float(h200.gpu.memory), np.random.default_rng(0))[:24]
    problem = Problem(tables, 16384, 4, h200, 0.0, "rowwise_adagrad", "fixed")
    return problem, search_shards(problem, seconds=30.0, rounds=40, kicks=2)


@cache
def moves() -> Sensitivity:
    shape = shape_of(predict_job(SMALL).job)
    belief, _ = belief_of(shape.job, shape.seconds)
    return sensitivity(calmed(shape, belief.noise), belief.noise, 0, 100)
