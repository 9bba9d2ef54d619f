"""What the engine says to circles and to bad arguments, what it does with nothing, and how much memory it takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine_reference as reference
from engine_reference import Arrow, Sketch
from engine_sketches import build, law, sketches, task_numbers
from presage.engine import (
    Builder,
    Deadlock,
    Durations,
    Edges,
    Lane,
    Program,
    finish_times,
    latest_ends,
    period,
    program,
    repeat,
    simulate,
)
from presage.errors import PresageError

# --- deadlock


def two_ranks(second: list[str]) -> Builder:
    """Rank 0 calls collective A, then B; rank 1 as given."""
    b = Builder()
    lanes = [b.lane("stream of rank 0"), b.lane("stream of rank 1", 1)]
    mine = {name: b.task(lanes[0], 1.0, name) for name in ["A", "B"]}
    theirs = {name: b.task(lanes[1], 1.0, name) for name in second}
    for name in mine:
        b.meet([mine[name], theirs[name]])
    return b


def test_collectives_in_one_order_run() -> None:
    b = two_ranks(["A", "B"])
    assert simulate(b.build(), b.durations).finish == 2.0


def test_collectives_in_opposite_orders_are_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="4 tasks can never start") as error:
        two_ranks(["B", "A"]).build()
    assert all(text in str(error.value) for text in ("A on stream of rank", "B on stream of rank"))
    assert issubclass(Deadlock, PresageError)


def test_a_circle_of_edges_is_a_deadlock_and_what_follows_it_is_not_blamed() -> None:
    b = Builder()
    lane = [b.lane(f"lane {i}") for i in range(4)]
    one, two, three = (b.task(lane[i], 1.0, name) for i, name in enumerate(["one", "two", "three"]))
    b.task(lane[3], 1.0, "bystander", after=[three])
    for before, after in ((one, two), (two, three), (three, one)):
        b.edge(before, after)
    with pytest.raises(Deadlock, match="4 tasks") as error:
        b.build()
    assert all(f"{name} on lane" in str(error.value) for name in ("one", "two", "three"))
    assert "bystander" not in str(error.value)


def test_a_task_cannot_wait_for_itself_nor_meet_its_own_lane() -> None:
    with pytest.raises(Deadlock, match="task 0 on x -> task 0 on x"):
        Program.of([Lane("x")], [0], Edges.of(0, 0))
    with pytest.raises(Deadlock, match="2 tasks"):
        Program.of([Lane("x")], [0, 0], group=[0, 0])


def test_a_long_circle_is_not_told_in_full() -> None:
    n = 100
    ring = Edges.of(np.arange(n), (np.arange(n) + 1) % n)
    with pytest.raises(Deadlock, match="94 more"):
        Program.of([Lane(str(i)) for i in range(n)], np.arange(n), ring)


@law()
@given(sketches(least=2), st.data())
def test_every_circle_is_found_and_told_truly(sketch: Sketch, data: Any) -> None:
    n = len(sketch.jobs)
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), min_size=1, max_size=2))
    knotted = replace(sketch, arrows=(*sketch.arrows, *(Arrow(max(p), min(p)) for p in pairs)))
    stuck, told = reference.stuck(knotted), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "describe_circle", lambda tasks, count, _: told.append((tasks, count)) or "")
        try:
            build(knotted)
        except Deadlock:
            assert told[0][1] == len(stuck)
        else:
            assert not stuck
            return
    job_of = {t: j for j, t in enumerate(task_numbers(knotted))}
    tasks = [job_of[t] for t in told[0][0]]
    for before, after in pairwise([tasks[-1], *tasks]):
        waits = {a.before for m in knotted.mates(after) for a in knotted.arrows_in(m)}
        assert waits & set(knotted.mates(before))


# --- bad arguments: an error that shows the value

ONE = [Lane("x")]
NAN = float("nan")


def one_task() -> Program:
    return Program.of(ONE, [0])


def built(call: Callable[[Builder, int], Any]) -> None:
    b = Builder()
    lane = b.lane("x")
    b.task(lane, 1.0)
    call(b, lane)
    b.build()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "negative duration": (lambda: simulate(one_task(), [-1.5]), "-1.5"),
    "duration NaN": (lambda: simulate(one_task(), [NAN]), "nan"),
    "infinite duration": (lambda: simulate(Program.of(ONE, [0, 0]), [2.0, np.inf]), "inf"),
    "negative draw": (lambda: Durations.of([1.0], {0: [1.0, -2.5]}), "-2.5"),
    "NaN in a table": (lambda: Durations.of([[1.0, NAN]]), "nan"),
    "too few durations": (lambda: simulate(Program.of(ONE, [0, 0]), [1.0]), "2 tasks, but 1"),
    "too many durations": (lambda: finish_times(one_task(), [1.0, 2.0]), "1 tasks, but 2"),
    "durations of three dimensions": (lambda: Durations.of(np.zeros((1, 2, 3))), "1, 2, 3"),
    "draws beside a table": (lambda: Durations.of([[1.0, 2.0]], {0: [1.0]}), "1, 2"),
    "no draws": (lambda: Durations.of(np.zeros((3, 0))), "0 draws"),
    "draws of different lengths": (lambda: Durations.of([1.0, 1.0], {0: [1.0, 2.0], 1: [1.0]}), r"task 1.*\(1,\)"),
    "a number for draws": (lambda: Durations.of([1.0], {0: 2.0}), r"task 0"),
    "draws for an unknown task": (lambda: Durations.of([1.0], {7: [1.0]}), "task 7"),
    "draws for a negative task": (lambda: Durations.of([1.0], {-1: [1.0]}), "task -1"),
    "an unknown row of draws": (
        lambda: Durations(np.zeros(1), np.array([3], np.int32), np.zeros((1, 2))),
        "row 3 of 1",
    ),
    "rows of another length": (
        lambda: Durations(np.zeros(2), np.zeros(1, np.int32), np.zeros((1, 2))),
        r"\(2,\), \(1,\)",
    ),
    "unknown lane": (lambda: Program.of(ONE, [0, 3]), "lane 3"),
    "negative lane": (lambda: Program.of(ONE, [0, -1]), "lane -1"),
    "half a lane": (lambda: Program.of(ONE, [0.5]), "0.5"),
    "a lane that is no number": (lambda: Program.of(ONE, ["x"]), "'x'"),
    "a lane beyond 32 bits": (lambda: Program.of(ONE, [2**32]), "4294967296"),
    "negative gap": (lambda: Program.of([Lane("slow", gap=-0.25)], [0]), "'slow' has gap -0.25"),
    "gap NaN": (lambda: Program.of([Lane("slow", gap=NAN)], [0]), "nan"),
    "edge from an unknown task": (lambda: Program.of(ONE, [0], Edges.of(5, 0)), "task 5"),
    "edge to a negative task": (lambda: Program.of(ONE, [0], Edges.of(0, -2)), "task -2"),
    "edge of a task beyond 32 bits": (lambda: Edges.of([2**40], [0]), str(2**40)),
    "edge delay NaN": (lambda: Program.of(ONE, [0, 0], Edges.of(0, 1, NAN)), "nan"),
    "edge delay infinite": (lambda: Program.of(ONE, [0, 0], Edges.of(0, 1, -np.inf)), "-inf"),
    "edge columns of different lengths": (lambda: Edges.of([0, 1], [1, 2, 3]), "shape"),
    "edges made of different columns": (
        lambda: Program.of(ONE, [0, 0], Edges(np.zeros(1, int), np.ones(2, int), np.zeros(1), np.zeros(1, bool))),
        r"\(1,\), \(2,\)",
    ),
    "too few meetings": (lambda: Program.of(ONE, [0, 0], group=[0]), r"2 tasks.*\(1,\)"),
    "too many releases": (lambda: Program.of(ONE, [0], release=[0.0, 1.0]), r"1 tasks.*\(2,\)"),
    "negative release": (lambda: Program.of(ONE, [0], release=[-3.5]), "-3.5"),
    "release NaN": (lambda: Program.of(ONE, [0], release=[NAN]), "nan"),
    "too few names": (lambda: Program.of(ONE, [0, 0], name=[0]), r"2 tasks.*\(1,\)"),
    "unknown name": (lambda: Program.of(ONE, [0], name=[2], names=["a"]), "name 2"),
    "the end of an unknown task": (lambda: finish_times(one_task(), [1.0], [4]), "task 4"),
    "the end of a negative task": (lambda: finish_times(one_task(), [1.0], [-1]), "task -1"),
    "an unknown part": (lambda: latest_ends(one_task(), [1.0], np.array([2], np.int32), 2), "part 2 of 2"),
    "too few parts": (lambda: latest_ends(one_task(), [1.0], np.zeros(0, np.int32), 1), r"1 tasks.*\(0,\)"),
    "a period of one step": (lambda: period(one_task(), [1.0], steps=1), "not 1"),
    "less than no steps": (lambda: repeat(one_task(), -2), "-2"),
    "a carried edge from an unknown task": (lambda: repeat(one_task(), 2, Edges.of(3, 0)), "task 3"),
    "a carried edge to an unknown task": (lambda: period(one_task(), [1.0], Edges.of(0, -1)), "task -1"),
    "builder: unknown lane": (lambda: built(lambda b, _: b.task(9, 1.0)), "lane 9"),
    "builder: negative duration": (lambda: built(lambda b, lane: b.task(lane, -0.5)), "-0.5"),
    "builder: duration NaN": (lambda: built(lambda b, lane: b.task(lane, NAN)), "nan"),
    "builder: unknown task before": (lambda: built(lambda b, lane: b.task(lane, 1.0, after=[8])), "task 8"),
    "builder: unknown member": (lambda: built(lambda b, _: b.meet([6])), "task 6"),
    "builder: two meetings of a task": (lambda: built(lambda b, _: (b.meet([0]), b.meet([0]))), "task 0"),
    "slack of many draws": (lambda: simulate(one_task(), [[1.0, 2.0]]).slack, "draw"),
    "critical path of many draws": (lambda: simulate(one_task(), [[1.0, 2.0]]).critical_path, "draw"),
    "lane use of many draws": (lambda: simulate(one_task(), [[1.0, 2.0]]).lane_use(), "draw"),
    "exposure of many draws": (lambda: simulate(one_task(), [[1.0, 2.0]]).exposed_communication(0), "draw"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    call, shown = BAD[name]
    with pytest.raises(ValueError, match=shown):
        call()


# --- nothing at all


@pytest.mark.parametrize("lanes", [[], [Lane("idle"), Lane("idle too", 1)]])
def test_the_empty_program_works_everywhere(lanes: list[Lane]) -> None:
    empty = Program.of(lanes, [])
    run = simulate(empty, [])
    assert run.finish == 0.0
    assert len(run.start) == len(run.end) == len(run.ready) == len(run.wait) == len(run.slack) == 0
    assert run.critical_path.tolist() == []
    assert [(u.busy, u.wait, u.idle) for u in run.lane_use()] == [(0.0, 0.0, 0.0)] * len(lanes)
    assert run.exposed_communication(0) == (0.0, 0.0)
    assert run.draw(0) is run
    assert finish_times(empty, []).tolist() == [0.0]
    assert finish_times(empty, [], []).shape == (0, 1)
    assert period(empty, []).tolist() == [0.0]
    assert len(repeat(empty, 3)) == 0
    assert len(Builder().build()) == 0


def test_the_empty_program_with_draws() -> None:
    empty = Program.of([], [])
    draws = np.empty((0, 4))
    assert simulate(empty, draws).finish.tolist() == [0.0] * 4
    assert simulate(empty, draws).draw(2).finish == 0.0
    assert simulate(empty, draws).ready.shape == (0, 4)
    assert finish_times(empty, draws).tolist() == [0.0] * 4
    assert period(empty, draws).tolist() == [0.0] * 4


def test_no_copies_of_a_step_are_the_empty_program() -> None:
    assert len(repeat(Program.of(ONE, [0, 0], release=[1.0, 2.0]), 0)) == 0


# --- memory


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ask", [finish_times, period])
def test_memory_does_not_hold_tasks_times_draws(ask: Callable[..., object]) -> None:
    tasks, draws = 4000, 4000
    lanes = [Lane(str(i), i) for i in range(4)]
    queue = Program.of(lanes, np.arange(tasks) % 4, Edges.of(np.arange(tasks - 1), np.arange(1, tasks), 0.0, True))
    d = Durations(np.ones(tasks), np.zeros(tasks, np.int32), np.random.default_rng(0).random((1, draws)))
    ask(queue, d)  # compiled and warm
    assert peak_bytes(lambda: ask(queue, d)) < tasks * draws * 8 / 10


def test_times_nobody_waits_for_take_no_memory() -> None:
    assert Program.of([Lane(str(i)) for i in range(100)], np.arange(100)).slots[1] == 1
    assert Program.of(ONE, np.zeros(100, int)).slots[1] == 2
