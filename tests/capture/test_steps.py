"""What one step is, and that it is the same in every run."""

import random

import pytest
import torch
from torch import nn

from presage.capture import capture


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
