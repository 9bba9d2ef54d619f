"""What-ifs of traces by name: each gains what the trace has of it, and nothing that is off the critical path."""

from __future__ import annotations

from pathlib import Path

import pytest

from presage.errors import PresageError
from presage.traces.replay import Replay, replay_of
from presage.traces.trace_set import read_run
from presage.whatif.replay_edits import edited, remove
from presage.whatif.replay_effect import ReplayEffect, replay_effect
from presage.whatif.replay_names import EDITS, parse
from synthetic import Tracer, gpu_bound


def replay(tracer: Tracer, folder: Path) -> Replay:
    return replay_of(read_run([tracer.write(folder / "t.json")]))


def step_us(r: Replay, place: int = 0) -> float:
    return r.steps(r.simulate(), place)[-1].seconds * 1e6


def applied(r: Replay, text: str) -> Replay:
    return edited(r, parse(text))


def told(r: Replay, changed: Replay) -> ReplayEffect:
    return replay_effect(r, changed, r.simulate(), changed.simulate())


def host_bound(steps: int = 1) -> Tracer:
    """Ten kernels of 20 us, an op of 90 us each."""
    t = Tracer()
    for k in range(steps):
        at = 1000 * k
        t.step(k, at, 1000)
        for i in range(10):
            t.op("aten::add", at + 100 * i, 90)
            t.launch("add", at + 100 * i + 40, at + 100 * i + 47, 20)
    return t


def waiting() -> Tracer:
    """Twice: a kernel of 200 us, the host waits for it, then works 100 us while the GPU idles; a last launch."""
    t = Tracer()
    t.step(0, 0, 700)
    for at in (0, 300):
        t.op("aten::mm", at, 20)
        t.launch("gemm", at + 5, at + 12, 200)
        t.op("aten::item", at + 22, 195)
        t.call("cudaStreamSynchronize", at + 24, 190)
        t.op("aten::add", at + 218, 80)
    t.op("aten::mul", 600, 90)
    t.launch("mul", 610, 617, 10)
    return t


def test_a_graph_leaves_a_host_bound_step_to_its_kernels(tmp_path: Path) -> None:
    r = replay(host_bound(3), tmp_path)
    graphed = applied(r, "cuda_graph")
    assert step_us(r) == pytest.approx(1000, abs=2)
    # ten kernels and the gaps of a graph; the step before is done when its last kernel is
    assert step_us(graphed) == pytest.approx(203, abs=8)
    why = told(r, graphed)
    assert why.before["host"] > 0.95 and why.after["kernel"] > 0.8
    assert why.on_path == pytest.approx(step_us(r) * 3e-6, rel=0.05), "all of the host's time was on it"
    assert "of work go, " in why.reason and "then the path is" in why.reason


def test_a_graph_of_a_gpu_bound_step_gains_its_gaps_alone(tmp_path: Path) -> None:
    r = replay(gpu_bound(), tmp_path)
    assert step_us(r) - step_us(applied(r, "cuda_graph")) == pytest.approx(10 * 1.7 + 60, abs=12)


def test_a_graph_ends_where_the_host_waits(tmp_path: Path) -> None:
    """Three graphs, with the waits between them: 200 us twice and 10, and the way back from each wait."""
    assert step_us(applied(replay(waiting(), tmp_path), "cuda_graph")) == pytest.approx(450, abs=35)


