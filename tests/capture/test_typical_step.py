"""Steps that differ at random: the one nearest to their mean is predicted, and the answer says so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import presage as ps

torch = pytest.importorskip("torch")

from presage.capture.typical_step import StepWork, differ, is_near_mean, nearest, random_state, set_random_state  # noqa: E402
from presage.memory.step_memory import memory_profile  # noqa: E402

LAYERS, LEFT_OUT = 12, 0.25

SCRIPT = """
import random
import torch

layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12)).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(40):
    x = torch.randn(8, 64, device="cuda")
    for layer in layers:
        if random.random() >= {left_out}:
            x = layer(x)
    optimizer.zero_grad()
    x.sum().backward()
    optimizer.step()
"""


def layers_left_out(draw: Callable[[], float]) -> Callable[[str], Callable[[], None]]:
    def build(device: str) -> Callable[[], None]:
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(LAYERS)).to(device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step() -> None:
            x = torch.randn(8, 64, device=device)
            for layer in layers:
                if draw() >= LEFT_OUT:
                    x = layer(x)
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step()

        return step

    return build


def forward_layers(graph: ps.Graph) -> int:
    return Counter(op.name for op in graph.ops if op.kernels and op.phase == "forward")["aten::addmm"]


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand([]).item()], ids=["python", "torch"])
def test_a_function_that_leaves_layers_out_is_predicted_near_its_mean(draw: Callable[[], float]) -> None:
    graph = ps.step_graph(layers_left_out(draw))
    assert abs(forward_layers(graph) - (1 - LEFT_OUT) * LAYERS) <= 1
    assert any("drawn at random" in note and "nearest to their mean" in note for note in graph.notes)
    whole = memory_profile(ps.step_graph(layers_left_out(lambda: 1.0)))
    assert graph.largest > 1
    assert memory_profile(graph).peak_allocated == pytest.approx(whole.peak_allocated, rel=0.1)


def test_a_script_that_leaves_layers_out_is_predicted_near_its_mean(tmp_path: Path) -> None:
    (tmp_path / "drop.py").write_text(SCRIPT.format(left_out=LEFT_OUT))
    graph = ps.step_graph(str(tmp_path / "drop.py"))
    assert abs(forward_layers(graph) - (1 - LEFT_OUT) * LAYERS) <= 1
    assert any("not all alike" in note and "near their mean" in note for note in graph.notes)


def test_a_script_that_seldom_leaves_a_layer_out_says_so(tmp_path: Path) -> None:
    (tmp_path / "drop.py").write_text(SCRIPT.format(left_out=0.05))
    graph = ps.step_graph(str(tmp_path / "drop.py"))
    assert forward_layers(graph) >= LAYERS - 1
    assert any("not all alike" in note for note in graph.notes)


def test_numbers_drawn_for_data_change_nothing() -> None:
    def build(device: str) -> Callable[[], None]:
        layer = torch.nn.Linear(64, 64).to(device)

        def step() -> None:
            layer(torch.randn(8, 64).to(device)).sum().backward()

        return step

    assert not any("random" in note for note in ps.step_graph(build).notes)


def test_a_function_that_runs_out_of_data_keeps_its_recorded_step() -> None:
    def build(device: str) -> Callable[[], None]:
        layer, batches = torch.nn.Linear(64, 64).to(device), iter([torch.randn(8, 64) for _ in range(3)])

        def step() -> None:
            random.random()
            layer(next(batches).to(device)).sum().backward()

        return step

    assert forward_layers(ps.step_graph(build)) == 1


def test_the_step_nearest_to_the_mean_is_told_by_its_work() -> None:
    looked = [StepWork(i, 10 * i, 100 * i) for i in (1, 4, 9)]
    assert nearest(looked) == 1
    assert [is_near_mean(w, looked) for w in looked] == [False, True, False]
    assert differ(looked) == "10 to 90 GPU ops, work -78.6% to +92.9% of their mean"
    assert differ(looked[:1] * 3) == ""


def test_what_was_drawn_is_drawn_again() -> None:
    import numpy as np

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand([]))

    state = random_state()
    first = drawn()
    assert random_state() != state
    set_random_state(state)
    assert random_state() == state
    assert drawn() == first
