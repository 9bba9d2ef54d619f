"""A schedule that nobody knew, registered in one place, runs wherever the others do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.configs.check import problems
from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.engine import simulate
from presage.errors import PresageError
from presage.parallel.orders import UNIT, Extent, Ints
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import pipeline_program, run_pipeline
from presage.parallel.schedules import SCHEDULES, ScheduleKind, by_turn
from presage.prediction.jobs.job_detail import job_timeline
from presage.prediction.jobs.job_prediction import predict_job

JOB = Path(__file__).parents[2] / "examples" / "jobs" / "own_model.toml"


def eager(stage: Ints, turn: Ints, extent: Extent) -> tuple[Ints, Ints]:
    """1F1B with as many forwards more ahead as there are stages."""
    return UNIT * (stage + 2 * turn), UNIT * (4 * extent.stages - 1 - stage + 2 * turn)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that a new schedule needs."""
    monkeypatch.setitem(
        SCHEDULES, "eager-1f1b", ScheduleKind("eager-1f1b", "more forwards ahead", by_turn(eager), ahead=2)
    )
    yield
    Schedule.of.cache_clear()


@pytest.fixture
def job() -> Job:
    base = read_transformer_job(JOB, checked=False)
    parallel = replace(base.parallel, tp=1, sequence_parallel=False, pp=4, virtual=1, schedule="eager-1f1b", zero=1)
    return replace(base, gpus=8, global_batch=256, micro_batch=1, parallel=replace(parallel, fsdp=False, shard=0))


def test_a_new_schedule_is_checked_and_predicted(job: Job) -> None:
    assert problems(job) == []
    usual = predict_job(replace(job, parallel=replace(job.parallel, schedule="1f1b")))
    assert predict_job(job).seconds == pytest.approx(usual.seconds, rel=0.2)
    assert f"({job.parallel.schedule})" not in str(usual.job.parallel)


def test_a_new_schedule_runs_through_the_engine(job: Job) -> None:
    step = predict_job(job).job_step
    line = job_timeline(step)
    tail = sum(step.parts.get(part, 0.0) for part in ("dp", "optimizer"))
    assert float(np.max(line.finish)) == pytest.approx(step.pipeline.total + tail, rel=1e-9)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 7), (4, 64), (5, 300)])
def test_its_folded_step_equals_the_unfolded_program(stages: int, microbatches: int) -> None:
    forward = np.linspace(1.0, 1.5, stages)
    found = run_pipeline(Schedule.of("eager-1f1b", stages, microbatches), forward, 2 * forward, send=0.01)
    program, kind = pipeline_program(found.schedule, found.durations)
    assert found.total == pytest.approx(float(simulate(program, found.durations.kinds(False)[0][kind]).finish))
    assert found.schedule.in_flight.tolist() == [min(microbatches, 2 * stages - k) for k in range(stages)]


def test_a_warm_up_that_is_longer_than_declared_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "undeclared", ScheduleKind("undeclared", "", by_turn(eager)))
    forward = np.linspace(1.0, 1.5, 5)
    declared, silent = (run_pipeline(Schedule.of(k, 5, 300), forward, forward) for k in ("eager-1f1b", "undeclared"))
    assert declared.total == pytest.approx(silent.total)


def test_a_schedule_nobody_registered_is_named(job: Job) -> None:
    wrong = replace(job, parallel=replace(job.parallel, schedule="eager"))
    assert any(
        "choose from 1f1b, interleaved, gpipe, zero-bubble, zb-v, dualpipev, dualpipe, eager-1f1b" in p
        for p in problems(wrong)
    )
    with pytest.raises(PresageError, match="no pipeline schedule 'eager'"):
        Schedule.of("eager", 2, 2)
