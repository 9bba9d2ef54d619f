"""Numbers that code reads from the GPU: computed where they can be known, assumed in the open where not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import presage
from commands import runner
from presage.capture import capture
from presage.cli.graph import command
from presage.cli.whatif import command as whatif_command
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.api import step_graph

Build = Callable[[str], Callable[[], Any]]
LARGE = 1024  # of a square weight whose numbers no capture computes


def products(graph: Graph) -> int:
    return sum(op.name in ("aten::mm", "aten::addmm") for op in graph.ops)


def repeated(times: Callable[[str], Any]) -> Build:
    """A step with as many layers as a tensor says."""

    def build(device: str) -> Callable[[], Any]:
        layer, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device)

        def step() -> None:
            y = x
            for _ in range(int(times(device))):
                y = layer(y)

        return step

    return build


@pytest.mark.slow
def test_a_small_buffer_keeps_its_numbers_however_often_it_is_written_to() -> None:
    def most(device: str) -> Any:
        weight, buffer = torch.empty(LARGE, LARGE, device=device), torch.zeros(150, 8, device=device)
        for k in range(150):
            buffer[k] = torch.mm(weight, weight)[:8].argmax(1) * 0 + 3  # not known, but for its largest number
        return buffer.min()

    assert products(capture(repeated(most))) == 150 + 3


def test_numbers_of_an_expanded_tensor_are_not_computed_one_by_one() -> None:
    """The gradient of a sum over a large batch is one number, expanded: adding it up took seconds."""
    start = time.process_time()
    capture(repeated(lambda d: torch.ones(1, device=d).expand(1 << 36).sum() * 0 + 3))
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "times",
    [
        lambda d: torch.full((), 3, device=d),
        lambda d: torch.ones((), device=d).add_(2).item(),
        lambda d: torch.zeros((), device=d).copy_(torch.tensor(3.0)),
        lambda d: torch.arange(4, device=d).max(),
        lambda d: torch.arange(4, device=d).cpu().numpy().max(),
        lambda d: torch.tensor([0, 3, 3, 1], device=d).unique().numel(),
        lambda d: torch.tensor([True, False, True, True], device=d).nonzero().shape[0],
        lambda d: (torch.arange(6, device=d) * torch.eye(6, device=d)).sum(0)[3],
        lambda d: torch.arange(100_000, device=d)[::30_000].max() / 30_000,
        lambda d: len(torch.arange(6, device=d).float()[torch.arange(6, device=d) > 2]),
        lambda d: torch.repeat_interleave(torch.tensor([1, 2], device=d)).numel(),
        lambda d: 3 if torch.equal(torch.ones(3, device=d), torch.ones(3, device=d)) else 1,
        lambda d: 3 if torch.zeros((), device=d) + 5 != 4 else 1,
    ],
)
def test_a_number_that_can_be_known_is_right(times: Callable[[str], Any]) -> None:
    graph = capture(repeated(times))
    assert products(graph) == 3
    assert not graph.assumptions


def test_widths_computed_with_tensors_while_the_model_is_built_are_right() -> None:
    def build(device: str) -> Callable[[], Any]:
        with torch.device(device):
            widths = (torch.arange(1, 4) * 16).int().tolist()
            model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip([8, *widths], widths, strict=False)])
            x = torch.randn(4, 8)
        return lambda: model(x).sum().backward()

    graph = capture(build)
    assert sum(s.nbytes for s in graph.storages if s.role == "parameter") == 4 * (9 * 16 + 17 * 32 + 33 * 48)


def unknown(read: Callable[[torch.Tensor], Any]) -> Build:
    def build(device: str) -> Callable[[], Any]:
        model = nn.Linear(LARGE, LARGE).to(device)
        x = torch.randn(512, LARGE, device=device)
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if read(loss):
                loss.backward()
                optimizer.step()

        return step

    return build


def test_a_loss_is_taken_to_be_finite_and_the_branch_on_it_is_an_assumption() -> None:
    graph = capture(unknown(torch.isfinite))
    assert any(op.phase == "optimizer" for op in graph.ops)
    (assumption,) = graph.assumptions
    assert assumption.what == "a truth value" and assumption.value == "True" and assumption.decides
    assert assumption.line.startswith("test_values.py:")
    hanging = {op.phase for op in graph.ops if op.assumed}
    assert hanging >= {"backward", "optimizer"}
    assert not any(op.assumed for op in graph.ops if op.name == "aten::addmm")


def test_a_number_that_is_only_logged_decides_nothing() -> None:
    logged = []
    graph = capture(unknown(lambda loss: logged.append(f"{loss.item() * 2:.3f}") or True))
    (assumption,) = graph.assumptions
    assert not assumption.decides and float(logged[-1]) > 0
    assert not any(op.assumed for op in graph.ops)


def test_a_number_that_is_compared_decides() -> None:
    (assumption,) = capture(unknown(lambda loss: loss.item() / 2 < 1e9)).assumptions
    assert assumption.decides and assumption.what == "a number"


def test_a_value_may_be_given() -> None:
    build = unknown(lambda loss: loss.item() < 2)
    (line,) = (a.line for a in capture(build).assumptions)
    without = capture(build, assume={line: "7"})
    assert not any(op.phase == "backward" for op in without.ops)
    assert without.assumptions[0].value == "7"
    with pytest.raises(PresageError, match="no unknown value is read there"):
        capture(build, assume={"train.py:1": "7"})
    with pytest.raises(PresageError, match="true or false is read there"):
        capture(unknown(torch.isfinite), assume={f"test_values.py:{unknown_line()}": "7"})


def unknown_line() -> str:
    (assumption,) = capture(unknown(torch.isfinite)).assumptions
    return assumption.line.partition(":")[2]


def test_experts_get_a_share_of_the_tokens_each() -> None:
    def build(device: str) -> Callable[[], Any]:
        gate, x = nn.Linear(LARGE, 4).to(device), torch.randn(2048, LARGE, device=device)
        experts = nn.ModuleList(nn.Linear(LARGE, LARGE) for _ in range(4)).to(device)

        def step() -> None:
            chosen = gate(x).softmax(-1).argmax(-1)
            for i, expert in enumerate(experts):
                expert(x[chosen == i])

        return step

    graph = capture(build)
    rows = [graph.tensors[op.outputs[0]].shape for op in graph.ops if op.name == "aten::addmm"]
    assert sum(n for n, width in rows if width == LARGE) == 2048
    assert all(2048 / 8 < n < 2048 / 2 for n, width in rows if width == LARGE)
    assert any(a.what == "the size of aten::index" for a in graph.assumptions)


def test_indices_on_the_host_are_copied_over_as_on_a_gpu() -> None:
    def build(device: str) -> Callable[[], Any]:
        x, rows = torch.randn(64, 8, device=device), torch.tensor([3, 1])
        return lambda: x[rows]

    graph = capture(build)
    assert [op.name for op in graph.ops if op.kernels][-2:] == ["aten::copy_", "aten::index"]


def test_a_mask_as_an_index_waits_for_its_count() -> None:
    def build(device: str) -> Callable[[], Any]:
        x = torch.randn(4, 8, device=device)
        mask = torch.tensor([True, False, True, True], device=device)
        return lambda: x[mask]

    graph = capture(build)
    found, index = (op for op in graph.ops if op.name in ("aten::nonzero", "aten::index"))
    assert found.sync and graph.tensors[found.outputs[0]].shape == (3, 1)
    assert graph.tensors[index.outputs[0]].shape == (3, 8)


def test_the_same_capture_has_the_same_assumptions() -> None:
    one, other = (capture(unknown(lambda loss: loss.item() < 2)) for _ in range(2))
    assert one.assumptions == other.assumptions


def test_a_copy_on_which_sizes_depend_decides() -> None:
    def build(device: str) -> Callable[[], Any]:
        model = nn.Linear(LARGE, LARGE).to(device)
        x = torch.randn(512, LARGE, device=device)

        def step() -> None:
            positive = int((model(x)[:, 0] > 0).cpu().numpy().sum())
            model(x[:positive])

        return step

    (assumption,) = capture(build).assumptions
    assert assumption.what == "a tensor copied to the host" and assumption.decides


def test_a_large_host_tensor_as_an_array_has_its_numbers_or_assumed_ones() -> None:
    seen: list[Any] = []

    def build(device: str) -> Callable[[], Any]:
        counted, weights = torch.zeros(300, 300), torch.empty(300, 300).normal_()
        layer = nn.Linear(8, 8).to(device)
        x = torch.randn(4, 8, device=device)

        def step() -> None:
            seen.append((float(counted.numpy().sum()), weights.numpy().shape))
            layer(x).sum().backward()

        return step

    capture(build)
    assert seen[-1] == (0.0, (300, 300))


SCRIPT = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 1024).cuda()
for i in range(20):
    loss = model(x).square().mean()
    if loss.item() > 10:
        model(x).mean().backward()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 10 == 0:
        print(i, f"{loss:.3f}", loss.item())
"""


