"""Pipeline schedules through the engine: orders and times known by hand, folded steps equal to unfolded ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.engine import Durations, Timeline, finish_times, simulate
from presage.errors import PresageError
from presage.parallel.pipeline import Schedule, StageOrder
from presage.parallel.pipeline_run import pipeline_durations, pipeline_program, run_pipeline
from presage.traces.perfetto import timeline_trace
from presage_validation import pipeline as measured

KINDS = ("1f1b", "interleaved", "gpipe", "zero-bubble")


def pipeline_timeline(schedule: Schedule, *given: Any, **named: Any) -> Timeline:
    """The same as `run_pipeline`, with every task's start and end."""
    d = pipeline_durations(schedule, *given, **named)
    program, kind = pipeline_program(schedule, d)
    return simulate(program, d.kinds(schedule.meets)[0][kind])


def weight_of(kind: str, weight: Any) -> Any:
    return weight if kind == "zero-bubble" else None


def listed(order: StageOrder) -> str:
    chunks = [f".{c}" if order.chunk.any() else "" for c in order.chunk]
    return " ".join(f"{'FBW'[w]}{m}{c}" for w, m, c in zip(order.what, order.microbatch, chunks, strict=True))


@st.composite
def cases(draw: Any, stages: int = 6, microbatches: int = 60, virtual: int = 4) -> dict[str, Any]:
    """A schedule and durations: any, nearly equal, equal but for the ends, or equal."""
    kind = draw(st.sampled_from(KINDS))
    s, m = draw(st.integers(1, stages)), draw(st.integers(1, microbatches))
    v = 1 if kind == "1f1b" else draw(st.integers(1, virtual))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1.0, 0.1, 0.01, 0.0]))
    parts = [1.0 - spread * rng.random((s, v)) for _ in range(3)]
    if spread == 0.0 and draw(st.booleans()):
        for part in parts:
            part[0, 0] += 0.1
            part[-1, -1] += 0.4
    send = draw(st.sampled_from([0.0, 0.03, 0.3]))
    return {
        "schedule": Schedule.of(kind, s, m, v),
        "forward": parts[0],
        "backward": 2 * parts[1],
        "weight": weight_of(kind, parts[2]),
        "send": send * (rng.random(s) if draw(st.booleans()) else np.ones(s)),
        "overlap": draw(st.booleans()),
    }


# ---- orders ----------------------------------------------------------------------------------------------------------


def test_orders_known_by_hand() -> None:
    first, _, last = Schedule.of("1f1b", 3, 4).order
    assert listed(first) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert listed(last) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert listed(Schedule.of("gpipe", 3, 2).order[1]) == "F0 F1 B0 B1"
    # Megatron-Core: 2 x (stages behind) + stages x (chunks - 1) forwards ahead
    two = Schedule.of("interleaved", 2, 4, 2)
    assert listed(two.order[0]) == "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    # ZB-H1: a stage's weight gradients lag by its number
    zero = Schedule.of("zero-bubble", 3, 4).order
    assert listed(zero[0]) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert listed(zero[2]) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_every_number_of_microbatches_has_an_order_without_a_circle() -> None:
    for kind in ("interleaved", "zero-bubble", "gpipe"):
        for stages in range(1, 6):
            for microbatches in range(1, 14):
                for virtual in (1, 2, 3):
                    schedule = Schedule.of(kind, stages, microbatches, virtual)
                    pipeline_timeline(schedule, 1.0, 1.0, weight_of(kind, 1.0))  # Program.of refuses circles
                    for order in schedule.order:
                        seen = set(
                            zip(order.what.tolist(), order.chunk.tolist(), order.microbatch.tolist(), strict=True)
                        )
                        parts = 3 if kind == "zero-bubble" else 2
                        assert len(seen) == len(order) == parts * microbatches * virtual


