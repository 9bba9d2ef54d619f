"""CUDA graphs in graphs and predictions, code that runs otherwise while it is read, and copies over PCIe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import presage as ps
from graph_sketches import Sketch, training_step
from presage.capture.variants import Variant
from presage.costs.calibrated_kernels import host_bytes, host_copy, host_copy_seconds
from presage.graph.graph import HOST_MEMORY, PINNED_MEMORY, STAGED, Graph
from presage.hardware import gpu
from presage.prediction.machine import kernel_times, machine
from presage.prediction.step import step_program
from presage.prediction.step_program import MAIN
from presage.prediction.stream_dependencies import crossings
from presage.whatif import what_if
from presage.whatif.edits import NotApplicable, cuda_graph

H200 = machine("h200")
STEP = training_step(6, rows=128, width=128)


def built(graph: Graph) -> Any:
    return step_program(graph, kernel_times(graph, H200), H200.host)


def test_one_host_task_starts_all_kernels_of_a_graph() -> None:
    tasks = built(cuda_graph(STEP)).tasks
    assert len(set(tasks.launch.tolist())) == 1 and len(tasks.kernel) > 10
    assert (tasks.lane[tasks.launch] == MAIN).all()
    launch, kernel = tasks.queued
    assert len(launch) == 1 and kernel[0] == tasks.kernel[-1]


def test_a_graph_takes_its_kernels_a_gap_each_and_one_call() -> None:
    graph, calls = cuda_graph(STEP), H200.host.calls
    step = built(graph)
    active = sum(t.seconds for t in kernel_times(graph, H200))
    launches = len(step.tasks.kernel)
    assert step.usual(8) == pytest.approx(active + launches * calls.replay_gap_us * 1e-6, rel=1e-6)
    assert step.host_total == pytest.approx((calls.replay_call_us + launches * calls.replay_node_us) * 1e-6)


def test_a_wait_for_the_gpu_parts_the_step_in_two_graphs() -> None:
    middle = len(STEP.ops) // 2
    ops = tuple(replace(op, sync=True) if i == middle else op for i, op in enumerate(STEP.ops))
    found = cuda_graph(replace(STEP, ops=ops))
    assert {op.replayed for op in found.ops} == {"graph 1", "", "graph 2"}
    assert found.ops[middle].replayed == ""
    assert built(found).usual(6) > built(cuda_graph(STEP)).usual(6)


def test_nothing_to_launch_is_no_graph() -> None:
    with pytest.raises(NotApplicable, match="two kernels"):
        cuda_graph(replace(STEP, ops=tuple(replace(op, sync=True) for op in STEP.ops)))


MASKED = """
import torch

def build(device, width=64):
    a = torch.randn(width, width, device=device, requires_grad=True)
    def step():
        x = a @ a
        if torch.cuda.is_current_stream_capturing():
            x = x + torch.ones(width, width, device=device)
        x.sum().backward()
    return step
"""


def test_code_that_runs_otherwise_while_it_is_read_is_captured_so(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="captures a step")
    file = tmp_path / "masked.py"
    file.write_text(MASKED)
    plain, traced = (ps.step_graph(f"{file}:build", variant=Variant(traced=t)) for t in (False, True))
    assert sum(op.kernels for op in traced.ops) > sum(op.kernels for op in plain.ops)
    found = what_if(f"{file}:build", "cuda_graph", draws=10)
    assert any("its own code runs otherwise" in c and "1 more aten::add" in c for c in found.cautions)
    assert found.edited.launches > found.base.launches
    alone = what_if(replace(plain, source=""), "cuda_graph", draws=10)
    assert alone.edited.launches == alone.base.launches, "a graph alone cannot be captured again"


def copied(elements: int, memory: str = PINNED_MEMORY) -> Graph:
    s = Sketch()
    host = s.tensor(elements, name=memory)
    there, out = s.new(elements), s.new(elements)
    s.op("copy_", [there, host, False], [there])
    s.op("relu", [there], [out])
    return s.graph()


def test_copies_from_the_host_go_over_pcie() -> None:
    graph = copied(1 << 26)
    assert [host_bytes(graph, op) for op in graph.ops] == [4 << 26, 0]
    times = kernel_times(graph, H200)
    assert times[0].seconds == pytest.approx(4.86e-3, rel=0.02), "measured: 268 MB in 4.85 ms"
    assert times[0].seconds > 20 * times[1].seconds
    assert host_copy_seconds(1 << 30, gpu("a100_80gb")) > host_copy_seconds(1 << 30, gpu("h200"))


@pytest.mark.parametrize(("nbytes", "us"), [(1 << 20, (71, 111)), (1 << 22, (270, 443)), (1 << 26, (7231, 8596))])
def test_copies_of_pageable_memory_take_as_long_as_on_the_two_machines_measured(
    nbytes: int, us: tuple[float, float]
) -> None:
    graph = copied(nbytes // 4, HOST_MEMORY)
    on_gpu, on_host = host_copy(graph, graph.ops[0], gpu("h200"))
    assert us[0] < 1e6 * (on_gpu + on_host) < us[1]
    pinned = copied(nbytes // 4)
    assert host_copy(pinned, pinned.ops[0], gpu("h200")) == (host_copy_seconds(nbytes, gpu("h200")), 0.0)


def test_what_the_driver_takes_over_at_once_the_host_copies_before_the_gpu_begins() -> None:
    small, large = copied(STAGED // 4, HOST_MEMORY), copied(STAGED, HOST_MEMORY)
    on_gpu, on_host = host_copy(small, small.ops[0], gpu("h200"))
    assert on_gpu == pytest.approx(host_copy_seconds(STAGED, gpu("h200"))) and on_gpu < on_host / 2
    on_gpu, on_host = host_copy(large, large.ops[0], gpu("h200"))
    assert on_gpu > 5 * on_host > 0


def test_memory_made_anew_is_not_waited_for_in_the_next_step() -> None:
    graph = copied(1024)
    ops = (replace(graph.ops[0], stream="beside"), *graph.ops[1:])
    found = crossings(replace(graph, ops=ops))
    assert found.within == ((0, 1),) and found.carried == ()
    there = graph.tensors[graph.ops[0].outputs[0]].storage
    kept = replace(graph, ops=ops, events=tuple(e for e in graph.events if e.storage != there))
    assert crossings(kept).carried == ((1, 0),), "the same memory in every step is"


def test_speed_divides_kernel_times() -> None:
    quick = replace(STEP, ops=tuple(replace(op, speed=2.0) for op in STEP.ops))
    before, after = (np.array([t.seconds for t in kernel_times(g, H200)]) for g in (STEP, quick))
    assert after == pytest.approx(before / 2, rel=1e-6)
