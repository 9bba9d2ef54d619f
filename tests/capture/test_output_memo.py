"""Outputs that are built from memory are those that a fake run of the op gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from presage.capture.output_memo import OutputMemo  # noqa: E402
from presage.capture.run import capture  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        for _ in range(2):
            x = self.norm(self.second(torch.relu(self.first(x[:, :3]))))
        half = x.chunk(2, dim=1)
        x = torch.cat([half[1].clone().mul_(2), half[0]], dim=1).permute(0, 2, 3, 1)
        return self.head(x.reshape(-1, 8).topk(8).values)


def build(device: str) -> Callable[[], None]:
    model = Net().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 3, 16, 16, device=device)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def captured() -> bytes:
    """A graph without autograd's numbers, which go on from one capture to the next."""
    graph = capture(build)
    return msgspec.json.encode([replace(op, sequence=0) for op in graph.ops], enc_hook=str) + msgspec.json.encode(
        [graph.tensors, graph.storages, graph.events]
    )


def test_a_capture_with_and_without_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    count, built = Counter(), OutputMemo._built
    monkeypatch.setattr(OutputMemo, "_built", lambda *a: count.update(["built"]) or built(*a))
    graph = captured()
    monkeypatch.setattr(OutputMemo, "run", lambda *a: a[-1]())
    assert count["built"] > 100 and graph == captured()


def run_twice(function: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """Shape, strides, type and whether the memory is the argument's, of both results."""
    seen = []

    def make(device: str) -> Callable[[], None]:
        def step() -> None:
            for _ in range(2):
                x = torch.zeros(4, 6, device=device)
                y = function(x)
                shared = y.untyped_storage()._cdata == x.untyped_storage()._cdata
                seen.append((tuple(y.shape), y.stride(), y.dtype, y.storage_offset(), shared, y is x))

        return step

    capture(make, warm_up=0)
    return seen


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t(), lambda x: x[1:, 2], lambda x: x.view(torch.int32), lambda x: x.add_(1), lambda x: x + 1.5,
        lambda x: x.reshape(2, 12), lambda x: x.t().reshape(24), lambda x: x.resize_(2, 3), lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.expand(3, 4, 6), lambda x: x.sum(), lambda x: x > 0,
    ],
)  # fmt: skip
def test_the_second_result_is_like_the_first(function: Callable[[Any], Any]) -> None:
    first, second = run_twice(function)
    assert first == second


def test_shapes_that_depend_on_numbers_are_not_remembered() -> None:
    def shrinking(device: str) -> Callable[[], Any]:
        x = torch.tensor([3.0, 2.0, 1.0, 0.0], device=device)

        def step() -> Any:
            x.sub_(1)
            return x[x > 0]

        return step

    sizes = [t.shape for t in capture(shrinking, warm_up=1).tensors if t.dtype == "float32"]
    assert (1,) in sizes and (2,) not in sizes


def test_parts_that_a_loop_takes_one_after_the_other_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, seen, worked_out = OutputMemo._first, [], []
    monkeypatch.setattr(OutputMemo, "_first", lambda *a: worked_out.append(a[1]) or first(*a))

    def make(device: str) -> Callable[[], None]:
        x = torch.zeros(3, 11, 5, device=device, requires_grad=True)

        def step() -> None:
            before = len(worked_out)
            parts = [x[:, 2:].select(1, i) for i in (0, 1, 8, -1)]
            seen.append(([(p.shape, p.stride(), p.storage_offset()) for p in parts], len(worked_out) - before))
            sum(p.sum() for p in parts).backward()

        return step

    capture(make, warm_up=0)
    whole = torch.zeros(3, 11, 5)[:, 2:]
    real = [whole.select(1, i) for i in (0, 1, 8, -1)]
    assert seen == [([(p.shape, p.stride(), p.storage_offset()) for p in real], 2)]  # a slice and a select
    with pytest.raises(Exception, match="out of range"):
        capture(lambda device: lambda: torch.zeros(2, 3, device=device).select(0, 2), warm_up=0)
