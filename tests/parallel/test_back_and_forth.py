"""ZB-V, DualPipeV and DualPipe: bubbles and memory as published, folded steps equal to unfolded ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.configs.check import problems
from presage.configs.frameworks import framework
from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.engine import Timeline, simulate
from presage.errors import PresageError
from presage.memory import job_memory
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import pipeline_durations, pipeline_program, run_pipeline
from presage.prediction.jobs.job_prediction import predict_job
from presage.search.plan_search import search

JOB = Path(__file__).parents[2] / "examples" / "jobs" / "own_model.toml"
KINDS = ("zb-v", "dualpipev", "dualpipe")


def unfolded(schedule: Schedule, *given: Any, **named: Any) -> Timeline:
    d = pipeline_durations(schedule, *given, **named)
    program, kind = pipeline_program(schedule, d)
    return simulate(program, d.kinds(schedule.meets)[0][kind])


@pytest.fixture
def job() -> Job:
    base = read_transformer_job(JOB, checked=False)
    parallel = replace(base.parallel, tp=1, sequence_parallel=False, pp=4, virtual=1, schedule="1f1b", zero=1)
    return replace(base, gpus=8, global_batch=64, micro_batch=1, parallel=replace(parallel, fsdp=False, shard=0))


# ---- published formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("microbatches", [2, 3, 40])
def test_dualpipe_bubble_is_the_published_one(stages: int, microbatches: int) -> None:
    """arXiv 2412.19437, table 2: (PP / 2 - 1)(F&B + B - 3W), with F&B as long as both; DualPipeV has 2 PP such stages
    on PP ranks. The formula holds where the three parts take equally long."""
    f = b = w = 1.0
    each = (f + b + w) + (b + w) - 3 * w
    both = run_pipeline(Schedule.of("dualpipe", stages, microbatches * stages, 2), f, b, w)
    assert both.bubble == pytest.approx(np.full(stages, (stages / 2 - 1) * each))
    back = run_pipeline(Schedule.of("dualpipev", stages, microbatches * stages, 2), f, b, w)
    assert back.bubble == pytest.approx(np.full(stages, (stages - 1) * each))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [5, 16, 300])
def test_zb_v_has_no_bubble(stages: int, microbatches: int) -> None:
    """arXiv 2401.10241, section 6: none where F, B and W take equally long and there are 2 p microbatches, from a
    stage's first operation to its last; a stage begins as many forwards late as there are stages before it."""
    schedule = Schedule.of("zb-v", stages, max(microbatches, 2 * stages), 2)
    line = unfolded(schedule, 1.0, 1.0, 1.0)
    for stage in range(stages):
        own = np.flatnonzero(line.program.lane == stage)
        span = line.end[own].max() - line.start[own].min()
        assert span == pytest.approx(6.0 * schedule.microbatches)
        assert line.start[own].min() == stage


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_activations_are_those_published(stages: int) -> None:
    """ZB-V: as many as 1F1B's first stage, p microbatches (2 p halves); DualPipe: PP + 1 microbatches (table 2)."""
    many = 6 * stages
    assert set(Schedule.of("zb-v", stages, many, 2).in_flight) == {2 * stages}
    assert set(Schedule.of("dualpipe", stages, many, 2).in_flight) == {stages + 1}
    assert set(Schedule.of("dualpipev", stages, many, 2).in_flight) == {2 * stages + 1}


# ---- the engine ------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    kind, s = draw(st.sampled_from(KINDS)), 2 * draw(st.integers(1, 3))
    m = 2 * s + 2 * draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1.0, 0.1, 0.0]))
    f, b, w = (1.0 - spread * rng.random((s, 2)) for _ in range(3))
    send = draw(st.sampled_from([0.0, 0.05, 0.4])) * rng.random(s)
    return {"schedule": Schedule.of(kind, s, m, 2), "forward": f, "backward": b, "weight": w, "send": send,
            "overlap": draw(st.booleans())}  # fmt: skip


@given(cases())
def test_a_folded_step_equals_the_unfolded_one(case: dict[str, Any]) -> None:
    found, line = run_pipeline(**case), unfolded(**case)
    if case["overlap"]:
        assert found.total == pytest.approx(float(line.finish), rel=1e-9)
    s = case["schedule"]
    assert found.total >= found.busy.max() * (1 - 1e-12)
    assert [len(o) for o in s.order] == [3 * 2 * s.passes] * s.stages


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(PresageError, match="virtual = 2, not 1"):
        Schedule.of("zb-v", 2, 8)
    with pytest.raises(PresageError, match="3 is odd"):
        Schedule.of("dualpipe", 3, 12, 2)
    with pytest.raises(PresageError, match="half of them start at either end"):
        Schedule.of("dualpipe", 4, 9, 2)
    with pytest.raises(PresageError, match=r"microbatches >= 2 x pp \(dualpipev\): 7 is less than 2 x 4 = 8"):
        Schedule.of("dualpipev", 4, 7, 2)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def with_schedule(job: Job, kind: str, **more: Any) -> Job:
    return replace(job, parallel=replace(job.parallel, schedule=kind, virtual=2, **more))


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_runs_with_it(job: Job, kind: str) -> None:
    made, usual = predict_job(with_schedule(job, kind)), predict_job(job)
    assert problems(made.job) == []
    assert made.breakdown["bubble"] < 0.75 * usual.breakdown["bubble"]
    parts = sum(v for name, v in made.job_step.parts.items() if name != "bubble")
    assert parts == pytest.approx(sum(v for n, v in usual.job_step.parts.items() if n != "bubble"), rel=0.15)


def test_both_ends_of_the_model_are_on_the_first_stage(job: Job) -> None:
    slots = with_schedule(job, "zb-v").parallel.slots
    assert slots == ((0, 7), (1, 6), (2, 5), (3, 4))
    stages = job_memory(with_schedule(job, "zb-v")).stages
    assert stages[0].weights > stages[-1].weights


def test_dualpipe_holds_parameters_twice(job: Job) -> None:
    one, two = (job_memory(x).stages for x in (job, with_schedule(job, "dualpipe")))
    assert sum(s.weights for s in two) == pytest.approx(2 * sum(s.weights for s in one), rel=1e-6)
    assert two[0].microbatches == 5 and one[0].microbatches == 4


def test_layers_by_hand_are_by_place_in_the_model(job: Job) -> None:
    layers = job.model.layers
    by_hand = (layers - 7, *[1] * 7)
    made = with_schedule(job, "dualpipev", layers_as=by_hand)
    assert problems(made) == []
    assert made.stage_layers()[0] == (layers - 7, 1)
    assert predict_job(made).seconds > predict_job(with_schedule(job, "dualpipev")).seconds


def test_too_few_microbatches_are_a_problem_of_the_job(job: Job) -> None:
    few = replace(with_schedule(job, "dualpipev"), global_batch=8)
    assert any("microbatches >= 2 x pp (dualpipev)" in p for p in problems(few))


def test_a_search_tries_it_where_it_is_named(job: Job) -> None:
    found = search(job, 8, keep={"schedule": frozenset({"zb-v"}), "pp": frozenset({"4"})}, top=3)
    assert found.best and all(p.job.parallel.schedule == "zb-v" for p in found.best)
    four = {"pp": frozenset({"4"})}
    for key, has in (("torchtitan", {"zb-v", "dualpipev"}), ("megatron-core", set())):
        best = search(replace(job, framework=framework(key)), 8, keep=four, top=200).best
        assert {p.job.parallel.schedule for p in best} & set(KINDS) == has
