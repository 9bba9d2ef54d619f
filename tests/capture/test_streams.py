"""CUDA streams, events and graphs in what is captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from presage.capture import capture
from presage.graph.graph import Graph, check


def _step(device: str) -> Any:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    x = torch.randn(32, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _kernels(graph: Graph) -> list[Any]:
    return [op for op in graph.ops if op.kernels]


def test_copies_on_a_side_stream_are_told_apart_and_waited_for() -> None:
    def build(device: str) -> Any:
        model, side, host = nn.Linear(64, 64).to(device), torch.cuda.Stream(), torch.randn(32, 64).pin_memory()
        done = torch.cuda.Event(enable_timing=True)

        def step() -> None:
            with torch.cuda.stream(side):
                x = host.to(device, non_blocking=True)
                done.record()
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
            model(x).sum().backward()
            model.zero_grad()

        return step

    graph = capture(build)
    aside = [op for op in _kernels(graph) if op.stream]
    assert [op.name for op in aside] == ["aten::copy_"]
    assert {op.stream for op in _kernels(graph)} == {"", aside[0].stream}


def test_the_backward_pass_runs_on_the_stream_of_its_forward_pass() -> None:
    def build(device: str) -> Any:
        model, side = nn.Linear(64, 64).to(device), torch.cuda.Stream()
        x = torch.randn(32, 64, device=device)

        def step() -> None:
            with torch.cuda.stream(side):
                out = model(x)
            out.sum().backward()

        return step

    streams = {op.phase: op.stream for op in _kernels(capture(build)) if op.name in ("aten::addmm", "aten::mm")}
    assert streams["forward"] == streams["backward"] != ""


def test_waiting_for_an_event_is_waiting_for_the_gpu() -> None:
    def build(device: str) -> Any:
        x, event = torch.randn(32, 64, device=device), torch.cuda.Event()

        def step() -> None:
            x.exp()
            event.record()
            event.synchronize()

        return step

    assert [op.name for op in capture(build).ops if op.sync] == ["cuda::synchronize"]


def test_a_cuda_graph_is_its_ops_replayed() -> None:
    def build(device: str) -> Any:
        step, graph = _step(device), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    graph, eager = check(capture(build)), capture(_step)
    assert {op.replayed for op in _kernels(graph)} == {"CUDA graph 1"}
    assert [op.name for op in _kernels(graph)] == [op.name for op in _kernels(eager)]
    assert [op.phase for op in _kernels(graph)] == [op.phase for op in _kernels(eager)]
    assert not [op for op in graph.ops if not op.replayed]
    shapes = [[t.shape for t in eager.inputs_of(op)] for op in _kernels(eager)]
    assert [[t.shape for t in graph.inputs_of(op)] for op in _kernels(graph)] == shapes


def test_two_replays_are_the_ops_twice() -> None:
    def build(device: str) -> Any:
        graph, x = torch.cuda.CUDAGraph(), torch.randn(32, 64, device=device)
        with torch.cuda.graph(graph):
            y = x.exp()

        def step() -> None:
            graph.replay()
            y.sin()
            graph.replay()

        return step

    ops = _kernels(check(capture(build)))
    assert [(op.name, bool(op.replayed)) for op in ops] == [
        ("aten::exp", True),
        ("aten::sin", False),
        ("aten::exp", True),
    ]


def test_graphed_callables_replay_forward_and_backward() -> None:
    def build(device: str) -> Any:
        model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(device), torch.randn(32, 64, device=device)
        model = torch.cuda.make_graphed_callables(model, (x,))

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return step

    graph = capture(build)
    replayed = {op.name: op.replayed for op in _kernels(graph)}
    assert replayed["aten::addmm"].endswith("forward") and replayed["aten::mm"].endswith("backward")
    assert any("replayed as CUDA graphs" in note for note in graph.notes)


def test_a_replay_of_the_optimizers_step_is_one_so_that_no_more_calls_are_looked_at():
    calls = []

    def build(device):
        model, x = nn.Linear(64, 64).to(device), torch.randn(8, 64, device=device)
        opt, graph = torch.optim.SGD(model.parameters(), 0.1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
            opt.step()

        def step():
            calls.append(1)
            graph.replay()

        return step

    captured = capture(build)
    assert len(calls) == 2
    assert any(op.phase == "optimizer" for op in captured.ops)
