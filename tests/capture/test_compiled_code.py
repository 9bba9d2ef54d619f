"""Compiled code in what is captured: torch.compile, TorchScript."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from presage.capture import NotApplicable, capture
from presage.edits import compiled
from presage.graph.graph import Graph


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()


def _step(model: Any, optimizer: Any, loss: Any = lambda out: out.square().mean(), step: Any = None) -> Any:
    x = torch.randn(32, 64, device="cuda")

    def run() -> None:
        optimizer.zero_grad()
        loss(model(x)).backward()
        (step or optimizer.step)()

    return run


def _eager(device: str) -> Any:
    model = _model().to(device)
    return _step(model, torch.optim.AdamW(model.parameters()))


def _compiled_model(device: str, **options: Any) -> Any:
    model = torch.compile(_model().to(device), **options)
    return _step(model, torch.optim.AdamW(model.parameters()))


def _kernels(graph: Graph, phase: str = "") -> list[str]:
    return [op.name for op in graph.ops if op.kernels and (not phase or op.phase == phase)]


def _notes(graph: Graph) -> str:
    return "; ".join(graph.notes)


def test_a_compiled_model_is_captured_as_inductor_runs_it_and_says_so() -> None:
    graph, eager = capture(_compiled_model), capture(_eager)
    fused = [op for op in graph.ops if op.name.startswith("triton::")]
    assert fused and {op.phase for op in fused} == {"forward", "backward"}
    assert {op.within[-1] for op in fused} == {"CompiledFunction", "CompiledFunctionBackward"}
    assert len(_kernels(graph)) < len(_kernels(eager))
    assert _kernels(graph, "optimizer") == _kernels(eager, "optimizer")
    assert "torch.compile: 1 call compiled: modelled as Inductor fuses them" in _notes(graph)
    assert {op.module for op in graph.ops} >= {"0", "3"}  # names as the author gave them
    with pytest.raises(NotApplicable, match="compiles the step already"):
        compiled(graph)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_replay_what_is_compiled(mode: str) -> None:
    graph = capture(_compiled_model, {"mode": mode, "fullgraph": True})
    inside = [op for op in graph.ops if op.compiled and op.kernels]
    assert {op.replayed for op in inside} == {"inductor, CUDA graphs#1 forward", "inductor, CUDA graphs#1 backward"}
    assert "replayed as CUDA graphs" in _notes(graph)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_fuse_nothing_are_eager_code_and_said_to_be(backend: str) -> None:
    graph = capture(_compiled_model, {"backend": backend})
    assert _kernels(graph) == _kernels(capture(_eager))
    assert f"the backend {backend}, which fuses nothing" in _notes(graph)


def test_each_call_of_a_compiled_function_is_compiled_by_itself() -> None:
    @torch.compile(fullgraph=True)
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))

    def build(device: str) -> Any:
        one, two = nn.Linear(64, 64).to(device), nn.Linear(64, 8).to(device)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()])
        return _step(lambda x: gelu(two(gelu(one(x)))), optimizer)

    def build_captured(device: str) -> Any:
        nonlocal gelu
        gelu = torch.compile(gelu._torchdynamo_orig_callable, fullgraph=True)
        return build(device)

    graph = capture(build_captured)
    assert _kernels(graph, "forward").count("triton::pointwise") == 2
    assert [op.name for op in graph.ops if op.compiled and op.kernels and op.phase == "backward"] == [
        "triton::pointwise"
    ] * 2


def test_a_compiled_optimizer_step_is_a_fused_one() -> None:
    def build(device: str) -> Any:
        model = _model().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        return _step(model, optimizer, step=torch.compile(optimizer.step))

    graph = capture(build)
    assert "aten::_fused_adamw_" in _kernels(graph, "optimizer")
    assert "the compiled step of AdamW is modelled as its fused form" in _notes(graph)


def test_what_a_compiled_function_leaves_to_python_is_not_compiled() -> None:
    def build(device: str) -> Any:
        model = _model().to(device)

        @torch.compiler.disable
        def loss(out: torch.Tensor) -> torch.Tensor:
            return out.square().exp().mean()

        whole = torch.compile(lambda x: loss(model(x)))
        return _step(whole, torch.optim.SGD(model.parameters()), loss=lambda x: x)

    assert {"aten::pow", "aten::exp", "aten::mean"} <= set(_kernels(capture(build), "forward"))


def test_scripted_and_traced_code_runs_as_python() -> None:
    def build(device: str) -> Any:
        @torch.jit.script
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        model = torch.jit.trace(torch.jit.script(_model().to(device)), torch.randn(2, 64))
        return _step(lambda x: double(model(x)), torch.optim.AdamW(model.parameters()))

    graph = capture(build)
    assert len(_kernels(graph)) == len(_kernels(capture(_eager))) + 2
    assert "TorchScript code runs as plain Python" in _notes(graph)


def test_functions_scripted_before_the_capture_run_as_python() -> None:
    scripted = torch.jit.script(_gelu)

    def build(device: str) -> Any:
        model = nn.Linear(64, 8).to(device)
        return _step(lambda x: scripted(model(x)), torch.optim.SGD(model.parameters()))

    assert "aten::gelu" in _kernels(capture(build))
    assert torch.equal(scripted(torch.zeros(2)), torch.zeros(2))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def test_code_compiled_before_the_capture_is_compiled_in_it() -> None:
    model = torch.compile(_model_on_host(), mode="reduce-overhead", fullgraph=True)

    def build(device: str) -> Any:
        copy = model.to(device)
        return _step(copy, torch.optim.SGD(copy.parameters()))

    graph = capture(build)
    assert {op.replayed for op in graph.ops if op.name == "triton::pointwise"} >= {"inductor, CUDA graphs#1 forward"}
    assert "torch.compile: 1 call compiled" in _notes(graph)


def _model_on_host() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
