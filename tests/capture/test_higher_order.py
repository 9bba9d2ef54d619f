"""Higher-order ops in what is captured: flex_attention, torch.cond, while_loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from presage.capture import capture
from presage.prediction.machine import kernel_times, machine

ROOT = Path(__file__).resolve().parents[2]
HEADS, DEPTH, LENGTH = 4, 64, 1024


def _attention(device: str, compiled: bool = True, window: int = LENGTH) -> Any:
    layer = nn.Linear(64, 3 * HEADS * DEPTH).to(device, torch.bfloat16)
    x = torch.randn(2, LENGTH, 64, device=device, dtype=torch.bfloat16)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < window),  # noqa: ARG005
        None, None, LENGTH, LENGTH, device=device,
    )  # fmt: skip
    attend = torch.compile(flex_attention) if compiled else flex_attention

    def step() -> None:
        q, k, v = (t.view(2, LENGTH, HEADS, DEPTH).transpose(1, 2) for t in layer(x).chunk(3, -1))
        attend(q, k, v, block_mask=mask).float().sum().backward()
        layer.zero_grad()

    return step


@pytest.mark.parametrize(("window", "blocks"), [(LENGTH, 36), (128, 15)])
def test_compiled_flex_attention_computes_the_blocks_of_its_mask(window: int, blocks: int) -> None:
    """Of 8 x 8 blocks a causal mask leaves 36, a window of one block 15."""
    graph = capture(_attention, {"window": window})
    keys = round(LENGTH * blocks / 64)
    seen = [t.shape for op in graph.ops if "flash_attention" in op.name for t in graph.inputs_of(op)]
    assert any(keys in shape for shape in seen)
    assert {op.phase for op in graph.ops if "flash_attention" in op.name} == {"forward", "backward"}
    assert any(f"over the {blocks / 64:.0%} of keys" in note for note in graph.notes)


@pytest.mark.filterwarnings("error:flex_attention called without")
def test_flex_attention_that_is_not_compiled_writes_out_its_scores() -> None:
    """The answer says so, for compiled and other code, and PyTorch does not: it sees neither compiled."""
    graph = capture(_attention, {"compiled": False})
    assert any("flex_attention is not compiled" in note for note in graph.notes)
    assert not any("not compiled" in note for note in capture(_attention).notes)
    scores = (2, HEADS, LENGTH, LENGTH)
    assert any(t.shape == scores and t.dtype == "float32" for t in graph.tensors)
    assert not any("flash_attention" in op.name for op in graph.ops)


def test_cond_runs_the_branch_that_its_number_says() -> None:
    def build(device: str, number: int) -> Any:
        x, n = torch.randn(8, 8, device=device), torch.tensor(number, device=device)
        return lambda: torch.cond(n > 2, lambda a: a.sin(), lambda a: a.cos(), (x,))

    for number, op in ((3, "aten::sin"), (1, "aten::cos")):
        names = {o.name for o in capture(build, {"number": number}).ops if o.kernels}
        assert names & {"aten::sin", "aten::cos"} == {op}


def test_while_loop_runs_as_many_rounds_as_its_counter_says() -> None:
    def build(device: str) -> Any:
        x = torch.randn(8, 8, device=device)
        start = torch.tensor(0, device=device)
        return lambda: while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, y @ y), (start, x))

    assert [op.name for op in capture(build).ops if op.kernels].count("aten::mm") == 5


@pytest.mark.parametrize("window", [2, 8])
def test_compiled_flex_attention_takes_what_was_measured(window):
    case = f"flex H6 D128 S49152 window {window} blocks"
    measured = json.loads((ROOT / "data/h200_compiled.json").read_bytes())["cases"][case]

    def blocks(seen):
        count = seen.sum(-1, dtype=torch.int32)
        return count[None, None].contiguous(), seen.int().argsort(dim=-1, descending=True, stable=True)[
            None, None
        ].int()

    def build(device):
        q, k, v = (torch.randn(1, 6, 49152, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
        n = torch.arange(49152 // 128, device=device)
        apart = n[:, None] - n
        partial, full = blocks((apart == 0) | (apart == window)), blocks((apart > 0) & (apart < window))
        mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=128, mask_mod=lambda b, h, q, k: q >= k)  # noqa: ARG005
        attend = torch.compile(flex_attention)
        return lambda: attend(q.requires_grad_(), k, v, block_mask=mask).sum().backward()

    graph = capture(build)
    found = [
        t.seconds
        for op, t in zip(graph.ops, kernel_times(graph, machine("h200")), strict=True)
        if "attention" in op.name
    ]
    assert 1e6 * sum(found) == pytest.approx(sum(time for _, time in measured.values()), rel=0.15)
