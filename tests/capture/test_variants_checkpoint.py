"""Checkpoints and microbatches as variants, against captures of the same model with them in its code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # noqa: E402

from presage.capture import NotApplicable, Variant, capture  # noqa: E402
from presage.capture.variants import AS_WRITTEN  # noqa: E402
from presage.costs.host_model import host_model  # noqa: E402
from presage.costs.host_units import host_terms, host_units  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph.graph import (  # noqa: E402
    Graph,
    Op,
    faults,
)
from presage.memory.step_memory import memory_profile  # noqa: E402
from presage.whatif.edits import cuda_graph  # noqa: E402


class Block(nn.Module):
    """Layer norm, a wide layer, dropout: what keeps inputs, results, and things beside them."""

    def __init__(self, width: int, device: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device)
        self.up, self.down = nn.Linear(width, 4 * width, device=device), nn.Linear(4 * width, width, device=device)

    def forward(self, x: Any, scale: Any) -> Any:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))) * scale, 0.1)


class Images(nn.Module):
    """Convolutions with batch norm, which keeps its own count, and an activation in place."""

    def __init__(self, width: int, device: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, device=device)
        self.norm = nn.BatchNorm2d(width, device=device)

    def forward(self, x: Any, scale: Any) -> Any:
        return F.relu(self.norm(self.conv(x)) + x * scale, inplace=True)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int, device: Any, kept: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(width, device) for _ in range(3)])
        self.head = nn.Linear(width, 10, device=device)
        self.kept = kept

    def forward(self, x: Any) -> Any:
        scale = x.new_full((1,), 0.5)  # nothing that the backward pass would keep by itself
        for block in self.blocks:
            x = block(x, scale) if self.kept else torch_checkpoint(block, x, scale, use_reentrant=False)
        return self.head(x.flatten(2).mean(-1) if x.dim() > 3 else x)


def build(device: Any, kind: type[nn.Module], kept: bool = True, amp: bool = False, microbatches: int = 1) -> Any:
    net = Net(kind, 64, device, kept)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn((64, 128, 64) if kind is Block else (32, 64, 32, 32), device=device)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(microbatches):
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = net(x).float().pow(2).mean()
            loss.backward()
        optimizer.step()

    return step


def captured(variant: Variant = AS_WRITTEN, **arguments: Any) -> Graph:
    return capture(lambda device: build(device, **arguments), {}, source="test", variant=variant)


def checkpointed(pattern: str = "", microbatches: int = 1, **arguments: Any) -> Graph:
    return captured(Variant(checkpoint=pattern, accumulate=microbatches), **arguments)


def shape_of(graph: Graph, op: Op) -> tuple[Any, ...]:
    tensors = tuple((t.shape, t.dtype) for t in graph.inputs_of(op))
    return op.name, tensors, op.thread, op.phase, op.module, op.within[:2]


def host_us(graph: Graph) -> float:
    us = host_model().us
    found = host_terms(graph, host_units(graph))
    return sum(us.get(key, 0.0) * times for _, before, own in found for key, times in (*before, *own))


@pytest.fixture(scope="module")
def plain() -> Graph:
    return captured(kind=Block)


@pytest.fixture(scope="module")
def blocks() -> Graph:
    return checkpointed(kind=Block)


@pytest.mark.parametrize(("kind", "amp"), [(Block, False), (Block, True), (Images, False)])
def test_the_variant_is_what_a_checkpointed_model_gives(kind: type[nn.Module], amp: bool) -> None:
    edited, real = checkpointed(kind=kind, amp=amp), captured(kind=kind, amp=amp, kept=False)
    assert not list(faults(edited))
    kernels = [[shape_of(g, op) for op in g.ops if op.kernels] for g in (edited, real)]
    assert kernels[0] == kernels[1]
    assert memory_profile(edited).peak_allocated == memory_profile(real).peak_allocated
    assert host_us(edited) == pytest.approx(host_us(real), rel=1e-6)


def test_less_is_kept_and_the_forward_pass_stays(plain: Graph, blocks: Graph) -> None:
    assert memory_profile(blocks).peak_allocated < 0.8 * memory_profile(plain).peak_allocated
    forward = [[shape_of(g, op) for op in g.ops if op.thread == "main" and op.kernels] for g in (plain, blocks)]
    assert forward[0] == forward[1]
    again = [op for op in blocks.ops if op.thread == "autograd" and op.name == "aten::native_layer_norm"]
    assert [op.module for op in again] == ["blocks.2.norm", "blocks.1.norm", "blocks.0.norm"]


def test_modules_by_name(plain: Graph, blocks: Graph) -> None:
    one = checkpointed(r"blocks\.1", kind=Block)
    extra = [op for op in one.ops if op.thread == "autograd" and op.name == "aten::native_layer_norm"]
    assert [op.module for op in extra] == ["blocks.1.norm"]
    peaks = [memory_profile(g).peak_allocated for g in (blocks, one, plain)]
    assert peaks == sorted(peaks)
    assert same_kernels(checkpointed("blocks", kind=Block), blocks), "a list of modules stands for what it holds"
    assert same_kernels(checkpointed(r"blocks\.\d|norm", kind=Block), blocks), "the outermost that matches counts"


def same_kernels(one: Graph, other: Graph) -> bool:
    return [shape_of(one, op) for op in one.ops] == [shape_of(other, op) for op in other.ops]


def test_a_checkpoint_of_the_users_own_stays_one(blocks: Graph) -> None:
    assert same_kernels(checkpointed(kind=Block, kept=False), blocks)


def test_nothing_to_checkpoint() -> None:
    with pytest.raises(NotApplicable, match="no module called attention"):
        checkpointed("attention", kind=Block)
    with pytest.raises(PresageError, match="not a regular expression"):
        checkpointed("(", kind=Block)
    with pytest.raises(NotApplicable, match="no repeated blocks"):
        capture(build_small, {}, source="small", variant=Variant(checkpoint=""))


def build_small(device: Any) -> Any:
    net = nn.Sequential(nn.Linear(8, 8, device=device), nn.ReLU(), nn.Linear(8, 8, device=device))
    x = torch.randn(4, 8, device=device)
    return lambda: net(x).sum().backward()


def test_checkpoints_with_microbatches() -> None:
    edited = checkpointed(microbatches=2, kind=Block)
    real = captured(kind=Block, kept=False, microbatches=2)
    assert Counter(shape_of(edited, op) for op in edited.ops) == Counter(shape_of(real, op) for op in real.ops)
    assert memory_profile(edited).peak_allocated == memory_profile(real).peak_allocated
    assert host_us(edited) == pytest.approx(host_us(real), rel=1e-6)


def test_a_recomputation_is_part_of_the_cuda_graph(blocks: Graph) -> None:
    assert {op.replayed for op in cuda_graph(blocks).ops} == {"graph 1"}


def test_hooks_cost_the_host_time(blocks: Graph) -> None:
    counts = Counter[str]()
    for _, before, own in host_terms(blocks, host_units(blocks)):
        for key, times in (*before, *own):
            counts[key] += int(times)
    assert counts["checkpoint begins"] == counts["recomputation begins"] == 3
    kept = sum(op.name == "detach" and op.thread == "autograd" and op.sequence >= 0 for op in blocks.ops)
    assert counts["kept tensor"] == 3 * kept > 0  # in the forward pass, in the recomputation, in the backward pass
    assert host_model().us["kept tensor"] > 1
