"""Host overheads: exact on traces built by hand, laws on real ones, and the profiler's cost against measured steps."""

from __future__ import annotations

import csv
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.traces import kineto
from presage.traces import overheads as ov
from presage.traces.overheads import ANY, Kind, Overheads, Role, Samples, extract, overheads, pool, segments
from presage.traces.trace import HostKind, Trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import profiler_cost as pc

US = 1e-6
Event = dict[str, Any]
MAIN, BACK = 1, 2  # thread ids
Write = Callable[..., Trace]


def host(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def op(name: str, ts: float, dur: float, tid: int = MAIN) -> Event:
    return host("cpu_op", name, ts, dur, tid)


def call(name: str, ts: float, dur: float, id: int = 0, tid: int = MAIN) -> Event:
    return host("cuda_runtime", name, ts, dur, tid, correlation=id)


def region(name: str, ts: float, dur: float, tid: int = MAIN) -> Event:
    return host("user_annotation", name, ts, dur, tid)


def kernel(ts: float, dur: float, id: int) -> Event:
    return host("kernel", "k", ts, dur, 7, stream=7, device=0, correlation=id)


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(*events: Event, gpus: tuple[str, ...] = ("Some GPU",), name: str = "trace.json", **more: Any) -> Trace:
        path = tmp_path / name
        path.write_text(json.dumps({"deviceProperties": [{"name": g} for g in gpus], "traceEvents": events, **more}))
        return kineto.read(path)

    return write


def us(samples: Samples, kind: Kind, key: str, role: Role = Role.MAIN) -> list[float]:
    """The samples of one overhead in microseconds, sorted."""
    at = (samples.kind == kind) & (samples.role == role) & (samples.key == samples.keys.index(key))
    return sorted((samples.ns[at] / 1000).tolist())


def kinds(samples: Samples) -> set[Kind]:
    return {Kind(k) for k in samples.kind}


# --- by hand ---------------------------------------------------------------------------------------------------------

LINEAR = [
    op("aten::linear", 100, 50),
    op("aten::addmm", 105, 40),
    call("cudaLaunchKernel", 110, 6, 1),
    call("cudaPeekAtLastError", 117, 1),
    call("cudaMemsetAsync", 121, 4, 2),
    kernel(118, 2, 1),
    kernel(126, 2, 2),
]


def test_one_op_is_cut_at_its_launches(written: Write) -> None:
    s = extract(written(*LINEAR))
    assert us(s, Kind.T2, "aten::linear") == [10]
    assert us(s, Kind.T4, "cudaLaunchKernel") == [6]
    assert us(s, Kind.T5, "aten::linear") == [5]
    assert us(s, Kind.T4, "cudaMemsetAsync") == [4]
    assert us(s, Kind.T3, "aten::linear") == [25]
    assert kinds(s) == {Kind.T2, Kind.T3, Kind.T4, Kind.T5}


def test_events_count_where_they_are_recorded(written: Write) -> None:
    cut = segments(written(*LINEAR))
    by_kind = {Kind(k): int(cut.events[cut.kind == k].sum()) for k in set(cut.kind.tolist())}
    # addmm in T2, the calls in their T4s, the call that launches nothing in T5, the op itself before it
    assert by_kind == {Kind.T2: 1, Kind.T4: 2, Kind.T5: 1, Kind.T3: 0, Kind.REGION: 1}


def test_net_of_the_profiler(written: Write) -> None:
    table = overheads(extract(written(*LINEAR)), per_event_cost_ns=4500).table
    net = {k[0]: x.mean / US for k, x in table.items() if k[1] == "aten::linear"}
    assert net == pytest.approx({Kind.T2: 5.5, Kind.T5: 0.5, Kind.T3: 25})
    assert table[Kind.T4, "cudaMemsetAsync", Role.MAIN].mean == 0, "never below nothing"


def test_between_ops_of_one_region(written: Write) -> None:
    s = extract(
        written(
            region("ProfilerStep#4", 0, 100),
            op("aten::a", 10, 5),
            op("aten::b", 18, 5),
            call("cudaStreamIsCapturing", 24, 1),
            op("aten::b", 27, 5),
            region("Optimizer.step#Adam.step", 50, 40),
            op("aten::c", 60, 5),
        )
    )
    assert us(s, Kind.T1, "aten::b") == [3, 4], "a call that launches nothing is part of the gap"
    assert us(s, Kind.REGION, "Optimizer.step#Adam.step") == [28, 35]
    assert us(s, Kind.REGION, "ProfilerStep") == [10]
    assert us(s, Kind.ALONE, "aten::a") == [5]
    assert not {Kind.T2, Kind.T3, Kind.T4, Kind.T5} & kinds(s)


def test_markers_written_as_operators_are_regions(written: Write) -> None:
    old = [
        host("Operator", "ProfilerStep#1", 0, 40),
        host("Operator", "aten::a", 5, 3),
        host("Operator", "aten::a", 9, 3),
    ]
    s = extract(written(*old))
    assert us(s, Kind.ALONE, "aten::a") == [3, 3]
    assert us(s, Kind.T1, "aten::a") == [1]


def test_backward_ops_lose_the_engine_and_have_their_thread(written: Write) -> None:
    wrapper = "autograd::engine::evaluate_function: MmBackward0"
    s = extract(
        written(
            op("aten::mm", 0, 10),
            op(wrapper, 20, 30, BACK),
            op("MmBackward0", 22, 20, BACK),
            call("cudaLaunchKernel", 30, 5, 1, BACK),
            kernel(40, 1, 1),
        )
    )
    assert us(s, Kind.T2, "MmBackward0", Role.AUTOGRAD) == [10]
    assert us(s, Kind.T3, "MmBackward0", Role.AUTOGRAD) == [15]
    assert us(s, Kind.ALONE, "aten::mm", Role.MAIN) == [10]


def test_threads_without_ops_are_left_out(written: Write) -> None:
    trace = written(op("aten::a", 0, 5), call("cudaEventQuery", 1, 2, tid=9))
    assert len(set(segments(trace).thread.tolist())) == 1
    trace = written(op("aten::a", 0, 5), op("aten::load", 1, 2, tid=9), op("aten::a", 6, 5))
    assert us(extract(trace), Kind.ALONE, "aten::load", Role.OTHER) == [2]


def test_of_nested_calls_the_inner_launch_counts(written: Write) -> None:
    s = extract(
        written(
            op("aten::a", 0, 40),
            call("cudaLaunchKernelExC", 10, 20, 1),
            call("cuLaunchKernelEx", 14, 10, 2),
            kernel(40, 1, 1),
            kernel(42, 1, 2),
        )
    )
    assert us(s, Kind.T4, "cuLaunchKernelEx") == [10]
    assert us(s, Kind.T2, "aten::a") == [14]
    assert us(s, Kind.T3, "aten::a") == [16]


def test_a_launch_outside_ops_is_all_launch(written: Write) -> None:
    s = extract(
        written(op("aten::a", 0, 5), call("cudaGraphLaunch", 8, 30, 1), *(kernel(40 + i, 1, 1) for i in range(3)))
    )
    assert us(s, Kind.T4, "cudaGraphLaunch") == [30], "once, however many kernels"
    assert us(s, Kind.T1, "cudaGraphLaunch") == [3]
    assert not {Kind.T2, Kind.T3, Kind.T5} & kinds(s)


def test_waits_for_the_gpu_are_no_overhead(written: Write) -> None:
    s = extract(
        written(
            op("aten::mm", 0, 10),
            call("cudaLaunchKernel", 2, 5, 1),
            kernel(12, 900, 1),
            op("aten::item", 20, 1000),
            call("cudaMemcpyAsync", 30, 885, 2),
            call("cudaStreamSynchronize", 920, 30),
            host("gpu_memcpy", "Memcpy", 913, 20, 7, stream=7, device=0, correlation=2),
        )
    )
    assert us(s, Kind.BLOCKED, "cudaMemcpyAsync") == [885], "a launch that waited is no T4"
    assert us(s, Kind.BLOCKED, "cudaStreamSynchronize") == [30]
    assert us(s, Kind.T2, "aten::item") == [10]
    assert us(s, Kind.T3, "aten::item") == [75], "5 before the wait, 70 after"
    assert us(s, Kind.T4, "cudaLaunchKernel") == [5]


def test_silence_while_another_thread_works(written: Write) -> None:
    s = extract(
        written(
            region("ProfilerStep#0", 0, 300),
            op("aten::loss", 0, 10),
            op("autograd::engine::evaluate_function: B", 30, 100, BACK),
            op("autograd::engine::evaluate_function: B", 134, 100, BACK),
            op("aten::next", 240, 10),
        )
    )
    assert us(s, Kind.SILENCE, "aten::next") == [230]
    assert us(s, Kind.T1, "B", Role.AUTOGRAD) == [4]
    assert Kind.T1 not in {Kind(k) for k in s.kind[s.role == Role.MAIN]}


def test_skipping_the_first_step(written: Write) -> None:
    steps = [
        region("ProfilerStep#0", 0, 20),
        op("aten::a", 1, 9),
        region("ProfilerStep#1", 30, 20),
        op("aten::a", 31, 4),
    ]
    trace = written(*steps)
    assert us(extract(trace), Kind.ALONE, "aten::a") == [4, 9]
    assert us(extract(trace, skip_steps=1), Kind.ALONE, "aten::a") == [4]
    assert len(extract(trace, skip_steps=2).ns) == len(extract(trace).ns), "no such step: taken whole"


def test_a_trace_without_host_events(written: Write) -> None:
    assert overheads(extract(written(kernel(0, 1, 1)))).table == {}


# --- sums ------------------------------------------------------------------------------------------------------------


def test_the_cut_is_told_and_nothing_is_lost() -> None:
    x = ov.overhead(np.array([5.0] * 90 + [6.0] * 9 + [500.0]) * US)
    assert (x.n, x.cut) == (99, 1), "one tick of a whole-microsecond clock is no outlier"
    assert x.cut_total == pytest.approx(500 * US)
    assert x.mean == pytest.approx((90 * 5 + 9 * 6) / 99 * US)
    assert ov.overhead(np.array([1.0, 2.0, 900.0])).cut == 0, "three are too few to call one an outlier"


def test_spread_of_known_samples() -> None:
    x = ov.overhead(np.arange(0.0, 11.0))
    assert (x.n, x.cut, x.mean, x.median, x.p10, x.p90, x.mad) == (11, 0, 5, 5, 1, 9, 3)
    assert x.std == pytest.approx(np.sqrt(10))


def test_pooling_is_extracting_from_both(written: Write) -> None:
    later = [{**e, "ts": e["ts"] + 1000, "args": {"correlation": e["args"].get("correlation", 0) + 10}} for e in LINEAR]
    later = [{**e, "args": {**e["args"], "stream": 7, "device": 0}} for e in later] + [op("aten::only_here", 1200, 3)]
    a, b = written(*LINEAR, name="a.json"), written(*later, name="b.json", gpus=("Other GPU",), with_stack=1)
    together = pool([extract(a), extract(b)])
    both = extract(written(*LINEAR, *later))
    for kind in set(Kind) - {Kind.T1, Kind.REGION}:
        for key in set(both.keys):
            here = us(together, kind, key) if key in together.keys else []
            assert here == us(both, kind, key)
    about = together.platform
    assert (about.gpus, about.traces, about.with_stacks) == (("Some GPU", "Other GPU"), ("a.json", "b.json"), 1)


def of_samples(ns: list[int], kind: Kind = Kind.T2, key: str = "aten::a") -> Samples:
    n = len(ns)
    columns = [np.full(n, kind, np.int64), np.full(n, Role.MAIN, np.int64), np.zeros(n, np.int64)]
    return Samples(*columns, np.array(ns, np.int64), np.zeros(n, np.int64), (key,), ov.TracePlatform(("G",), ("t",)))


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_saved_table_is_toml_with_all_its_values(written: Write, tmp_path: Path) -> None:
    odd = 'quote " backslash \\ newline \n tab \t delete \x7f é = [x] # y'
    before = overheads(extract(written(*LINEAR, op(odd, 200, 3), gpus=('A "G"', "B"))), per_event_cost_ns=250)
    path = tmp_path / "out.toml"
    before.to_toml(path)
    after = tomllib.loads(path.read_text())
    assert (after["gpus"], after["per_event_cost_us"]) == (['A "G"', "B"], 0.25)
    for (kind, key, role), x in before.table.items():
        row = after[kind.name][role.name.lower()][key]
        assert row == pytest.approx(
            {f if f in ("n", "cut") else f"{f}_us": v if f in ("n", "cut") else v / US for f, v in vars(x).items()},
            abs=1e-4,
        )
    assert "mean_us = 9.75" in path.read_text() and not list(tmp_path.glob("*.part"))


# --- laws ------------------------------------------------------------------------------------------------------------


def check_laws(trace: Trace, may_overlap: int = 0) -> None:
    """Segments cover each op and each thread to the nanosecond, and every event is counted once."""
    h, cut = trace.host, segments(trace)
    assert (cut.ns >= 0).all()
    for t in set(cut.thread.tolist()):
        on, mine = cut.thread == t, h.thread == t
        assert cut.ns[on].sum() == h.end[mine].max() - h.start[mine].min()
        assert cut.events[on].sum() == mine.sum()
    inside = cut.unit >= 0
    total = np.zeros(len(h), np.int64)
    np.add.at(total, cut.unit[inside], cut.ns[inside])
    units = np.unique(cut.unit[inside])
    off = total[units] != (h.end - h.start)[units]
    assert off.sum() <= may_overlap


@st.composite
def nested(draw: st.DrawFn) -> list[Event]:
    """Ops, regions and calls nested at random on two threads, some calls with kernels."""
    ids = iter(range(1, 1000))

    def fill(lo: int, hi: int, depth: int, tid: int) -> Iterator[Event]:
        while hi - lo > 2 and draw(st.booleans()):
            start = draw(st.integers(lo, hi - 1))
            end = draw(st.integers(start, hi))
            kind = draw(st.sampled_from(["cpu_op", "user_annotation", "cuda_runtime"]))
            id = next(ids)
            yield host(
                kind, draw(st.sampled_from(["a", "b", "cudaMemcpyAsync"])), start, end - start, tid, correlation=id
            )
            if kind == "cuda_runtime" and draw(st.booleans()):
                yield kernel(draw(st.integers(start, start + 40)), draw(st.integers(0, 50)), id)
            if depth:
                yield from fill(start, end, depth - 1, tid)
            lo = end

    return [op("first", 0, 1), *fill(1, 400, 4, MAIN), *fill(50, 300, 2, BACK)]


@given(events=nested())
def test_laws_on_random_traces(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = tmp_path_factory.getbasetemp() / "random.json"
    path.write_text(json.dumps({"traceEvents": events}))
    check_laws(kineto.read(path))


@cache
def real(path: Path) -> Trace:
    return kineto.read(path)


REAL = [
    "traces/dlrm_8xv100/kineto_0.json.gz",
    "traces/megatron_tp8_a100/kineto_3.json.gz",
    "traces/kineto_resnet50_v100/resnet50_num_workers_0/worker0.1623143089861.json.gz",
    "traces/hta/dlrm_a100_rank3of8.json.gz",
    "traces/hta/cpu_only_rank34of300.json.gz",
    "traces/hta/minitoy_train_mi250.json.gz",
    "traces/tiny_transformer_h100/run_0.json.gz",
    "traces/tracelens/b200/vllm_eager_rank0of8.json.gz",
    "traces/sglang_gptoss120b_tp8_b200/extend_rank_3.json.gz",
    "h200/traces/dlrm_ddp_b1024_l100.json.gz",
    "h200/traces/gpt2_medium_b8_s1024_tf32.json.gz",
]


@pytest.mark.parametrize("file", REAL)
def test_laws_on_real_traces(shared: Path, file: str) -> None:
    check_laws(real(shared / file))


def test_laws_where_host_clocks_disagree(shared: Path) -> None:
    # calls stamped by another clock than ops stick out of them: one or two ops of a file then overlap their neighbour
    for rank in range(4):
        check_laws(real(shared / f"traces/torchrec_dlrm_4xv100/sleep_pl_dense_after_backward_2/rank_{rank}.json.gz"), 2)


def test_large_traces_are_quick(shared: Path) -> None:
    trace = real(shared / "traces/hta/dlrm_a100_rank3of8.json.gz")
    assert len(trace.host) > 65_000

    def took() -> float:
        start = time.process_time()
        overheads(extract(trace))
        return time.process_time() - start

    assert min(took() for _ in range(3)) < 0.5


def test_launch_calls_agree_with_the_published_medians(shared: Path) -> None:
    rows = list(csv.DictReader((shared / "traces/CHECK.tsv").open(), delimiter="\t"))
    small = ("dlrm_8xv100", "tiny_", "tracelens/h100/F", "tracelens/h100/g", "tracelens/b200", "sglang", "megatron")
    rows = [r for r in rows if r["file"].startswith(small)]
    assert len(rows) >= 25
    for row in rows:
        s = extract(real(shared / "traces" / row["file"]))
        launch = np.array(["LaunchKernel" in k for k in s.keys])[s.key] & (s.kind == Kind.T4)
        assert np.median(s.ns[launch]) / 1000 == pytest.approx(
            float(row["launch_call_median_us"].rstrip("us")), abs=0.51e-2
        )


def test_op_overheads_are_alike_between_recommendation_cases(shared: Path) -> None:
    cases = ["default_b2048", "default_b512_l32", "mlperf_b2048", "ddp_b4096_l64_zipf", "ddp_b1024_l100"]
    tables = [overheads(extract(real(shared / f"h200/traces/dlrm_{c}.json.gz"), skip_steps=1)) for c in cases]
    for kind in (Kind.T2, Kind.T3):
        for key in ("aten::linear", "aten::relu"):
            seen = np.array([t.table[kind, key, Role.MAIN].median for t in tables])
            assert seen.std() / seen.mean() < 0.35
    hosts = {t.platform.gpus for t in tables}
    assert hosts == {("NVIDIA H200",)}


# --- the profiler's cost ---------------------------------------------------------------------------------------------


def step(name: str, unprofiled: float, events: int, pace: float, cost: float) -> pc.ProfiledStep:
    return pc.ProfiledStep(name, unprofiled + events * cost, unprofiled, events, pace)


def test_a_constant_cost_is_found_exactly() -> None:
    found = pc.profiler_cost([step("a", 1e-2, 1000, 1 * US, 2 * US), step("b", 3e-2, 500, 4 * US, 2 * US)])
    assert (found.n, found.per_event.median) == (2, pytest.approx(2 * US))
    assert found.mean_error("per event") == pytest.approx(0, abs=1e-12)
    assert found.left_out["as seen"] == pytest.approx((0.2, 1 / 30))
    assert found.mean_error("per pace") > 0.01


def test_a_cost_that_follows_the_host_is_found_exactly() -> None:
    found = pc.profiler_cost([step("a", 1e-2, 1000, 1 * US, 1.5 * US), step("b", 3e-2, 500, 4 * US, 6 * US)])
    assert found.per_pace.median == pytest.approx(1.5)
    assert found.mean_error("per pace") == pytest.approx(0, abs=1e-12)


def test_pace_and_step_of_a_known_trace(written: Write) -> None:
    outer = [op("aten::t", 20 * i, 10 + i) for i in range(8)]
    inner = [op("aten::transpose", 20 * i + 2, 8) for i in range(8)]
    waits = [call("cudaLaunchKernel", 161, 2, 1), kernel(165, 25, 1), call("cudaDeviceSynchronize", 170, 22)]
    trace = written(region("ProfilerStep#0", 0, 200), *outer, *inner, *waits)
    assert pc.pace(trace) == pytest.approx((2 + 3 + 4 + 5) / 4 * US), "the shorter half"
    assert pc.per_event_cost(trace) == pytest.approx(pc.PER_PACE * 3.5 * US)
    found = pc.profiled_step(trace, 100 * US)
    assert (found.profiled, found.events) == (pytest.approx((200 - 22) * US), 19)
    assert pc.per_event_cost(written(*LINEAR)) == pc.PER_EVENT, "nothing nests, so the usual cost"


def host_bound(shared: Path) -> dict[str, dict[str, Any]]:
    cases = json.loads((shared / "h200/measured.json").read_text())["cases"]
    return {
        n: c for n, c in cases.items() if c["b"]["gpu_active_ms"] < 0.93 * np.median([r["step_ms"] for r in c.values()])
    }


@pytest.mark.slow
def test_the_profiler_cost_told_in_the_docstring(shared: Path) -> None:
    cases = host_bound(shared)
    assert len(cases) == 12
    traces = {n: real(shared / f"h200/traces/{n}.json.gz") for n in cases}
    steps = [pc.profiled_step(t, cases[n]["b"]["step_ms"] / 1e3) for n, t in traces.items()]
    found = pc.profiler_cost(steps)
    assert found.per_event.median == pytest.approx(pc.PER_EVENT, rel=0.01)
    assert found.per_pace.median == pytest.approx(pc.PER_PACE, rel=0.01)
    errors = {rule: round(found.mean_error(rule), 2) for rule in found.left_out}
    assert errors == {"as seen": 0.40, "per event": 0.18, "per pace": 0.12, "factor": 0.13}
    first = [pc.profiled_step(t, cases[n]["b"]["step_ms"] / 1e3, step=0) for n, t in traces.items()]
    assert pc.profiler_cost(first).mean_error("per pace") > found.mean_error("per pace")


def test_net_segments_add_up_to_the_step_less_the_cost(shared: Path) -> None:
    trace = real(shared / "h200/traces/gpt_350m_b1_s256_amp.json.gz")
    cost = pc.per_event_cost(trace)
    s = extract(trace)
    work = np.isin(s.kind, (Kind.T1, Kind.T2, Kind.T3, Kind.T4, Kind.T5, Kind.ALONE))
    exact = s.ns[work].sum() * 1e-9 - cost * s.events[work].sum()
    table = overheads(s, cost * 1e9).table
    added = sum(x.n * x.mean + x.cut_total for k, x in table.items() if k[1] != ANY and k[0] <= Kind.ALONE)
    assert added == pytest.approx(exact, rel=0.01), "what stops at 0 is little"
    assert (trace.host.kind == HostKind.ANNOTATION).sum() < 10


def test_overheads_of_nothing_are_an_empty_table() -> None:
    assert overheads(of_samples([])) == Overheads({}, ov.TracePlatform(("G",), ("t",)))