def test_groups_that_would_wait_in_a_circle_are_made_larger() -> None:
    assert Schedule.of("interleaved", 4, 8, 2).group == 4
    assert Schedule.of("interleaved", 4, 10, 2).group == 5  # groups of 4 would leave 2 over, fewer than the stages
    assert Schedule.of("interleaved", 4, 9, 2).group == 5  # leaves 4
    assert Schedule.of("interleaved", 4, 3, 2).group == 3


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(PresageError, match="zigzag"):
        Schedule.of("zigzag", 2, 2)
    with pytest.raises(PresageError, match="stages = 0: stages >= 1"):
        Schedule.of("1f1b", 0, 2)
    with pytest.raises(PresageError, match="virtual = 1, not 2"):
        Schedule.of("1f1b", 2, 2, 2)
    two = Schedule.of("1f1b", 2, 2)
    with pytest.raises(PresageError, match="forward of shape"):
        run_pipeline(two, [1.0, 1.0, 1.0], 1.0)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(PresageError, match="backward has a time"):
            run_pipeline(two, 1.0, [1.0, bad])
        with pytest.raises(PresageError, match="send has a time"):
            run_pipeline(two, 1.0, 1.0, send=bad)
    with pytest.raises(PresageError, match="weight"):
        run_pipeline(Schedule.of("zero-bubble", 2, 2), 1.0, 1.0)


# ---- times known by hand ---------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 3000), st.sampled_from(["1f1b", "gpipe"]), st.booleans())
def test_equal_stages(stages: int, microbatches: int, kind: str, beside: bool) -> None:
    found = run_pipeline(Schedule.of(kind, stages, microbatches), 1.0, 2.0, overlap=beside)
    assert found.total == pytest.approx((microbatches + stages - 1) * 3.0, rel=1e-12)
    assert found.bubble == pytest.approx(np.full(stages, (stages - 1) * 3.0), abs=1e-8)


@given(st.integers(2, 8), st.integers(1, 300), st.integers(2, 5))
def test_interleaving_shrinks_the_bubble_by_the_chunks(stages: int, rounds: int, chunks: int) -> None:
    schedule = Schedule.of("interleaved", stages, rounds * stages, chunks)
    found = run_pipeline(schedule, 1.0 / chunks, 2.0 / chunks)
    assert found.bubble == pytest.approx(np.full(stages, (stages - 1) * 3.0 / chunks), abs=1e-8)


@given(st.integers(1, 8), st.integers(0, 300))
def test_zero_bubble(stages: int, more: int) -> None:
    """The paper's ZB-H1: (stages - 1)(F + B - W), with as much held at once as the first stage of 1F1B holds."""
    schedule = Schedule.of("zero-bubble", stages, 2 * stages + more)
    found = run_pipeline(schedule, 1.0, 1.0, 1.0)
    assert found.bubble == pytest.approx(np.full(stages, stages - 1.0), abs=1e-8)
    assert schedule.in_flight.tolist() == [stages] * stages


@given(st.integers(2, 8), st.integers(2, 200), st.integers(0, 2**32))
def test_zero_bubble_is_shorter_than_1f1b(stages: int, microbatches: int, seed: int) -> None:
    """Stages within a tenth of each other: a stage much slower than the one behind it may be left with its weights."""
    f, b, w = 1.0 + 0.1 * np.random.default_rng(seed).random((3, stages, 1))
    one, apart = (Schedule.of(kind, stages, microbatches) for kind in ("1f1b", "zero-bubble"))
    assert run_pipeline(apart, f, b, w).total < run_pipeline(one, f, b, w).total


def test_one_microbatch_meets_every_message() -> None:
    # forwards 3 messages, backwards 3; around from the last stage to the first once each way
    assert run_pipeline(Schedule.of("1f1b", 4, 1), 1.0, 2.0, send=0.1).total == pytest.approx(12 + 6 * 0.1)
    assert run_pipeline(Schedule.of("1f1b", 4, 1), 1.0, 2.0, send=0.1, overlap=False).total == pytest.approx(
        12 + 6 * 0.1
    )
    around = run_pipeline(Schedule.of("interleaved", 2, 1, 2), 1.0, 2.0, send=[0.1, 0.01])
    assert around.total == pytest.approx(4 * 3 + 2 * (2 * 0.1 + 0.01))


def test_first_forward_last_backward_and_extra() -> None:
    found = run_pipeline(Schedule.of("1f1b", 3, 50), 1.0, 2.0)
    assert found.first_forward.ravel().tolist() == [0.0, 1.0, 2.0]
    assert found.last_backward.ravel() == pytest.approx([156.0, 154.0, 152.0])
    late = run_pipeline(Schedule.of("1f1b", 3, 50), 1.0, 2.0, first_extra=[0.5, 0.0, 0.0])
    assert late.first_forward.ravel().tolist() == [0.0, 1.5, 2.5]
    assert late.total == pytest.approx(156.5) and late.busy == pytest.approx([150.5, 150.0, 150.0])


