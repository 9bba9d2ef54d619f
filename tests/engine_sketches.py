"""Random sketches, and a sketch as the engine's Program. Times lie on a grid of 1/8 s, so sums of them are exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from engine_reference import COMMUNICATION, COMPUTE, HOST, Arrow, Job, Line, Sketch
from presage.engine import Edges, Lane, LaneKind, Program, Timeline, simulate

GRID = 1 / 8


def law(examples: int | None = None) -> settings:
    """As many examples as other tests try, or fewer, however long one takes to draw."""
    usual = settings(suppress_health_check=[HealthCheck.too_slow])
    return usual if examples is None else settings(usual, max_examples=examples)


def on_grid(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda x: x * GRID)


SECONDS = on_grid(0, 24)
DELAYS = st.one_of(st.just(0.0), on_grid(-6, 16))
RELEASES = st.one_of(st.just(0.0), on_grid(0, 40))
LINES = st.builds(
    Line,
    st.integers(0, 2),
    st.sampled_from([HOST, COMPUTE, COMMUNICATION]),
    st.sampled_from([0.0, 0.0, GRID, 4 * GRID]),
)


ANY_SECONDS = st.floats(0, 1e3, allow_subnormal=False)


def sketches(nodes: int = 10, least: int = 0, exact: bool = True) -> st.SearchStrategy[Sketch]:
    """Small ones that shrink well, and full ones in which most things matter."""
    full = st.integers(0, 2**32).map(lambda seed: full_sketch(Random(seed), max(nodes, least), exact))
    return st.one_of(small_sketches(nodes, least, SECONDS if exact else ANY_SECONDS), full, full)


@st.composite
def small_sketches(draw: Any, nodes: int, least: int, seconds: st.SearchStrategy[float]) -> Sketch:
    """Some lanes, and on them single tasks and meetings, joined by arrows that lead forward."""
    lines = draw(st.lists(LINES, min_size=1, max_size=5))
    jobs: list[Job] = []
    for k in range(draw(st.integers(least, nodes))):
        where = draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=4, unique=True))
        meeting = k if len(where) > 1 or draw(st.booleans()) else None
        jobs += [Job(i, draw(seconds), draw(RELEASES), meeting, draw(st.integers(0, 99))) for i in where]
    pairs = draw(st.lists(st.tuples(*[st.integers(0, max(len(jobs) - 1, 0))] * 2), max_size=12)) if jobs else []
    arrows = [Arrow(*sorted(pair), draw(DELAYS), draw(st.booleans())) for pair in pairs]
    return Sketch(tuple(lines), tuple(jobs), tuple(a for a in arrows if not_mates(jobs, a)))


def full_sketch(random: Random, nodes: int, exact: bool) -> Sketch:
    def seconds(high: int) -> float:
        return random.randint(0, high) * GRID if exact else random.uniform(0, high * GRID)

    kinds, gaps = [HOST, COMPUTE, COMMUNICATION], [0.0, 0.0, GRID]
    lanes = range(random.randint(2, 6))
    lines = [Line(random.randrange(3), random.choice(kinds), random.choice(gaps)) for _ in lanes]
    jobs: list[Job] = []
    for k in range(random.randint(nodes // 2 + 1, nodes)):
        where = random.sample(range(len(lines)), random.choice([1, 1, 1, 2, len(lines)]))
        meeting = k if len(where) > 1 else None
        release = seconds(40) if random.random() < 0.2 else 0.0
        jobs += [Job(i, seconds(24), release, meeting, random.randrange(99)) for i in where]
    arrows = [random_arrow(random, len(jobs), seconds(12)) for _ in range(random.randint(1, 2 * len(jobs)))]
    return Sketch(tuple(lines), tuple(jobs), tuple(a for a in arrows if not_mates(jobs, a)))


def random_arrow(random: Random, jobs: int, delay: float) -> Arrow:
    before, after = sorted([random.randrange(jobs), random.randrange(jobs)])
    return Arrow(before, after, random.choice([0.0, delay, delay, -delay]), random.random() < 0.3)


def not_mates(jobs: list[Job], arrow: Arrow) -> bool:
    before, after = jobs[arrow.before], jobs[arrow.after]
    return arrow.before != arrow.after and (before.meeting is None or before.meeting != after.meeting)


@st.composite
def with_job(draw: Any, **options: Any) -> tuple[Sketch, int]:
    """A sketch and one of its jobs."""
    sketch = draw(sketches(least=1, **options))
    return sketch, draw(st.integers(0, len(sketch.jobs) - 1))


@dataclass(frozen=True)
class Built:
    """A sketch's Program; `task[j]` is what the engine calls job j."""

    program: Program
    durations: np.ndarray
    task: np.ndarray

    def run(self) -> Timeline:
        return simulate(self.program, self.durations)


def task_numbers(sketch: Sketch) -> list[int]:
    """Numbers shuffled by the jobs' keys, but rising along each lane, as the engine takes lanes' order from them."""
    by_key = sorted(range(len(sketch.jobs)), key=lambda j: (sketch.jobs[j].key, j))
    number = {j: t for t, j in enumerate(by_key)}
    for line in range(len(sketch.lines)):
        here = [j for j, job in enumerate(sketch.jobs) if job.line == line]
        number.update(zip(here, sorted(number[j] for j in here), strict=True))
    return [number[j] for j in range(len(sketch.jobs))]


def build(sketch: Sketch) -> Built:
    task = np.array(task_numbers(sketch), int)
    jobs = [sketch.jobs[j] for j in np.argsort(task)]
    lanes = [Lane(f"lane {i}", x.rank, LaneKind(x.kind), x.gap) for i, x in enumerate(sketch.lines)]
    program = Program.of(
        lanes,
        [j.line for j in jobs],
        edges(sketch.arrows, task),
        group=[-1 if j.meeting is None else j.meeting for j in jobs],
        release=[j.release for j in jobs],
    )
    return Built(program, np.array([j.seconds for j in jobs], float), task)


def edges(arrows: tuple[Arrow, ...], task: np.ndarray) -> Edges:
    columns = [(int(task[a.before]), int(task[a.after]), a.delay, a.from_start) for a in arrows]
    return Edges.of(*map(list, zip(*columns, strict=True))) if columns else Edges.none()


def with_jobs(sketch: Sketch, **columns: list[Any]) -> Sketch:
    """Every job with other values of some fields."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return replace(sketch, jobs=tuple(replace(j, **row) for j, row in zip(sketch.jobs, rows, strict=True)))


def with_one(sketch: Sketch, job: int, **fields: Any) -> Sketch:
    changed = replace(sketch.jobs[job], **fields)
    return replace(sketch, jobs=(*sketch.jobs[:job], changed, *sketch.jobs[job + 1 :]))


def with_inserted(sketch: Sketch, place: int, job: Job) -> Sketch:
    """One job more, on its lane before those that stood at `place` or later."""
    moved = [
        replace(a, before=a.before + (a.before >= place), after=a.after + (a.after >= place)) for a in sketch.arrows
    ]
    return replace(sketch, jobs=(*sketch.jobs[:place], job, *sketch.jobs[place:]), arrows=tuple(moved))
