"""Pipeline schedules: times known by hand, a measured run within a fifth of a percent, bad folders named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.engine import simulate
from presage.errors import InputError
from presage_validation import pipeline
from presage_validation.pipeline import Delays, orders, score_pipeline


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "traces" / "primus_pp8" / "pp8"


def finish(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    delays: Delays | None = None,
    f: float = 1.0,
    b: float = 2.0,
) -> float:
    order = orders(schedule, stages, microbatches, chunks)
    program = pipeline.pipeline(order, chunks, delays)
    return float(np.max(simulate(program, [f if op.way == "F" else b for ops in order for op in ops]).finish))


# ---- by hand ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_take_microbatches_plus_stages_less_one(stages: int, microbatches: int, schedule: str) -> None:
    assert finish(schedule, stages, microbatches) == pytest.approx((microbatches + stages - 1) * 3.0)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_shrinks_the_bubble_by_the_chunks(stages: int, rounds: int, chunks: int) -> None:
    microbatches = rounds * stages
    assert finish("interleaved", stages, microbatches, chunks) == pytest.approx(
        (microbatches * chunks + stages - 1) * 3.0
    )


def test_every_stage_runs_every_microbatch_once_each_way() -> None:
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 3)):
        for ops in orders(schedule, 4, 8, chunks):
            assert len(set(ops)) == len(ops) == 2 * 8 * chunks


def test_1f1b_order_of_the_first_and_last_stage() -> None:
    first, *_, last = orders("1f1b", 3, 4)
    assert [f"{op.way}{op.microbatch}" for op in first] == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert [f"{op.way}{op.microbatch}" for op in last] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


def test_messages_add_up_on_the_way_down_and_back() -> None:
    # one microbatch, four stages: three messages each way
    assert finish("1f1b", 4, 1, delays=Delays(0.1, 0.2)) == pytest.approx(4 * 3 + 3 * 0.1 + 3 * 0.2)


def test_time_between_operations_adds_up_on_a_stage() -> None:
    turn = {("first", "F", "B"): 0.5, ("first", "B", "F"): 0.25}
    assert finish("1f1b", 1, 3, delays=Delays(turn=turn)) == pytest.approx(9 + 3 * 0.5 + 2 * 0.25)


def test_unknown_schedules_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule"):
        orders("zigzag", 2, 2)
    with pytest.raises(ValueError, match="multiples"):
        orders("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="one model chunk"):
        orders("1f1b", 4, 4, 2)


# ---- a measured run --------------------------------------------------------------------------------------------------


def test_iteration_times_with_delays_from_other_iterations(folder: Path) -> None:
    result = score_pipeline(folder)
    scores = result.metrics()
    assert scores["replay"].n == 19 and scores["replay"].max <= 0.0025 and abs(scores["replay"].bias) <= 0.001
    assert scores["replay_same"].max <= 0.0025
    assert [s.row for s in result.skipped] == ["iteration 1"]


def test_what_the_delays_are_worth(folder: Path) -> None:
    # without them every iteration comes out one percent short
    assert score_pipeline(folder).metrics()["replay_plain"].bias == pytest.approx(-0.0105, abs=0.001)


def test_the_schedule_is_read_off_the_times(folder: Path) -> None:
    run = pipeline.read(folder)
    assert (run.schedule, run.stages, run.microbatches, run.chunks) == ("1f1b", 8, 16, 1)
    assert len(run.iterations) == 20 and run.memory_gb.shape == (8, 20)


# ---- made-up folders -------------------------------------------------------------------------------------------------


def made_up(folder: Path, stages: int = 3, microbatches: int = 4, iterations: int = 6, schedule: str = "1f1b") -> Path:
    """A run with a message of 5 ms each way; F takes 50 ms and B 100 ms, with noise."""
    folder.mkdir(exist_ok=True)
    order = orders(schedule, stages, microbatches)
    program = pipeline.pipeline(order, 1, Delays(0.005, 0.005))
    noise = np.random.default_rng(1).uniform(0.9, 1.1, (len(program), iterations))
    took = np.array([0.05 if op.way == "F" else 0.1 for ops in order for op in ops])[:, None] * noise
    line = simulate(program, took)
    config = {"pp_size": stages, "vp_size": 1, "num_mbs": microbatches}
    (folder / "config.json").write_text(json.dumps(config))
    for stage in range(stages):
        mine = program.lane == stage
        forward = np.array([op.way == "F" for op in order[stage]])
        data = {}
        for i in range(iterations):
            start, end = 1e3 * line.start[mine, i], 1e3 * line.end[mine, i]
            data[str(i + 1)] = {
                "total": float(end.max()),
                "memory": 1.0,
                "fwd_start": start[forward].tolist(),
                "fwd_end": end[forward].tolist(),
                "bwd_start": start[~forward].tolist(),
                "bwd_end": end[~forward].tolist(),
            }
        (folder / f"pp_rank_{stage}.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    return folder


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_delays_are_found_again(tmp_path: Path, schedule: str) -> None:
    run = pipeline.read(made_up(tmp_path / "run", schedule=schedule))
    assert run.schedule == schedule
    delays = pipeline.fit_delays(run)
    assert delays.forward == pytest.approx(0.005, rel=1e-6) and delays.backward == pytest.approx(0.005, rel=1e-6)
    assert pipeline.iteration_times(run, delays) == pytest.approx(run.measured, rel=1e-6)


def change(folder: Path, stage: int, field: str, value: object) -> None:
    file = folder / f"pp_rank_{stage}.json.gz"
    data = json.loads(gzip.decompress(file.read_bytes()))
    data["2"][field] = value
    file.write_bytes(gzip.compress(json.dumps(data).encode()))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("fwd_start", [0.0], "1 entries"),
        ("fwd_end", [1.0, "soon", 1.0, 1.0], "fwd_end"),
        ("bwd_start", [-1.0, 0.0, 0.0, 0.0], "negative"),
        ("bwd_end", [0.0, 0.0, 0.0, 0.0], "ends before it starts"),
        ("total", 0, "total"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, field: str, value: object, says: str) -> None:
    folder = made_up(tmp_path / "run")
    change(folder, 1, field, value)
    with pytest.raises(InputError, match=says) as error:
        pipeline.read(folder)
    assert "pp_rank_1" in str(error.value)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        pipeline.read(tmp_path / "nowhere")
    folder = made_up(tmp_path / "run")
    (folder / "pp_rank_2.json.gz").unlink()
    with pytest.raises(InputError, match=r"pp_rank_2\.json"):
        pipeline.read(folder)
    (folder / "pp_rank_2.json").write_text("")
    with pytest.raises(InputError, match="empty"):
        pipeline.read(folder)
    (folder / "pp_rank_2.json").write_text('{"1": {"total": 3')
    with pytest.raises(InputError, match=r"pp_rank_2\.json"):
        pipeline.read(folder)
    (folder / "config.json").write_text('{"pp_size": 0, "num_mbs": 4}')
    with pytest.raises(InputError, match="pp_size"):
        pipeline.read(folder)


def test_an_order_of_no_known_schedule_is_refused(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    file = folder / "pp_rank_0.json.gz"
    data = json.loads(gzip.decompress(file.read_bytes()))
    for iteration in data.values():
        for way in ("fwd", "bwd"):
            iteration[f"{way}_start"].reverse()
            iteration[f"{way}_end"].reverse()
    file.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(InputError, match="measured order is none of"):
        pipeline.read(folder)


def test_too_few_iterations_are_skipped_with_a_reason(tmp_path: Path) -> None:
    result = score_pipeline(made_up(tmp_path / "run", iterations=2))
    assert not result.rows and "needs two" in result.skipped[-1].reason
