"""Replay: structure and durations alone give back the measured step; edits give what they must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from presage.errors import InputError, PresageError
from presage.traces import explain
from presage.traces.replay import Replay, measured_steps, replay_of
from presage.traces.trace_set import read_run
from presage.whatif import replay_edits as edits
from synthetic import Tracer, gpu_bound


def replay(*paths: Path, **options: bool) -> Replay:
    return replay_of(read_run(paths, **options))


def step_us(r: Replay, place: int = 0) -> float:
    return r.steps(r.simulate(), place)[-1].seconds * 1e6


def test_a_gpu_bound_step_is_its_kernels(tmp_path: Path) -> None:
    r = replay(gpu_bound().write(tmp_path / "t.json"))
    assert step_us(r) == pytest.approx(1100, abs=5)


def test_halving_the_kernels_of_a_gpu_bound_step(tmp_path: Path) -> None:
    r = replay(gpu_bound().write(tmp_path / "t.json"))
    faster = edits.scale("kernel", "gemm", 0.5)(r)
    # 10 x 50 us less of kernels; the sync then ends so much earlier, and the 60 us after it remain
    assert step_us(faster) == pytest.approx(600, abs=8)


def test_halving_host_time_of_a_gpu_bound_step_gains_nothing(tmp_path: Path) -> None:
    r = replay(gpu_bound().write(tmp_path / "t.json"))
    assert step_us(edits.scale("host", "op[1-9]", 0.5)(r)) == pytest.approx(step_us(r), abs=5)


def test_a_host_bound_step_follows_the_host(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 1000)
    for i in range(10):
        t.op("aten::add", 100 * i, 90)
        t.launch("add", 100 * i + 40, 100 * i + 47, 5)
    r = replay(t.write(tmp_path / "t.json"))
    assert step_us(r) == pytest.approx(1000, abs=1)
    assert step_us(edits.scale("kernel", "add", 2.0)(r)) == pytest.approx(1000, abs=1)
    assert step_us(edits.scale("host", "aten::add", 0.5)(r)) == pytest.approx(550, abs=2)
    assert step_us(edits.remove("op", "aten::add")(r)) == pytest.approx(100, abs=12)


def test_backward_waits_for_forward_and_the_other_way(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 1000)
    t.op("forward", 0, 300)
    t.launch("f", 50, 60, 5)
    t.op("backward", 320, 500, tid=2)
    t.launch("b", 400, 410, 5, tid=2)
    t.op("optimizer", 850, 150)
    r = replay(t.write(tmp_path / "t.json"))
    assert step_us(r) == pytest.approx(1000, abs=1)
    assert step_us(edits.scale("host", "backward", 0.5)(r)) == pytest.approx(750, abs=1)
    assert step_us(edits.scale("host", "forward", 0.5)(r)) == pytest.approx(850, abs=1)


def test_a_kernel_waits_for_one_of_another_stream(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 900)
    t.op("a", 0, 50)
    t.launch("long", 10, 20, 400, stream=20)
    t.launch("dependent", 30, 424, 100, stream=7)
    t.call("cudaDeviceSynchronize", 60, 468)
    r = replay(t.write(tmp_path / "t.json"))
    # one launch is no sample of this trace's launch latency: the usual 6 us stand in for its 10
    assert step_us(r) == pytest.approx(900, abs=5)
    assert step_us(edits.scale("kernel", "long", 0.5)(r)) == pytest.approx(700, abs=5)


def late_pair(folder: Path) -> list[Path]:
    """Two ranks meet in one all-reduce of 50 us; rank 1 sleeps 800 us first."""
    paths = []
    for rank, late in ((0, 0), (1, 800)):
        t = Tracer(rank, 2)
        t.step(0, 0, 1000)
        t.op("sleepy", 0, 50 + late)
        arrival = 100 + late
        t.op("all_reduce", 60 + late, 80)
        call = t.call("cudaLaunchKernelExC", 90 + late, 4)
        t.kernel("ncclDevKernel_AllReduce", arrival, 950 - arrival, call, stream=20)
        t.call("cudaStreamSynchronize", 150 + late, 805 - late)
        paths.append(t.write(folder / f"rank{rank}.json"))
    return paths


def test_the_wait_for_a_late_rank_emerges_and_is_blamed(tmp_path: Path) -> None:
    r = replay(*late_pair(tmp_path))
    assert [step_us(r, i) for i in (0, 1)] == pytest.approx([1000, 1000], abs=5)
    late = explain.lateness(r)
    assert [x.times_last for x in late] == [0, 1]
    assert late[0].waited == pytest.approx(800e-6, abs=2e-6)
    assert explain.activity(r, 0).waiting_for_ranks == pytest.approx(800e-6, abs=2e-6)


def test_dropping_the_late_rank(tmp_path: Path) -> None:
    r = replay(*late_pair(tmp_path))
    levelled = edits.drop_rank_delay(1)(r)
    assert [step_us(levelled, i) for i in (0, 1)] == pytest.approx([200, 200], abs=8)


def test_ranks_in_any_order_are_one_run(tmp_path: Path) -> None:
    paths = late_pair(tmp_path)
    assert step_us(replay(*paths)) == step_us(replay(*paths[::-1]))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    paths = [Tracer(r, 4) for r in (0, 1, 3)]
    for i, t in enumerate(paths):
        t.launch("gemm", 1, 10, 5)
        t.write(tmp_path / f"{i}.json")
    files = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="rank 2 of 4 missing"):
        read_run(files)
    assert len(read_run(files, partial=True)) == 3


def test_one_rank_twice_is_named(tmp_path: Path) -> None:
    paths = late_pair(tmp_path)
    with pytest.raises(InputError, match="is rank 1, as is"):
        read_run([paths[0], paths[1], paths[1]])


def test_no_gpu_events_is_named(tmp_path: Path) -> None:
    t = Tracer()
    t.op("aten::add", 0, 5)
    path = t.write(tmp_path / "t.json")
    with pytest.raises(InputError, match="no GPU events"):
        read_run([path])
    assert step_us(replay(path, need_gpu=False)) == pytest.approx(5)


@pytest.mark.parametrize("text", ["kernel=gemm", "kernel=gemm:-1", "gemm:2", "banana=x:2", "kernel=:2", "kernel=x:nan"])
def test_bad_scales_say_the_form(text: str) -> None:
    with pytest.raises(PresageError, match="TARGET=REGEX"):
        edits.parse_scale(text)


def test_an_edit_that_hits_nothing_says_so(tmp_path: Path) -> None:
    r = replay(gpu_bound().write(tmp_path / "t.json"))
    with pytest.raises(PresageError, match="no kernel matches"):
        edits.scale("kernel", "conv", 0.5)(r)
    with pytest.raises(PresageError, match="not a regular expression"):
        edits.scale("kernel", "(", 0.5)(r)


def test_activity_adds_up(tmp_path: Path) -> None:
    r = replay(gpu_bound().write(tmp_path / "t.json"))
    a = explain.activity(r, 0)
    assert a.compute + a.exposed_communication + a.idle.total == pytest.approx(a.span)
    assert a.compute == pytest.approx(1000e-6)
    assert a.idle.gap == pytest.approx(9 * 2e-6, abs=3e-6)


def sets(shared: Path) -> dict[str, list[Path]]:
    traces = shared / "traces"
    runs = {"megatron": sorted((traces / "megatron_tp8_a100").glob("kineto_*"))}
    runs["dlrm"] = sorted((traces / "dlrm_8xv100").glob("kineto_*"))
    for folder in sorted((traces / "torchrec_dlrm_4xv100").iterdir()):
        runs[folder.name] = sorted(folder.glob("rank_*"))
    return runs


def test_multi_rank_replay(shared: Path) -> None:
    """Every rank's median step error within 2 % on each whole run."""
    for name, paths in sets(shared).items():
        r = replay(*paths)
        timeline = r.simulate()
        for i in range(len(r.run)):
            pairs = zip(measured_steps(r, i), r.steps(timeline, i), strict=True)
            errors = [abs(p.seconds / m.seconds - 1) for m, p in pairs]
            assert np.median(errors) <= 0.02, (name, i, errors)


