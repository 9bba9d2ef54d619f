"""From costs to a step time: the laws of the step's program, its draws, the Prediction, and `presage predict`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import presage as ps
from commands import runner
from graph_sketches import Sketch, training_step
from presage.cli import predict as predict_command
from presage.costs.host_model import US, HostModel, Pace, host_model
from presage.costs.kernel_model import OpTime
from presage.errors import PresageError
from presage.graph import save
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.hardware import gpu
from presage.noise.sampling import step_paces
from presage.prediction import api
from presage.prediction.result import Quantiles
from presage.prediction.step import StepResult, predict_step, step_program
from presage.prediction.step_program import MAIN, NO_SPREAD, STREAM, StepSpread, program
from presage.report.predict_answer import predict_answer
from presage_validation.workloads import WorkloadCase, score_cases
from quickest import quickest

H200, HOST = gpu("h200"), host_model("h200")


def times_of(graph: Graph, us: float | Sequence[float], launches: int = 1) -> list[OpTime]:
    each = [us] * len(graph.ops) if isinstance(us, int | float) else us
    return [OpTime(u * US, launches, family(op.name), "model") for u, op in zip(each, graph.ops, strict=True)]


def usual(graph: Graph, times: Sequence[OpTime], host: HostModel = HOST, steps: int = 6) -> float:
    return step_program(graph, times, host).usual(steps)


def test_a_long_kernel_hides_the_host() -> None:
    graph = training_step(4)
    n = len(graph.ops)
    gap = HOST.calls.kernel_gap_us * US
    assert usual(graph, times_of(graph, 1000.0)) == pytest.approx(n * (1000 * US + gap), rel=1e-6)


def test_short_kernels_leave_the_step_to_the_host() -> None:
    graph = training_step(4)
    found = step_program(graph, times_of(graph, 1.0), HOST)
    assert found.usual(6) == pytest.approx(found.host_total, rel=1e-6)
    assert usual(graph, times_of(graph, 0.5)) == usual(graph, times_of(graph, 1.0))


def test_more_steps_change_nothing_once_the_queue_has_filled() -> None:
    graph = training_step(4)
    times = times_of(graph, [5.0, 200.0] * (len(graph.ops) // 2) + [5.0] * (len(graph.ops) % 2))
    assert usual(graph, times, steps=6) == pytest.approx(usual(graph, times, steps=12), rel=1e-9)


durations = st.lists(st.floats(0.0, 400.0), min_size=24, max_size=24)


@settings(max_examples=25)
@given(durations)
def test_halving_kernel_times_cannot_lengthen_a_step(us: list[float]) -> None:
    graph = training_step(4)
    us = (us * 2)[: len(graph.ops)]
    whole, half = (usual(graph, times_of(graph, [f * u for u in us])) for f in (1.0, 0.5))
    assert half <= whole * (1 + 1e-12)


@settings(max_examples=25)
@given(durations, st.integers(0, 15), st.sampled_from(["mm", "relu", "nobody_knows"]), st.booleans(), st.booleans())
def test_adding_an_op_never_shortens_a_step(us: list[float], at: int, name: str, launches: bool, sync: bool) -> None:
    graph = training_step(4)
    us = (us * 2)[: len(graph.ops)]
    like = graph.ops[at]
    made = Op(f"aten::{name}", "", (), (), like.phase, like.thread, like.module, kernels=launches, sync=sync)
    more = replace_ops(graph, (*graph.ops[:at], made, *graph.ops[at:]))
    times = times_of(graph, us)
    new = OpTime(10 * US if launches else 0.0, int(launches), "other", "model")
    assert usual(more, [*times[:at], new, *times[at:]]) >= usual(graph, times) * (1 - 1e-9)


def replace_ops(graph: Graph, ops: tuple[Op, ...]) -> Graph:
    return Graph(ops, graph.tensors, graph.storages, (), graph.source)


def test_the_host_waits_where_an_op_asks_the_gpu() -> None:
    def step(sync: bool) -> Graph:
        s = Sketch()
        for k in range(8):
            x, y = s.tensor(8, 8), s.new(8, 8)
            s.op("mm", [x, x], [y], sync=sync and k == 7)
        return s.graph()

    free, waits = (usual(step(sync), times_of(step(sync), 300.0)) for sync in (False, True))
    host = step_program(step(True), times_of(step(True), 300.0), HOST)
    assert free == pytest.approx(8 * (300 + HOST.calls.kernel_gap_us) * US)
    assert waits > free + 20 * US
    assert waits < free + host.host_total


def test_the_host_is_never_further_ahead_than_the_queue_is_deep() -> None:
    graph = training_step(30)
    calls = msgspec.structs.replace(HOST.calls, queue_depth=9)
    built = step_program(graph, times_of(graph, 500.0), replace(HOST, calls=calls))
    line = built.timeline(3)
    n = len(built.tasks)
    first = np.arange(3)[:, None] * n
    launch, kernel = ((first + x).ravel() for x in (built.tasks.launch, built.tasks.kernel))
    assert (line.start[launch[9:]] >= line.start[kernel[:-9]]).all()
    assert usual(graph, times_of(graph, 500.0), replace(HOST, calls=calls)) == pytest.approx(
        usual(graph, times_of(graph, 500.0)), rel=1e-6
    )


def test_threads_take_turns_and_kernels_follow_their_launches() -> None:
    graph = training_step(6)
    built = step_program(graph, times_of(graph, 20.0, launches=3), HOST)
    line = built.timeline(2)
    host = np.flatnonzero(line.program.lane != STREAM)
    order = host[np.argsort(line.start[host], kind="stable")]
    assert (line.start[order[1:]] >= line.end[order[:-1]] - 1e-12).all()  # one of the two host threads at a time
    latency = HOST.calls.launch_latency_us * US - HOST.calls.kernel_gap_us * US
    launched = line.end[built.tasks.launch] + latency
    assert (line.start[built.tasks.kernel] >= launched - 1e-12).all()
    assert len(built.tasks.kernel) == 3 * len(graph.ops)


def test_no_noise_and_one_draw_is_the_usual_step() -> None:
    graph = training_step(4)
    built = step_program(graph, times_of(graph, 30.0), HOST)
    rng = np.random.default_rng(0)
    assert built.step_seconds(1, 6, NO_SPREAD, rng).tolist() == [built.usual(6)]
    calm = StepSpread(Pace(0.0, 0.0, 0.0), 0.0, 1e-12)
    assert built.step_seconds(3, 6, calm, rng) == pytest.approx(built.usual(6), rel=1e-9)


def test_paces_of_steps_are_those_asked_for() -> None:
    found = np.log(step_paces(np.random.default_rng(0), 0.2, 0.1, 0.5, 40, 5_000))
    assert found.shape == (40, 5_000)
    runs = found.mean(axis=0)
    assert runs.mean() == pytest.approx(0.0, abs=0.01)
    assert runs.std() == pytest.approx(0.2, rel=0.05)  # steps even out over a run
    within = found - runs
    assert within.std() == pytest.approx(0.1, rel=0.05)
    assert np.corrcoef(within[20], within[21])[0, 1] == pytest.approx(0.5, abs=0.05)


def loaded(workers: int, batch_seconds: float, us: float = 20.0, **more: float) -> StepResult:
    loading = {"batch_seconds": batch_seconds, "workers": workers, "batches": 1, **more}
    graph = msgspec.structs.replace(training_step(6), loading=loading)
    return predict_step(graph, times_of(graph, us), H200, HOST, draws=100)


def test_a_step_that_its_loader_holds_up_takes_as_long_as_loading() -> None:
    alone, kept, held = predicted(), loaded(4, 1e-6), loaded(4, 0.4)
    assert kept.bound == alone.bound and kept.step.p50 == pytest.approx(alone.step.p50 + 0.36e-3, rel=0.05)
    assert held.bound == "loading" and held.step.p50 == pytest.approx(0.1, rel=0.02)
    assert held.step.p5 < 0.06 and held.step.p95 > 0.18, "another CPU may be twice as fast, or half"
    found = held.to_json()["data_loading"]
    assert found["pace"] == pytest.approx(0.1) and not found["keeps_up"] and kept.data_loading is not None
    assert kept.data_loading.keeps_up and "bound by data loading" in predict_answer(held).headline


def test_batches_pass_through_shared_memory_and_the_thread_that_pins_them() -> None:
    one, two = (loaded(workers, 0.0, batch_bytes=154e6).step.p50 for workers in (1, 2))
    assert one == pytest.approx(0.103, rel=0.03) and two == pytest.approx(one / 2, rel=0.1), "of a worker 1.5 GB/s"
    pinned = [loaded(workers, 0.0, batch_bytes=154e6, pinned=1.0).step.p50 for workers in (8, 12)]
    assert pinned == pytest.approx([0.061, 0.061], rel=0.03), "measured: 56 to 66 ms"


def test_batches_of_workers_cost_the_thread_that_trains_time() -> None:
    alone = predicted().step.p50
    plain, pinned = (loaded(64, 0.0, batch_bytes=38.5e6, pinned=k).step.p50 - alone for k in (0.0, 1.0))
    assert plain == pytest.approx(12.3e-3, rel=0.1), "measured: 7 to 9 ms to take it, 4 more to copy it"
    assert 6e-3 < pinned < 18e-3
    assert loaded(64, 0.0, batch_bytes=1e3).step.p50 - alone < 1e-3


def test_a_training_process_that_loads_its_batches_itself_takes_that_much_longer() -> None:
    alone, own = predicted(), loaded(0, 0.05)
    assert own.step.p50 == pytest.approx(alone.step.p50 + 0.05, rel=0.05) and own.bound == "loading"
    assert own.host == pytest.approx(alone.host), "loading is told apart"
    hidden = loaded(0, 1e-3, us=1e5)
    assert hidden.bound == "gpu" and hidden.step.p50 == pytest.approx(predicted(1e5).step.p50, rel=0.01)


def predicted(us: float = 20.0, draws: int = 100, **more: object) -> StepResult:
    graph = training_step(6)
    return predict_step(graph, times_of(graph, us), H200, HOST, draws=draws, **more)  # type: ignore[arg-type]


def test_quantiles_are_in_order_and_the_seed_decides() -> None:
    p = predicted()
    assert p.step.p5 <= p.step.p50 <= p.step.p95
    assert predicted().step == p.step != predicted(seed=1).step
    assert Quantiles.of(np.array([1.0, 2.0, 3.0])) == Quantiles(2.0, 1.1, 2.0, pytest.approx(2.9))


def test_a_step_of_the_gpus_has_the_kernel_models_spread_and_one_of_the_hosts_the_hosts() -> None:
    of_gpu, of_host = predicted(2000.0), predicted(1.0)
    assert (of_gpu.bound, of_host.bound) == ("gpu", "host")
    assert of_gpu.step.p95 / of_gpu.step.p5 - 1 == pytest.approx(2 * 1.645 * 0.04, rel=0.3)
    assert 0.3 < of_host.step.p95 / of_host.step.p5 - 1 < 1.0
    sure = predicted(2000.0, spread=StepSpread(HOST.pace, kernels=0.0))
    assert sure.step.p95 / sure.step.p5 - 1 < 0.02


def test_single_steps_vary_less_the_more_the_host_runs_ahead() -> None:
    most = exp(1.645 * HOST.pace.step_sd) - 1
    of_gpu, of_both, of_host = (predicted(us).jitter for us in (2000.0, 30.0, 1.0))
    assert 0.003 < of_gpu < 0.005 < of_both < of_host < most


def test_breakdowns_add_up() -> None:
    p = predicted()
    assert sum(x.gpu for x in p.families) == pytest.approx(p.gpu_active)
    assert sum(x.gpu for x in p.modules) == pytest.approx(p.gpu_active)
    assert sum(x.share for x in p.modules) == pytest.approx(1.0)
    assert {x.name for x in p.modules} == {"layers", "(optimizer)"}
    assert {x.name for x in p.families} == {"matrix multiply", "elementwise"}
    assert p.costliest[0].seconds >= p.costliest[-1].seconds
    assert sum(c.calls for c in p.costliest) == p.launches == 30 + 6


def test_efficiency_is_the_least_time_over_the_predicted() -> None:
    s = Sketch()
    a, b = s.tensor(4096, 4096, dtype="bfloat16"), s.tensor(4096, 4096, dtype="bfloat16")
    s.op("mm", [a, b], [s.new(4096, 4096, dtype="bfloat16")])
    least = 2 * 4096**3 / H200.peak["bf16"]
    (row,) = predict_step(s.graph(), [OpTime(2 * least, 1, "matrix multiply", "model")], H200, HOST, draws=2).costliest
    assert row.efficiency == pytest.approx(0.5)
    assert row.limit == "compute"


def test_coverage_names_what_had_no_model() -> None:
    graph = training_step(2)
    sources = ["roofline" if op.name == "aten::relu" else "model" for op in graph.ops]
    times = [replace(t, source=s) for t, s in zip(times_of(graph, 10.0), sources, strict=True)]
    p = predict_step(graph, times, H200, HOST, draws=2)  # type: ignore[arg-type]
    assert p.coverage.fallback_ops == ("aten::relu",)
    assert p.coverage.modelled_fraction == pytest.approx(1 - sources.count("roofline") / len(sources))


def test_a_step_that_launches_nothing_is_the_hosts() -> None:
    s = Sketch()
    s.op("view", [s.tensor(4)], [], kernels=False)
    empty = Sketch().graph()
    nothing = [OpTime(0.0, 0, "elementwise", "none")]
    for graph, times in ((s.graph(), nothing), (empty, [])):
        p = predict_step(graph, times, H200, HOST, draws=5)
        assert p.bound == "host"
        assert p.gpu_active == p.launches == 0
        assert p.step.p50 > 0
        assert p.coverage.modelled_fraction == 1.0


def test_one_time_for_each_op() -> None:
    graph = training_step(2)
    with pytest.raises(ValueError, match="launches of 3"):
        predict_step(graph, times_of(graph, 1.0)[:3], H200, HOST)


def test_a_step_of_2500_kernels_takes_less_than_a_second() -> None:
    graph = training_step(500)
    times = times_of(graph, 20.0)
    predict_step(training_step(2), times_of(training_step(2), 1.0), H200, HOST)  # the engine is compiled once
    assert predict_step(graph, times, H200, HOST, draws=2).launches >= 2500
    assert quickest(lambda: predict_step(graph, times, H200, HOST)) < 1.0


# ---------------------------------------------------------------- the command, with kernel models of ours
run = runner(predict_command.command)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(api, "kernel_times", lambda graph, _: times_of(graph, 12.0))
    path = tmp_path / "step.presage"
    save.write(training_step(6), path)
    return path


def test_json_has_what_the_design_says(saved: Path) -> None:
    found = json.loads(run(saved, "--json", "-", "--draws", "40"))
    assert set(found["step_ms"]) == {"mean", "p5", "p50", "p95"}
    assert found["gpu_active_ms"] == pytest.approx(36 * 0.012)
    assert found["bound"] in ("gpu", "host", "communication")
    assert found["peak_memory_bytes"] > 0
    assert found["breakdown"]["matrix multiply"]["ms"] > 0
    assert sum(part["share"] for part in found["breakdown"].values()) == pytest.approx(1)
    assert found["coverage"]["modelled_fraction"] == 1.0
    assert found["coverage"]["fallback_ops"] == []
    assert len(found["costliest"]) <= 10
    assert found["draws"] == 40


def test_the_page_says_the_step_time_and_its_range(saved: Path) -> None:
    text = run(saved)
    for word in ("/step (90% interval ", "GPU active", "peak memory", "Costliest ops", "GEMM"):
        assert word in text
    assert "CPU-bound: the GPU waits for the host" in text


def test_the_timeline_has_a_row_for_each_lane(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert str(out) in run(saved, "--trace", out).replace("\n", "")
    events = json.loads(out.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "main thread",
        "autograd thread",
        "GPU stream",
    }
    assert sum(e["ph"] == "X" and e["tid"] == STREAM for e in events) == 5 * 36
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_errors_say_what_to_do(saved: Path) -> None:
    with pytest.raises(PresageError, match="saved graph, which takes no arguments"):
        run(saved, "--arg", "batch=8")
    with pytest.raises(PresageError, match="h300"):
        run(saved, "--gpu", "h300")
    with pytest.raises(PresageError, match="header"):
        run(saved, "--gpu", saved.parent)


def test_a_gpu_that_was_never_calibrated_is_predicted_and_says_so() -> None:
    here, there = (ps.predict(training_step(6), gpu=name, draws=60) for name in ("h200", "t4"))
    assert there.gpu_active > here.gpu_active
    assert any("not calibrated" in note for note in there.notes)
    assert not any("not calibrated" in note for note in here.notes)
    assert all("host unknown" in p.notes[-1] for p in (here, there) if p.bound == "host") and here.bound == "host"


def test_from_python(saved: Path) -> None:
    p = ps.predict(saved, gpu="h200", draws=20)
    assert p.to_json()["kind"] == "prediction"
    assert ps.predict(save.read(saved), draws=20).step == p.step
    with pytest.raises(PresageError, match="takes no arguments"):
        ps.predict(saved, arguments={"batch": 1})


# ---------------------------------------------------------------- the claims on measured steps
def case(name: str, step_ms: Sequence[float], active_ms: float) -> WorkloadCase:
    runs = [{"step_ms": s, "gpu_active_ms": active_ms, "peak_alloc": 1e6} for s in step_ms]
    return WorkloadCase(name, training_step(6), runs)


def test_claims_on_steps_are_scored_by_what_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from presage_validation import workloads

    graph = training_step(6)
    slow = predict_step(graph, times_of(graph, 1000.0), H200, HOST).step.p50 * 1e3
    monkeypatch.setattr(workloads, "kernel_times", lambda graph, _: times_of(graph, 1000.0))
    cases = [case("gpu", [slow, slow, 2 * slow], slow), case("host", [3 * slow], slow)]
    found = score_cases(iter(cases)).to_json()["metrics"]
    assert found["step_gpu_bound"]["n"] == found["step_host_bound"]["n"] == 1
    assert found["step_gpu_bound"]["mape"] == pytest.approx(0, abs=1e-9)
    assert found["step_host_bound"]["mape"] == pytest.approx(2 / 3)
    assert found["gpu_active"]["n"] == found["peak_memory"]["n"] == 2
    assert found["interval_hit_rate"] == 0.0
    near = case("host", [0.9 * slow, 1.01 * slow, 3 * slow], 0.9 * slow)
    assert score_cases(iter([near])).to_json()["metrics"]["interval_hit_rate"] == 1.0


@pytest.mark.parametrize(("name", "within"), [("graph_net", 0.03), ("two_tower", 0.3)])
def test_steps_from_measured_kernels(name: str, within: float) -> None:
    """One step of the GPU's and one of the host's, from the kernel times of their traces."""
    from presage.capture import capture, load_cases
    from presage.traces import kineto
    from presage_validation.capture import measured_times
    from presage_validation.workloads import measured_cases

    root = Path(__file__).resolve().parents[2]
    graph = capture(load_cases(root / "workloads" / "varied.py")[name], source=name)
    trace = kineto.read(root / "data" / "h200_varied" / f"{name}.json.gz")
    times = measured_times(graph, trace, trace.steps[-1])
    measured = measured_cases(root / "data" / "h200_varied" / "measured.json")[name][0]
    assert sum(t.seconds for t in times) * 1e3 == pytest.approx(measured["gpu_active_ms"], rel=0.02)
    p = predict_step(graph, times, H200, HOST, spread=StepSpread(HOST.pace, kernels=0.0))
    assert p.step.p50 * 1e3 == pytest.approx(measured["step_ms"], rel=within)


def test_programs_of_several_steps_have_their_lanes() -> None:
    graph = training_step(3)
    built = step_program(graph, times_of(graph, 5.0), HOST)
    many = program(built.tasks, 4, HOST.calls, [op.name for op in graph.ops])
    assert len(many) == 4 * len(built.tasks)
    assert many.label(int(np.flatnonzero(many.lane == STREAM)[0])) == "aten::mm"
    assert many.lanes[MAIN].name == "main thread"
