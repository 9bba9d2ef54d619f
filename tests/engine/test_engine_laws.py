"""Laws of the engine, on random programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine_reference as reference
from engine_reference import Arrow, Job, Sketch
from engine_sketches import (
    ANY_SECONDS,
    DELAYS,
    GRID,
    RELEASES,
    SECONDS,
    Built,
    build,
    law,
    on_grid,
    sketches,
    with_inserted,
    with_job,
    with_jobs,
    with_one,
)
from presage.engine import Durations, Timeline, finish_times, latest_ends, simulate, timeline


def ends(sketch: Sketch) -> np.ndarray:
    built = build(sketch)
    return built.run().end[built.task]


def finish(sketch: Sketch) -> float:
    return build(sketch).run().finish


# --- the engine equals the definitions


@law()
@given(sketches())
def test_equals_the_reference(sketch: Sketch) -> None:
    built, expected = build(sketch), reference.times(sketch)
    run = built.run()
    assert run.start[built.task].tolist() == expected.start
    assert run.end[built.task].tolist() == expected.end
    assert run.ready[built.task].tolist() == expected.ready
    assert run.slack[built.task].tolist() == reference.slack(sketch)
    assert run.finish == expected.finish


@law()
@given(sketches(exact=False))
def test_equals_the_reference_off_the_grid(sketch: Sketch) -> None:
    built, expected = build(sketch), reference.times(sketch)
    run = built.run()
    assert run.start[built.task].tolist() == expected.start
    assert run.end[built.task].tolist() == expected.end
    assert run.ready[built.task].tolist() == expected.ready
    assert run.slack[built.task] == pytest.approx(reference.slack(sketch), abs=1e-9)
    assert (run.slack >= 0).all(), "slack is not negative, not even by a rounding"
    assert not run.slack[run.critical_path].any(), "slack on the critical path is zero, not nearly zero"


# --- more work takes no less time


@law()
@given(with_job(exact=False), ANY_SECONDS)
def test_a_longer_task_makes_nothing_earlier(chosen: tuple[Sketch, int], more: float) -> None:
    sketch, job = chosen
    assert (ends(with_one(sketch, job, seconds=sketch.jobs[job].seconds + more)) >= ends(sketch)).all()


@law()
@given(with_job(), SECONDS, st.data())
def test_one_more_task_makes_nothing_earlier(chosen: tuple[Sketch, int], seconds: float, data: Any) -> None:
    sketch, place = chosen
    line = data.draw(st.integers(0, len(sketch.lines) - 1))
    more = ends(with_inserted(sketch, place, Job(line, seconds, data.draw(RELEASES))))
    assert (np.delete(more, place) >= ends(sketch)).all()


@law()
@given(sketches(least=1, exact=False), st.data())
def test_shorter_tasks_make_nothing_later(sketch: Sketch, data: Any) -> None:
    n = len(sketch.jobs)
    part = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    shorter = with_jobs(sketch, seconds=[j.seconds * f for j, f in zip(sketch.jobs, part, strict=True)])
    assert (ends(shorter) <= ends(sketch)).all()


@law()
@given(sketches(least=2), DELAYS, st.booleans(), st.data())
def test_one_more_edge_makes_nothing_earlier(sketch: Sketch, delay: float, from_start: bool, data: Any) -> None:
    n = len(sketch.jobs)
    before, after = sorted(data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True)))
    if sketch.jobs[before].meeting == sketch.jobs[after].meeting is not None:
        return
    more = replace(sketch, arrows=(*sketch.arrows, Arrow(before, after, delay, from_start)))
    assert (ends(more) >= ends(sketch)).all()


@law()
@given(with_job(), RELEASES)
def test_a_later_release_makes_nothing_earlier(chosen: tuple[Sketch, int], later: float) -> None:
    sketch, job = chosen
    assert (ends(with_one(sketch, job, release=sketch.jobs[job].release + later)) >= ends(sketch)).all()


@law()
@given(sketches(exact=False))
def test_a_lane_runs_one_task_at_a_time_in_order(sketch: Sketch) -> None:
    run = build(sketch).run()
    for i, lane in enumerate(run.program.lanes):
        here = run.program.lane == i
        assert (run.start[here][1:] >= run.end[here][:-1] + lane.gap).all()


# --- waits, slack, the critical path


@law()
@given(sketches(exact=False))
def test_waits_are_never_negative_and_someone_is_last(sketch: Sketch) -> None:
    built = build(sketch)
    wait = built.run().wait[built.task]
    assert (wait >= 0).all()
    for job, member in enumerate(sketch.jobs):
        mates = sketch.mates(job)
        assert min(wait[mates]) == 0.0
        if member.meeting is None:
            assert wait[job] == 0.0


@law()
@given(with_job(), on_grid(0, 60))
def test_a_slip_beyond_the_slack_and_only_that_moves_the_finish(chosen: tuple[Sketch, int], slip: float) -> None:
    sketch, job = chosen
    built = build(sketch)
    run, task = built.run(), built.task[job]
    late = with_one(sketch, job, release=float(run.start[task] + slip))
    assert finish(late) == run.finish + max(0.0, slip - run.slack[task])


@law()
@given(sketches(least=1))
def test_the_critical_path_is_a_chain_that_sets_the_finish(sketch: Sketch) -> None:
    built = build(sketch)
    run = built.run()
    job_of = {int(t): j for j, t in enumerate(built.task)}
    path = [job_of[int(t)] for t in run.critical_path]
    start, end = run.start[built.task], run.end[built.task]
    assert end[path[-1]] == run.finish
    assert start[path[0]] == sketch.jobs[path[0]].release
    for before, after in pairwise(path):
        offers = [
            (start if a.from_start else end)[a.before] + a.delay
            for a in sketch.arrows_in(after)
            if a.before in sketch.mates(before)
        ]
        assert start[after] in offers
    assert not run.slack[run.critical_path].any()
    assert not run.wait[run.critical_path].any(), "the path takes the last member of a meeting, which waits for nobody"


def test_the_critical_path_goes_back_to_the_start_where_a_release_is_no_later_than_a_task() -> None:
    line = (reference.Line(0, reference.COMPUTE),)
    assert build(Sketch(line, (Job(0, 1.0), Job(0, 1.0, release=1.0)))).run().critical_path.tolist() == [0, 1]
    assert build(Sketch(line, (Job(0, 1.0), Job(0, 1.0, release=1.5)))).run().critical_path.tolist() == [1]


def test_the_critical_path_names_the_straggler_and_stays_on_its_lane_otherwise() -> None:
    lines = tuple(reference.Line(r, reference.COMPUTE) for r in range(2))
    even = Sketch(lines, (Job(0, 1), Job(1, 1), Job(0, 1, 0, 0), Job(1, 1, 0, 0), Job(0, 0), Job(1, 1)))
    assert build(even).run().critical_path.tolist() == [1, 3, 5]
    late = with_one(even, 0, seconds=2.0)
    assert build(late).run().critical_path.tolist() == [0, 2, 5]


# --- names and numbers of things do not matter


@law()
@given(sketches(exact=False), st.randoms(use_true_random=False))
def test_the_order_of_tasks_lanes_and_ranks_changes_nothing(sketch: Sketch, random: Any) -> None:
    places = random.sample(range(len(sketch.lines)), len(sketch.lines))
    lines = [sketch.lines[places.index(i)] for i in range(len(places))]
    ranks = random.sample(range(3), 3)
    renamed = replace(sketch, lines=tuple(replace(x, rank=ranks[x.rank]) for x in lines))
    renamed = with_jobs(
        renamed, line=[places[j.line] for j in sketch.jobs], key=[random.randrange(99) for _ in sketch.jobs]
    )
    assert (ends(renamed) == ends(sketch)).all()
    here, there = build(sketch).run(), build(renamed).run()
    assert [there.lane_use()[places[i]] for i in range(len(places))] == here.lane_use()
    for rank in range(3):
        assert there.exposed_communication(ranks[rank]) == pytest.approx(here.exposed_communication(rank), abs=1e-9)


@law()
@given(sketches(), st.randoms(use_true_random=False), st.sampled_from([1, 7, 10**6]))
def test_the_numbers_of_meetings_change_nothing(sketch: Sketch, random: Any, stride: int) -> None:
    number = random.sample(range(20), 20)
    other = [None if j.meeting is None else number[j.meeting] * stride for j in sketch.jobs]
    assert (ends(with_jobs(sketch, meeting=other)) == ends(sketch)).all()


@law()
@given(sketches(exact=False), st.floats(0.01, 100))
def test_all_times_scale_together(sketch: Sketch, c: float) -> None:
    scaled = Sketch(
        tuple(replace(x, gap=x.gap * c) for x in sketch.lines),
        tuple(replace(j, seconds=j.seconds * c, release=j.release * c) for j in sketch.jobs),
        tuple(replace(a, delay=a.delay * c) for a in sketch.arrows),
    )
    assert ends(scaled) == pytest.approx(ends(sketch) * c, rel=1e-9, abs=1e-9)


# --- draws


@st.composite
def noisy(draw: Any) -> tuple[Built, Durations]:
    """A program of which some tasks vary, and some of these share their draws."""
    built = build(draw(sketches(least=1, exact=False)))
    n, count = len(built.program), draw(st.integers(1, 9))
    rows = draw(st.integers(1, 4))
    draws = np.array(
        draw(st.lists(st.lists(ANY_SECONDS, min_size=count, max_size=count), min_size=rows, max_size=rows))
    )
    row = draw(st.lists(st.integers(-1, rows - 1), min_size=n, max_size=n))
    return built, Durations(built.durations, np.array(row, np.int32), draws)


def single(built: Built, d: Durations, j: int) -> Timeline:
    return simulate(built.program, np.where(d.row < 0, d.base, d.draws[d.row, j]))


@law()
@given(noisy())
def test_many_draws_equal_as_many_single_runs(case: tuple[Built, Durations]) -> None:
    built, d = case
    run = simulate(built.program, d)
    for j in range(d.count):
        alone = single(built, d, j)
        assert (run.start[:, j] == alone.start).all()
        assert (run.end[:, j] == alone.end).all()
        assert (run.ready[:, j] == alone.ready).all()
        assert run.finish[j] == alone.finish
        assert (run.draw(j).slack == alone.slack).all()
        assert (run.draw(j).critical_path == alone.critical_path).all()


@law()
@given(noisy(), st.integers(1, 4), st.data())
def test_finish_times_equal_the_timeline(case: tuple[Built, Durations], width: int, data: Any) -> None:
    built, d = case
    run, n = simulate(built.program, d), len(built.program)
    tasks = data.draw(st.lists(st.integers(0, n - 1), max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "WIDEST", width)  # several passes, the last one narrower
        assert (finish_times(built.program, d) == run.finish).all()
        assert (finish_times(built.program, d, tasks) == run.end[tasks]).all()


@law()
@given(noisy(), st.data())
def test_latest_ends_are_maxima_over_parts(case: tuple[Built, Durations], data: Any) -> None:
    built, d = case
    n, parts = len(built.program), data.draw(st.integers(1, 4))
    part = np.array(data.draw(st.lists(st.integers(-1, parts - 1), min_size=n, max_size=n)), np.int32)
    end = simulate(built.program, d).end
    expected = [end[part == i].max(axis=0, initial=0.0) for i in range(parts)]
    assert (latest_ends(built.program, d, part, parts) == expected).all()


@law()
@given(sketches(exact=False), st.integers(1, 5))
def test_draws_without_noise_equal_the_single_answer(sketch: Sketch, count: int) -> None:
    built = build(sketch)
    alone, table = built.run(), np.repeat(built.durations[:, None], count, axis=1)
    for durations in (table, Durations.of(built.durations, dict(enumerate(table)))):
        run = simulate(built.program, durations)
        assert (run.end == alone.end[:, None]).all()
        assert (finish_times(built.program, durations) == alone.finish).all()


@law(20)
@given(st.integers(0, 2**32 - 1))
def test_long_programs_in_wide_passes(seed: int) -> None:
    """Slots are used again many times here, and passes are as wide as they get."""
    rng = np.random.default_rng(seed)
    built, d = _long(rng, tasks=400, lanes=7), rng.random((400, 700))
    run = simulate(built.program, d)
    assert (finish_times(built.program, d) == run.finish).all()
    assert (simulate(built.program, d[:, 5]).end == run.end[:, 5]).all()
    assert built.program.slots[1] < 400


def _long(rng: np.random.Generator, tasks: int, lanes: int) -> Built:
    lines = tuple(reference.Line(i, reference.COMPUTE) for i in range(lanes))
    meets = lambda t: t // lanes if t // lanes % 5 == 0 else None  # noqa: E731
    jobs = tuple(Job(t % lanes, float(rng.random()), 0.0, meets(t), t) for t in range(tasks))
    pairs = [(int(rng.integers(max(0, a - 60), a)), a) for a in rng.integers(1, tasks, tasks).tolist()]
    apart = [(b, a) for b, a in pairs if b // lanes != a // lanes]
    arrows = [Arrow(b, a, float(rng.random()), bool(rng.random() < 0.2)) for b, a in apart]
    return build(Sketch(lines, jobs, tuple(arrows)))


def test_draws_may_lie_in_any_order_in_memory_and_be_of_any_number_type() -> None:
    built = _long(np.random.default_rng(0), tasks=50, lanes=3)
    draws = np.random.default_rng(1).integers(0, 9, (6, 50))
    for table in (draws.T, np.asfortranarray(draws.T), draws.T.astype(np.float32), draws.T.tolist()):
        assert (simulate(built.program, table).end == simulate(built.program, draws.T.astype(float)).end).all()
        d = Durations(np.zeros(50, np.float32), np.arange(50), np.asarray(table))
        assert (finish_times(built.program, d) == simulate(built.program, table).finish).all()


# --- where the time goes


@law()
@given(sketches(exact=False))
def test_lane_use_adds_up_to_the_span(sketch: Sketch) -> None:
    built = build(sketch)
    run = built.run()
    for use in run.lane_use():
        assert min(use.busy, use.wait, use.idle) >= 0
        assert use.busy + use.wait + use.idle == pytest.approx(run.finish, abs=1e-9)


@law()
@given(sketches())
def test_lane_use_counts_work_and_waits(sketch: Sketch) -> None:
    run = reference.times(sketch)
    for i, use in enumerate(build(sketch).run().lane_use()):
        here = [j for j, job in enumerate(sketch.jobs) if job.line == i]
        assert use.busy == sum(run.end[j] - run.start[j] for j in here)
        assert use.wait == sum(run.start[j] - run.ready[j] for j in here)


@law()
@given(sketches(), st.integers(0, 2))
def test_exposed_communication_equals_counting_cells(sketch: Sketch, rank: int) -> None:
    assert build(sketch).run().exposed_communication(rank) == reference.exposed(sketch, rank, GRID)