def test_the_injected_sleep_is_found(shared: Path) -> None:
    """Rank 2 slept a second in every step of these runs; without it the steps are a tenth as long."""
    for name in ("sleep_pl_dense_after_backward_2", "long_a2a_optimizer"):
        r = replay(*sets(shared)[name])
        late = explain.lateness(r)
        assert max(late, key=lambda x: x.made_others_wait).rank == 2
        levelled = edits.drop_rank_delay(2)(r)
        before, after = r.steps(r.simulate(), 0), levelled.steps(levelled.simulate(), 0)
        gained = [b.seconds - a.seconds for b, a in zip(before, after, strict=True)]
        assert all(0.85 <= g <= 1.01 for g in gained), gained


def test_the_late_ranks_of_megatron(shared: Path) -> None:
    late = explain.lateness(replay(*sets(shared)["megatron"]))
    worst = sorted(late, key=lambda x: -x.made_others_wait)[:2]
    assert {x.rank for x in worst} == {0, 6}


def test_collectives_that_cannot_have_met_are_not_matched(tmp_path: Path) -> None:
    """Same kind, same order, but an iteration apart: each rank keeps its own, and they are counted."""
    for rank, at in ((0, 100), (1, 5000)):
        t = Tracer(rank, 2)
        t.step(0, 0, 6000)
        t.op("all_reduce", at - 20, 10)
        t.kernel("ncclDevKernel_AllReduce", at, 50, t.call("cudaLaunchKernelExC", at - 10, 4), stream=20)
        t.kernel("ncclDevKernel_AllReduce", 5500, 50, t.call("cudaLaunchKernelExC", 5400, 4), stream=20)
        t.kernel("ncclDevKernel_AllReduce", 5700, 50, t.call("cudaLaunchKernelExC", 5600, 4), stream=20)
        t.write(tmp_path / f"{rank}.json")
    run = read_run(sorted(tmp_path.iterdir()))
    assert (len(run.meetings), run.mismatched) == (2, 1)
    assert step_us(replay_of(run)) == pytest.approx(6000, abs=3)
