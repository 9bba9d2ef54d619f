"""Functions in Python and compiled: the same bits, and Numba is loaded only where it pays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.configs.job_file import read_transformer_job
from presage.engine import Builder, Durations, compiled, simulate
from presage.engine.order import memory_slots, predecessors, topological_order
from presage.engine.recursion import Wiring, forward
from presage.prediction.jobs.job_step import job_step

JOBS = sorted((Path(__file__).parents[2] / "examples" / "jobs").glob("[!g]*.toml"))
ASKED = "import sys; from presage.prediction.jobs.job_prediction import predict_job; predict_job(sys.argv[1]).seconds; "


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a function returns where everything is compiled, and where nothing is."""

    def ask(function: Callable[[], Any]) -> tuple[Any, Any]:
        with monkeypatch.context() as m:
            m.setattr(compiled._Function, "__call__", lambda self, *args: self.load()(*args))
            native = function()
        with monkeypatch.context() as m:
            m.setattr(compiled._Function, "__call__", lambda self, *args: self.py_func(*args))
            return native, function()

    return ask


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_a_job_s_step_is_the_same_to_the_bit(path: Path, both_ways: Any) -> None:
    if "embeddings" in path.read_text():
        pytest.skip("a recommendation job")
    job = read_transformer_job(path)
    native, plain = both_ways(lambda: job_step(job))
    assert native.seconds == plain.seconds and native.parts == plain.parts
    assert np.array_equal(native.pipeline.busy, plain.pipeline.busy)


def test_a_program_s_times_are_the_same_to_the_bit(both_ways: Any) -> None:
    def ends() -> Any:
        b, rng = Builder(), np.random.default_rng(0)
        lanes = [b.lane(f"lane {k}") for k in range(3)]
        tasks = [b.task(lanes[int(rng.integers(3))], float(rng.random())) for _ in range(60)]
        for k in range(5, 60):
            b.edge(tasks[int(rng.integers(k))], tasks[k], float(rng.random()))
        b.meet([b.task(lane, 1.0) for lane in lanes])
        timeline = simulate(b.build(), Durations.of(b.durations[:, None] * rng.random(7)))
        return timeline.end, timeline.start

    native, plain = both_ways(ends)
    assert np.array_equal(native[0], plain[0]) and np.array_equal(native[1], plain[1])


@pytest.mark.parametrize("draws", [1, 7])
def test_plain_twins_of_compiled_functions_give_the_same_bits(draws: int) -> None:
    rng, tasks, lanes, edges = np.random.default_rng(draws), 300, 4, 700
    lane, gap = rng.integers(lanes, size=tasks).astype(np.int32), rng.random(lanes)
    ends = np.sort(rng.permuted(np.tile(np.arange(tasks, dtype=np.int32), (edges, 1)), axis=1)[:, :2], axis=1)
    order = rng.permutation(edges)
    before, after = (np.ascontiguousarray(ends[order, k]) for k in (0, 1))
    given = (lane, gap, before, after, rng.random(edges), rng.random(edges) < 0.3)
    ptr, pred, delay, from_start = same(predecessors, *given)
    group, release = np.full(tasks, -1, np.int32), rng.random(tasks)
    order = same(topological_order, ptr, pred, group, 0)
    slot, used = same(memory_slots, order, group, ptr, pred)
    seconds = Durations.of(rng.random((tasks, draws))).seconds
    part = rng.integers(-1, 3, size=tasks).astype(np.int32)
    wiring = Wiring(order, group, ptr, pred, delay, from_start, release)
    times = [[np.zeros((used, draws)), np.zeros((used, draws)), np.zeros((3, draws))] for _ in range(2)]
    for run, (start, end, latest) in zip((forward.load(), forward.plain), times, strict=True):
        run(wiring, seconds, 0, draws, slot, start, end, part, latest)
    for native, plain in zip(*times, strict=True):
        assert np.array_equal(native, plain) and native.any()


def same(function: Any, *args: Any) -> Any:
    """What a function returns compiled, which must be what its plain twin returns."""
    native, plain = function.load()(*args), function.plain(*args)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (native, plain)), strict=True):
        assert np.array_equal(one, other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)
    return native


def test_a_small_job_does_not_load_numba() -> None:
    path = next(p for p in JOBS if p.stem == "llama3.1-405b")
    call = [sys.executable, "-c", ASKED + "sys.exit('numba' in sys.modules)", str(path)]
    assert subprocess.run(call, check=False).returncode == 0