def test_a_scripts_values_are_assumed_or_given(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    plain = step_graph(path)
    assert [(a.line, a.decides) for a in plain.assumptions] == [("train.py:8", True), ("train.py:14", False)]
    assert products(step_graph(path, assume={"train.py:8": "20"})) > products(plain)


def test_strict_refuses_to_assume(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    graph = runner(command)
    with pytest.raises(PresageError, match=r"train\.py:8: the code branches on a number that is not known"):
        graph(path, "--strict")
    assert "ops" in graph(path, "--strict", "--assume", "train.py:8=1")
    with pytest.raises(PresageError, match="should be FILE:LINE=VALUE"):
        graph(path, "--assume", "loss=3")


def test_whatif_takes_given_values_and_refuses_assumed_ones_where_strict(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    whatif = runner(whatif_command)
    with pytest.raises(PresageError, match=r"train\.py:8: the code branches on a number that is not known"):
        whatif(path, "--apply", "fused_adam", "--strict")
    assert "fused_adam" in whatif(path, "--apply", "fused_adam", "--strict", "--assume", "train.py:8=1")


def test_masks_of_a_contrastive_loss_that_are_made_on_the_host_are_computed() -> None:
    def build(device: str) -> Any:
        layer, x = torch.nn.Linear(64, 32).to(device), torch.randn(512, 64, device=device)

        def step() -> None:
            number = torch.arange(256).repeat(2)
            same = (number[None] == number[:, None]).float().to(device)
            own = torch.eye(512, dtype=torch.bool).to(device)
            features = layer(x)
            similar = (features @ features.T)[~own].view(512, -1)
            same = same[~own].view(512, -1)
            (similar[~same.bool()].sum() - similar[same.bool()].sum()).backward()

        return step

    graph = capture(build)
    sizes = [graph.tensors[i].shape for op in graph.ops if op.name == "aten::index" for i in op.outputs]
    assert sizes == [(512 * 511,), (512 * 511,), (512 * 510,), (512,)] and graph.assumptions == ()


def test_all_of_the_step_hangs_on_an_unknown_number_that_decides_the_model() -> None:
    def build(device: str) -> Any:
        large = torch.randn(8192, 8192, device=device)
        depth = int((large @ large).abs().mean().item()) % 3 + 1
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(depth)]).to(device)
        x = torch.randn(32, 64, device=device)
        return lambda: model(x).sum().backward()

    (found,) = presage.predict(build).assumptions
    assert found.decides and found.share == pytest.approx(1.0)


def test_a_file_read_into_a_large_host_tensor_is_what_the_code_finds_in_it(tmp_path: Path) -> None:
    path, size = tmp_path / "tokens.bin", 200_000
    (np.arange(size) % 1000).astype(np.uint16).tofile(path)
    found: dict[str, Any] = {}

    def build(device: str) -> Callable[[], Any]:
        tokens = torch.empty(size, dtype=torch.uint16, pin_memory=True)
        with path.open("rb", buffering=0) as f:
            f.readinto(tokens.numpy())
        ends = torch.nonzero(tokens[:100_000] == 999).squeeze(-1)
        found.update(first=ends[0].item(), ends=len(ends), where=ends.device.type)
        found["on GPU"] = int((tokens[5:70_005].to(device, dtype=torch.int32) == 999).sum())
        layer = nn.Linear(8, 8).to(device)
        return lambda: layer(torch.ones(4, 8, device=device)).sum().backward()

    capture(build)
    assert found == {"first": 999, "ends": 100, "where": "cpu", "on GPU": 70}


@pytest.mark.slow
def test_lbfgs_runs_all_of_its_iterations_whatever_is_drawn_for_its_tolerances() -> None:
    def build(device: str) -> Callable[[], Any]:
        model, x = nn.Linear(LARGE, LARGE).to(device), torch.randn(8, LARGE, device=device)
        opt = torch.optim.LBFGS(model.parameters(), max_iter=6)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            opt.step(closure)
            assert opt.param_groups[0]["tolerance_grad"] > 0

        return step

    graph = capture(build)
    assert sum(op.name == "aten::addmm" for op in graph.ops) == 6
    assert any("LBFGS is taken to run all of its 6 iterations" in note for note in graph.notes)
