"""What one step is, and that it is the same in every run."""

import random

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from presage.capture import capture, run
from presage.errors import PresageError
from presage.graph import work


def products(graph):
    return sum(op.name in ("aten::mm", "aten::addmm") for op in graph.ops if op.kernels)


def counted(device, every, first):
    """Gradients are added up by a counter of the code's own."""
    model, x, calls = nn.Linear(64, 64).to(device), torch.randn(32, 64, device=device), [first]
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(x).sum().backward()
        calls[0] += 1
        if calls[0] % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize(("every", "first"), [(4, 0), (2, 0), (4, 3), (1, 0)])
def test_calls_between_two_steps_of_the_optimizer_are_one_step(every, first):
    graph = capture(counted, {"every": every, "first": first})
    assert products(graph) == 2 * every
    assert any(op.phase == "optimizer" for op in graph.ops)
    assert ("once in" in " ".join(graph.notes)) == (every > 1)


def test_a_step_without_backward_or_optimizer_says_so():
    def build(device):
        model, x = nn.Linear(64, 64).to(device), torch.randn(32, 64, device=device)
        return lambda: model(x).sum()

    notes = capture(build).notes
    assert notes[:2] == ("the step has no backward pass on the GPU", "the step has no optimizer on the GPU")


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random])
def test_random_numbers_of_the_host_are_the_same_in_every_capture(draw):
    def build(device):
        model = nn.ModuleList([nn.Linear(64, 64) for _ in range(16)]).to(device)
        x = torch.randn(32, 64, device=device)
        return lambda: [layer(x) for layer in model if draw() < 0.5]

    state = random.getstate()
    assert products(capture(build)) == products(capture(build))
    assert random.getstate() == state


def linear(device):
    model, x = nn.Linear(64, 64).to(device), torch.randn(32, 64, device=device)
    return lambda: model(x).sum().backward()


def convolved(device):
    model, x = nn.Conv2d(4, 8, 3).to(device), torch.randn(2, 4, 8, 8, device=device)
    return lambda: model(x).sum().backward()


def attending(device):
    q = torch.randn(2, 4, 64, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    return lambda: nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("build", [linear, convolved, attending])
def test_ops_and_flops_that_are_lost_between_run_and_graph_are_an_error(build, phase):
    kept = {}

    def keeping(graph, calls, seen):
        kept.update(graph=graph, calls=calls, seen=seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "check_complete", keeping)
        capture(build)
    run.check_complete(kept["graph"], kept["calls"], kept["seen"])
    with pytest.raises(PresageError, match="lost"):
        run.check_complete(kept["graph"], kept["calls"], set())
    graph = kept["graph"]
    gone = next(op for op in graph.ops if op.phase == phase and work.flops(graph, op))
    without = replace(graph, ops=[op for op in graph.ops if op is not gone])
    with pytest.raises(PresageError, match="FLOPs"):
        run.check_complete(without, kept["calls"], {c.index for c in kept["calls"]})
