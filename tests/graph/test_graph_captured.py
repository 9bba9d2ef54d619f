"""Captured steps: valid graphs, with the FLOPs torch's FlopCounterMode counts of the same step on meta tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from presage.capture import capture  # noqa: E402
from presage.cli import graph as graph_command  # noqa: E402
from presage.graph import builder as edit  # noqa: E402
from presage.graph import save, summary, work  # noqa: E402
from presage.graph.diff import diff  # noqa: E402
from presage.graph.graph import (  # noqa: E402
    Graph,
    check,
)

Step = Callable[[], Any]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3, vocabulary: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stepper(model: nn.Module, loss: Callable[[], Any]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


def gpt(device: str, batch: int = 2, seq: int = 16, amp: bool = False) -> Step:
    with torch.device(device):
        model = Gpt()
        ids = torch.zeros(batch, seq, dtype=torch.long)

    def loss() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp and device != "meta"):
            return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return stepper(model, loss)


def resnet(device: str, batch: int = 2) -> Step:
    def unit(i: int, o: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    with torch.device(device):
        model = nn.Sequential(
            unit(3, 16, 2),
            nn.MaxPool2d(3, 2, 1),
            unit(16, 32, 2),
            unit(32, 32, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        x, y = torch.zeros(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)
    return stepper(model, lambda: F.cross_entropy(model(x), y))


def bert(device: str, attention: str = "eager") -> Step:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    config._attn_implementation = attention
    with torch.device(device):
        model = transformers.BertForMaskedLM(config)
        ids = torch.zeros(2, 16, dtype=torch.long)
    return stepper(model, lambda: F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten()))


def counted(build: Callable[..., Step], **arguments: Any) -> int:
    step = build("meta", **arguments)
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def recomputed(graph: Graph) -> int:
    """On meta tensors attention keeps its scores; the fused backward computes them again, half of its forward."""
    forward = [op for op in graph.ops if work.family(op.name) == "attention" and op.phase == "forward"]
    return sum(work.flops(graph, op) for op in forward) // 2


@pytest.mark.parametrize("amp", [False, True])
def test_a_gpt(amp: bool) -> None:
    graph = check(capture(gpt, {"amp": amp}))
    assert recomputed(graph) > 0
    assert work.total(graph).flops == counted(gpt) + recomputed(graph)
    rows = {r.name: r for r in summary.by_module(graph, 1)}
    assert rows["blocks.1"].parameters == 12 * 64 * 64 + 13 * 64
    products = 2 * 32 * 12 * 64 * 64
    attention = 2 * 2 * 2 * 4 * 16 * 16 * 16
    assert rows["blocks.1"].flops_forward == products + attention
    assert rows["blocks.1"].flops_backward == 2 * products + 5 * attention // 2
    assert rows["head"].flops == 3 * 2 * 32 * 64 * 128


def test_a_resnet() -> None:
    graph = check(capture(resnet))
    assert work.total(graph).flops == counted(resnet)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_bert(attention: str) -> None:
    graph = check(capture(bert, {"attention": attention}))
    assert work.total(graph).flops == counted(bert, attention=attention) + recomputed(graph)


def test_captured_graphs_can_be_saved_edited_and_compared() -> None:
    small, large = capture(gpt), capture(gpt, {"batch": 4})
    assert save.from_bytes(save.to_bytes(small)) == small
    forward = check(edit.select(small, lambda op: op.phase == "forward"))
    assert work.total(forward).flops == summary.total(small).flops_forward
    found = diff(small, large)
    assert found.count("added") == found.count("removed") == found.count("moved") == 0
    assert all("shape" in c.what for c in found.changes)
    assert not diff(small, capture(gpt))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import torch
def build(device, batch=4, sizes=(8, 8), bias=True):
    layers = [torch.nn.Linear(a, b, bias=bias, device=device) for a, b in zip(sizes, sizes[1:])]
    model, x = torch.nn.Sequential(*layers), torch.zeros(batch, sizes[0], device=device)
    return lambda: model(x).sum().backward()
"""
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(graph_command.command)
    given = ["--arg", "batch=16", "--arg", "sizes=[32, 64, 8]", "--arg", "bias=false"]
    found = CliRunner().invoke(app, ["train.py:build", *given, "--json", "-", "--out", "step.presage"])
    assert found.exit_code == 0, found.exception
    value = json.loads(found.stdout)
    assert value["arguments"] == {"batch": "16", "sizes": "[32, 64, 8]", "bias": "False"}
    assert value["total"]["flops_forward"] == 2 * 16 * (32 * 64 + 64 * 8)
    assert [m["parameters"] for m in value["modules"][:2]] == [32 * 64, 64 * 8]
    again = CliRunner().invoke(app, ["step.presage", "--diff", "step.presage"])
    assert "no difference" in again.stdout
