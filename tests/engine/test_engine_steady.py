"""Steady state: many copies of a step, and the seconds each adds in the long run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_reference import COMPUTE, HOST, Arrow, Job, Line, Sketch, copies, rate, step_ends, times
from engine_sketches import DELAYS, GRID, build, edges, law, on_grid, sketches
from presage.engine import Builder, Durations, Edges, LaneKind, period, repeat, simulate


@st.composite
def cycles(draw: Any, nodes: int = 6) -> tuple[Sketch, tuple[Arrow, ...]]:
    """A step, and arrows from it into the next one."""
    sketch = draw(sketches(nodes=nodes, least=1))
    n, random = len(sketch.jobs), draw(st.randoms(use_true_random=False))
    arrow = st.builds(Arrow, st.integers(0, n - 1), st.integers(0, n - 1), DELAYS, st.booleans())
    late_to_early = Arrow(random.randrange(n // 2, n), random.randrange(0, (n + 1) // 2), random.randrange(20) * GRID)
    return sketch, tuple(draw(st.sampled_from([[], [late_to_early]])) + draw(st.lists(arrow, max_size=3)))


@law()
@given(cycles(), st.integers(0, 5))
def test_repeat_equals_the_reference(case: tuple[Sketch, tuple[Arrow, ...]], steps: int) -> None:
    sketch, carried = case
    built, expected = build(sketch), times(copies(sketch, steps, carried))
    many = repeat(built.program, steps, edges(carried, built.task))
    run = simulate(many, Durations.of(built.durations).repeated(steps))
    task = np.concatenate([built.task + k * len(built.task) for k in range(steps)] or [[]]).astype(int)
    assert run.start[task].tolist() == expected.start
    assert run.end[task].tolist() == expected.end


@law()
@given(cycles(), st.integers(2, 9))
def test_period_is_the_slope_of_the_second_half(case: tuple[Sketch, tuple[Arrow, ...]], steps: int) -> None:
    sketch, carried = case
    built, done, half = build(sketch), step_ends(sketch, steps, carried), steps // 2
    slope = (done[-1] - done[half - 1]) / (steps - half)
    assert period(built.program, built.durations, edges(carried, built.task), steps).tolist() == [slope]


@law(30)
@given(cycles(nodes=4))
def test_period_tends_to_the_long_run_rate(case: tuple[Sketch, tuple[Arrow, ...]]) -> None:
    """After k steps all is done by rate * k, give or take what a single step can hold: so slopes differ by 1/k."""
    sketch, carried = case
    built, steps = build(sketch), 1000
    holds = sum(j.seconds + j.release for j in sketch.jobs) + sum(abs(a.delay) for a in (*sketch.arrows, *carried))
    slope = float(period(built.program, built.durations, edges(carried, built.task), steps)[0])
    assert slope == pytest.approx(rate(sketch, carried), abs=4 * (holds + 1) / steps)


@law()
@given(cycles(), st.integers(2, 5), st.integers(1, 4), st.data())
def test_periods_of_draws_equal_single_periods(
    case: tuple[Sketch, tuple[Arrow, ...]], steps: int, count: int, data: Any
) -> None:
    sketch, carried = case
    built = build(sketch)
    factor = np.array(data.draw(st.lists(on_grid(0, 16), min_size=count, max_size=count)))
    table, links = built.durations[:, None] * factor, edges(carried, built.task)
    each = [float(period(built.program, table[:, j].copy(), links, steps)[0]) for j in range(count)]
    assert period(built.program, table, links, steps).tolist() == each


def launches(host: float, gpu: float, kernels: int) -> Sketch:
    """A host that launches kernels one by one, each of which runs on the GPU once launched."""
    lines = (Line(0, HOST), Line(0, COMPUTE))
    jobs = [Job(side, seconds, key=2 * k + side) for k in range(kernels) for side, seconds in ((0, host), (1, gpu))]
    return Sketch(lines, tuple(jobs), tuple(Arrow(2 * k, 2 * k + 1) for k in range(kernels)))


@law()
@given(on_grid(1, 40), on_grid(1, 40), st.integers(1, 6))
def test_the_slower_of_host_and_gpu_sets_the_period(host: float, gpu: float, kernels: int) -> None:
    built = build(launches(host, gpu, kernels))
    assert period(built.program, built.durations).tolist() == [kernels * max(host, gpu)]


@law()
@given(on_grid(1, 40), on_grid(1, 40), st.integers(1, 6))
def test_a_host_that_waits_for_the_gpu_every_step_pays_for_both(host: float, gpu: float, kernels: int) -> None:
    built = build(launches(host, gpu, kernels))
    step = built.run().finish
    waits = Edges.of(built.task[-1], built.task[0])
    assert period(built.program, built.durations, waits).tolist() == [step]
    assert step == host + max(host, gpu) * (kernels - 1) + gpu


def test_ranks_that_meet_go_at_the_pace_of_the_slowest_draw() -> None:
    b = Builder()
    lanes = [b.lane(f"rank {r}", r) for r in range(3)]
    work = [b.task(lane, 1.0, "work") for lane in lanes]
    b.meet([b.task(lane, 0.5, "all-reduce") for lane in lanes])
    draws = np.random.default_rng(0).random((3, 50))
    d = Durations.of(b.durations, dict(zip(work, draws, strict=True)))
    assert period(b.build(), d) == pytest.approx(draws.max(axis=0) + 0.5)


def test_a_repeated_step_keeps_names_lanes_and_ranks() -> None:
    b = Builder()
    b.task(b.lane("host", 3, LaneKind.HOST), 1.0, "launch", release=2.0)
    many = repeat(b.build(), 3)
    assert [many.label(t) for t in range(3)] == ["launch"] * 3
    assert many.rank.tolist() == [3, 3, 3]
    assert many.release.tolist() == [2.0, 0.0, 0.0]