def test_loading_of_data_is_no_part_of_a_graph(tmp_path: Path) -> None:
    t = host_bound()
    t.add("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 960, 38)
    whole = replay(t, tmp_path)
    assert step_us(applied(whole, "cuda_graph")) - step_us(applied(replay(host_bound(), tmp_path), "cuda_graph")) >= 0
    goes = whole.durations - applied(whole, "cuda_graph").durations
    loading = [i for i in range(len(whole.program)) if "DataLoader" in whole.program.label(i)]
    assert loading and not goes[loading].any()


def test_without_syncs_the_host_runs_ahead(tmp_path: Path) -> None:
    r = replay(waiting(), tmp_path)
    free = applied(r, "no_sync")
    assert step_us(r) == pytest.approx(700, abs=5)
    assert step_us(free) < 0.75 * step_us(r)
    assert told(r, free).waits == 2 and "2 waits go" in told(r, free).reason
    assert step_us(applied(r, "no_sync=aten::item")) == step_us(free)
    with pytest.raises(PresageError, match="no call that matches 'copy' waits for the GPU"):
        applied(r, "no_sync=copy")


def test_the_wait_at_a_traces_end_is_the_profilers(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match="no_sync: no call waits for the GPU"):
        applied(replay(gpu_bound(), tmp_path), "no_sync")


def test_a_faster_kernel_counts_on_the_path_only(tmp_path: Path) -> None:
    bound, free = replay(gpu_bound(), tmp_path), replay(host_bound(), tmp_path)
    assert step_us(applied(bound, "faster=gemm:2")) == pytest.approx(600, abs=8)
    faster = applied(free, "faster=add:2")
    assert step_us(faster) == pytest.approx(step_us(free), abs=12)
    assert told(bound, applied(bound, "faster=gemm:2")).on_path == pytest.approx(500e-6, rel=0.02)
    assert told(free, faster).on_path <= 10e-6, "the last kernel at most"


def test_a_faster_host(tmp_path: Path) -> None:
    assert step_us(applied(replay(host_bound(), tmp_path), "host=2")) == pytest.approx(500, abs=5)
    r = replay(gpu_bound(), tmp_path)
    assert step_us(applied(r, "host=2")) == pytest.approx(step_us(r) - 30, abs=8)


def collective() -> Tracer:
    """A collective of 400 us on a stream of its own; a kernel of 300 us waits for it, though launched long before."""
    t = Tracer()
    t.step(0, 0, 900)
    t.op("a", 0, 60)
    t.launch("ncclDevKernel_AllReduce", 10, 20, 400, stream=20)
    t.launch("gemm", 30, 424, 300, stream=7)
    t.call("cudaDeviceSynchronize", 70, 660)
    return t


def test_overlap_lets_kernels_run_beside_collectives(tmp_path: Path) -> None:
    r = replay(collective(), tmp_path)
    beside = applied(r, "overlap")
    assert step_us(r) - step_us(beside) == pytest.approx(304, abs=12), "the step still ends after the collective"
    assert told(r, beside).waits == 1
    with pytest.raises(PresageError, match="no kernel of the trace waits for a collective"):
        applied(replay(gpu_bound(), tmp_path), "overlap")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda_grph", "did you mean cuda_graph"),
        ("cuda_graph=2", "takes no value"),
        ("faster=gemm", "write faster=REGEX:F"),
        ("faster=gemm:0", "a factor above 0"),
        ("host=fast", "a factor above 0"),
        ("no_sync=(", "is not a regular expression"),
        ("fused_adam", "unknown edit"),
    ],
)
def test_mistakes_get_a_sentence(text: str, message: str) -> None:
    with pytest.raises(PresageError, match=message):
        parse(text)


def test_edits_by_name_go_with_the_others(tmp_path: Path) -> None:
    r = replay(host_bound(), tmp_path)
    both = edited(r, [remove("op", "aten::add"), *parse("host=2,faster=add:2")])
    assert step_us(both) < 0.2 * step_us(r)
    assert all(e.rule.endswith(".") for e in EDITS.values())


def test_a_cuda_graph_costs_what_it_does_in_predictions() -> None:
    from presage.costs.host_model import host_model
    from presage.whatif.replay_names import REPLAY_CALL, REPLAY_GAP

    calls = host_model("h200").calls
    assert pytest.approx((calls.replay_call_us * 1e-6, calls.replay_gap_us * 1e-6)) == (REPLAY_CALL, REPLAY_GAP)