def test_messages_that_fill_gaps_are_not_exposed() -> None:
    found = run_pipeline(Schedule.of("1f1b", 2, 10), [1.0, 2.0], [2.0, 4.0], send=0.25)
    # the last stage sets the pace: only the first message there and the last one back are waited for
    assert found.exposed_send == pytest.approx([0.5, 0.5])
    assert found.bubble == pytest.approx(found.total - np.array([30.0, 60.0]))


# ---- against times computed another way ------------------------------------------------------------------------------


def slowly(schedule: Schedule, f: Any, b: Any, w: Any, send: Any) -> dict[tuple[int, int, int, int], float]:
    """Ends by (stage, what, chunk, microbatch), each from what it waits for: recursion over orders, no engine."""
    stages, chunks = schedule.stages, schedule.virtual
    lanes = [list(zip(o.what.tolist(), o.chunk.tolist(), o.microbatch.tolist(), strict=True)) for o in schedule.order]
    before = {(s, *b): (s, *a) for s, lane in enumerate(lanes) for a, b in pairwise(lane)}
    ends: dict[tuple[int, int, int, int], float] = {}
    todo = [(s, *op) for op in zip(*lanes, strict=True) for s, op in enumerate(op)]
    while todo:
        left = []
        for s, what, c, m in todo:
            place = c * stages + s + (0 if what == 2 else 1 if what else -1)
            sender = (place % stages, what, place // stages, m) if 0 <= place < stages * chunks and what < 2 else None
            here = before.get((s, what, c, m))
            if (sender and sender not in ends) or (here and here not in ends):
                left.append((s, what, c, m))
                continue
            hop = 0.0
            if sender and sender[0] != s:
                hop = send[min(s, sender[0])] if sender[2] == c else send[-1]
            came = ends[sender] + hop if sender else 0.0
            ends[s, what, c, m] = max(came, ends[here] if here else 0.0) + (f, b, w)[what][s, c]
        assert len(left) < len(todo), "a circle"
        todo = left
    return ends


@given(cases(stages=4, microbatches=9, virtual=3))
def test_small_cases_equal_a_plain_recursion(case: dict[str, Any]) -> None:
    schedule, w = case["schedule"], case["weight"] if case["weight"] is not None else 0 * case["forward"]
    ends = slowly(schedule, case["forward"], case["backward"], w, case["send"])
    found = run_pipeline(**{**case, "overlap": True})
    assert found.total == pytest.approx(max(ends.values()), rel=1e-12)
    last = 2 if schedule.kind == "zero-bubble" else 1
    for (s, c), end in np.ndenumerate(found.last_backward):
        assert end == pytest.approx(max(e for k, e in ends.items() if k[:3] == (s, last, c)), rel=1e-12)
        assert found.first_forward[s, c] == pytest.approx(ends[s, 0, c, 0] - case["forward"][s, c], abs=1e-12)


def megatron(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """Megatron's 1F1B without overlap: ("F" or "B", 0) works, ("meet", n) waits for the stage n away and exchanges."""
    lanes = []
    for s in range(stages):
        ahead = min(stages - s - 1, microbatches)
        up, down = [("meet", -1)] if s else [], [("meet", 1)] if s < stages - 1 else []
        lane = [x for _ in range(ahead) for x in (*up, ("F", 0), *down)]
        rest = microbatches - ahead
        lane += up if rest else []
        lane += [("F", 0), *down, ("B", 0), *up] * rest
        lane += [x for _ in range(ahead) for x in (*down, ("B", 0), *up)]
        lanes.append(lane)
    return lanes


def gpipe(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    lanes = []
    for s in range(stages):
        up, down = [("meet", -1)] if s else [], [("meet", 1)] if s < stages - 1 else []
        lanes.append([*up, ("F", 0), *down] * microbatches + [*down, ("B", 0), *up] * microbatches)
    return lanes


def met(lanes: list[list[tuple[str, int]]], f: Any, b: Any, send: Any) -> float:
    """When all lanes are done, each going on as far as it can: a meeting needs both at it."""
    now, at = [0.0] * len(lanes), [0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for s, lane in enumerate(lanes):
            while at[s] < len(lane):
                what, away = lane[at[s]]
                if what == "meet":
                    o = s + away
                    if at[o] >= len(lanes[o]) or lanes[o][at[o]] != ("meet", -away):
                        break
                    now[s] = now[o] = max(now[s], now[o]) + send[min(s, o)]
                    at[o] += 1
                else:
                    now[s] += (f if what == "F" else b)[s]
                at[s] += 1
                moved = True
    assert all(a == len(lane) for a, lane in zip(at, lanes, strict=True)), "a circle"
    return max(now)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from(["1f1b", "gpipe"]))
def test_stages_that_meet_to_send(stages: int, microbatches: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    f, b, send = rng.random(stages), rng.random(stages), 0.2 * rng.random(stages)
    lanes = (megatron if kind == "1f1b" else gpipe)(stages, microbatches)
    found = run_pipeline(Schedule.of(kind, stages, microbatches), f, b, send=send, overlap=False)
    assert found.total == pytest.approx(met(lanes, f, b, send), rel=1e-12)


# ---- folded steps ----------------------------------------------------------------------------------------------------


def agrees(case: dict[str, Any]) -> None:
    """All that `run` says, as read off the engine's timeline of every task."""
    found, schedule = run_pipeline(**case), case["schedule"]
    line = pipeline_timeline(**case)
    made, kind = pipeline_program(schedule, found.durations)
    sent = 0.0
    if not case["overlap"] and not schedule.meets:
        sent = found.durations.last_sent(schedule.kind == "zero-bubble")
    last = 2 if schedule.kind == "zero-bubble" else 1
    done, begun = np.zeros(found.last_backward.shape), np.zeros(found.last_backward.shape)
    for s, c in np.ndindex(done.shape):
        place = s * schedule.virtual + c
        done[s, c] = line.end[kind == last * done.size + place].max()
        begun[s, c] = line.start[kind == 3 * done.size + place].min()
    assert made.lanes == line.program.lanes
    assert found.last_backward == pytest.approx(done - sent, rel=1e-9)
    assert found.total == pytest.approx(float((done - sent).max()), rel=1e-9)
    assert found.first_forward == pytest.approx(begun, rel=1e-9, abs=1e-12)


@given(cases(stages=8, microbatches=160, virtual=4))
def test_folded_steps_equal_the_engine(case: dict[str, Any]) -> None:
    agrees(case)


@settings(max_examples=25)
@given(cases(stages=5, microbatches=1, virtual=2), st.integers(500, 1500))
def test_folded_steps_of_many_microbatches_equal_the_engine(case: dict[str, Any], microbatches: int) -> None:
    was = case["schedule"]
    case["schedule"] = Schedule.of(was.kind, was.stages, microbatches, was.virtual)
    agrees(case)


def test_steps_are_folded() -> None:
    """Few microbatches are run where stages are equal but for the first and the last, as in most jobs."""
    for kind, virtual in (("1f1b", 1), ("interleaved", 4), ("gpipe", 1), ("zero-bubble", 1)):
        forward = np.ones((8, virtual))
        forward[0, 0], forward[-1, -1] = 1.1, 1.4
        found = run_pipeline(
            Schedule.of(kind, 8, 2048, virtual), forward, 2 * forward, weight_of(kind, forward), send=0.02
        )
        assert found.simulated <= 64


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(cases(), st.data())
def test_adding_work_never_shortens_a_step(case: dict[str, Any], data: Any) -> None:
    before, schedule = run_pipeline(**case), case["schedule"]
    parts = ["forward", "backward"] + ["weight"] * (case["weight"] is not None)
    name = data.draw(st.sampled_from(parts))
    at = data.draw(st.integers(0, schedule.stages - 1)), data.draw(st.integers(0, schedule.virtual - 1))
    more = case[name].copy()
    more[at] += data.draw(st.sampled_from([1e-3, 0.5]))
    after = run_pipeline(**{**case, name: more})
    assert (after.last_backward >= before.last_backward * (1 - 1e-12)).all()
    longer = Schedule.of(schedule.kind, schedule.stages, schedule.microbatches + schedule.period, schedule.virtual)
    if longer.group == schedule.group or schedule.kind == "gpipe":
        assert run_pipeline(**{**case, "schedule": longer}).total >= before.total * (1 - 1e-12)


@given(cases())
def test_waits_are_never_negative(case: dict[str, Any]) -> None:
    found = run_pipeline(**case)
    assert (found.bubble >= -1e-9 * found.total).all() and (found.exposed_send >= -1e-9 * found.total).all()
    assert (found.first_forward >= 0).all() and found.last_backward.max() == found.total


@given(cases(stages=4, microbatches=20), st.integers(0, 2**32))
def test_draws_through_the_program_equal_single_runs(case: dict[str, Any], seed: int) -> None:
    names = ("forward", "backward") + ("weight",) * (case["weight"] is not None)
    rng = np.random.default_rng(seed)
    some = [{**case, **{n: case[n] * rng.uniform(0.5, 1.5, case[n].shape) for n in names}} for _ in range(3)]
    given = [pipeline_durations(**one) for one in some]
    made, kind = pipeline_program(case["schedule"], given[0])
    table = np.array([d.kinds(case["schedule"].meets)[0] for d in given]).T
    finish = finish_times(made, Durations(np.zeros(len(made)), kind.astype(np.int32), table))
    expected = [float(np.max(pipeline_timeline(**one).finish)) for one in some]
    assert finish == pytest.approx(expected, rel=1e-12)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_activations_in_flight() -> None:
    assert Schedule.of("1f1b", 4, 100).in_flight.tolist() == [4, 3, 2, 1]
    assert Schedule.of("1f1b", 4, 2).in_flight.tolist() == [2, 2, 2, 1]
    assert Schedule.of("gpipe", 2, 9).in_flight.tolist() == [9, 9]
    assert Schedule.of("interleaved", 4, 64, 2).in_flight.tolist() == [11, 9, 7, 5]


@given(cases(stages=5, microbatches=120), st.integers(0, 2**32))
def test_most_held_equals_a_count_over_the_whole_order(case: dict[str, Any], seed: int) -> None:
    schedule = case["schedule"]
    weights = np.random.default_rng(seed).random((schedule.stages, schedule.virtual))
    last = 2 if schedule.kind == "zero-bubble" else 1
    expected = []
    for order, each in zip(schedule.order, weights, strict=True):
        held, most = 0.0, 0.0
        for what, chunk in zip(order.what.tolist(), order.chunk.tolist(), strict=True):
            held += each[chunk] * ((what == 0) - (what == last))
            most = max(most, held)
        expected.append(most)
    assert schedule.most_held(weights) == pytest.approx(expected)


# ---- timelines and a measured run ------------------------------------------------------------------------------------


def test_timelines_can_be_drawn() -> None:
    line = pipeline_timeline(Schedule.of("interleaved", 2, 4, 2), 1.0, 2.0, send=0.1)
    drawn = json.loads(timeline_trace(line, {0: "stage 0", 1: "stage 1"}))["traceEvents"]
    tasks = {(e["pid"], e["name"]): e for e in drawn if e["ph"] == "X"}
    assert len(tasks) == 2 * 2 * 4 * 2
    assert tasks[1, "F3.1"]["dur"] == pytest.approx(1e6)
    assert [lane.name for lane in line.program.lanes] == ["stage 0", "stage 1"]
    both = pipeline_timeline(Schedule.of("1f1b", 2, 3), 1.0, 2.0, send=0.1, overlap=False)
    names = [both.program.label(t) for t in range(len(both.program))]
    assert sorted(set(names)) == ["B0", "B1", "B2", "F0", "F1", "F2", "send"]


def test_a_measured_run(shared: Path) -> None:
    """Its own durations through our program give what its replay gives; means by stage, the mean of its iterations."""
    them = measured.read(shared / "traces" / "primus_pp8" / "pp8")
    schedule = Schedule.of(them.schedule, them.stages, them.microbatches, them.chunks)
    took = {way: them.end[way] - them.start[way] for way in "FB"}
    made, _ = pipeline_program(schedule, pipeline_durations(schedule, 1.0, 1.0))
    labels = [made.label(t) for t in range(len(made))]
    each = np.array([took[x[0]][lane, int(x[1:])] for x, lane in zip(labels, made.lane.tolist(), strict=True)])
    assert finish_times(made, each) == pytest.approx(measured.iteration_times(them), rel=1e-12)
    forward, backward = (took[way][:, :, 1:].mean(axis=(1, 2)) for way in "FB")
    delays = measured.fit_delays(them, range(1, len(them.iterations)))
    found = run_pipeline(schedule, forward, backward, send=(delays.forward + delays.backward) / 2, overlap=False)
    # what is missing is that microbatches differ: the slowest of them holds up the others
    assert found.total == pytest.approx(them.measured[1:].mean(), rel=0.025)
    assert found.total < them.measured[1:].mean()
