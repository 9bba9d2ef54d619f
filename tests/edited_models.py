"""Small models with a change that an edit also makes, and how far a graph that was edited is from one captured anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from presage.capture import capture
from presage.graph.graph import Graph, Op, faults
from presage.memory.step_memory import memory_profile
from presage.prediction.machine import kernel_times, machine
from presage.prediction.step import step_program

__all__ = ["agree", "captured", "different", "kernels", "pictures", "tokens"]


class RMSNorm(nn.Module):
    """Squares in float32, the result in the type of the input: casts that code asks for."""

    def __init__(self, d: int, device: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(d, device=device))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.w


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, how: str, device: Any) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.out = nn.Linear(d, 3 * d, device=device), nn.Linear(d, d, device=device)

    def forward(self, x: Any, mask: Any) -> Any:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = 0.1 if self.how == "dropped" else 0.0
        if self.how == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how in ("masked", "dropped_fused"):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 * (self.how == "dropped_fused"))
        else:
            a = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
            a = a.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else a + mask
            y = F.dropout(a.softmax(-1), p) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, d: int, how: str, device: Any) -> None:
        super().__init__()
        self.norm, self.attend = RMSNorm(d, device), Attention(d, 4, how, device)
        up, down = nn.Linear(d, 2 * d, device=device), nn.Linear(2 * d, d, device=device)
        self.mlp = nn.Sequential(nn.LayerNorm(d, device=device), up, nn.GELU(), down)

    def forward(self, x: Any, mask: Any) -> Any:
        x = x + self.attend(self.norm(x), mask)
        return x + self.mlp(x)


def tokens(
    device: Any, how: str = "fused", amp: str = "", dtype: str = "", tf32: bool = False, accumulate: int = 1,
    spread: bool = False, d: int = 128,
) -> Any:  # fmt: skip
    """A little language model: tied to nothing, two blocks."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    blocks = nn.ModuleList([Block(d, how, device) for _ in range(2)])
    ends = {"embed": nn.Embedding(500, d, device=device), "head": nn.Linear(d, 500, bias=False, device=device)}
    m = nn.ModuleDict({**ends, "blocks": blocks})
    m = m.to(getattr(torch, dtype)) if dtype else m
    x, y = torch.randint(0, 500, (4, 96), device=device), torch.randint(0, 500, (4 * 96,), device=device)
    mask: Any = torch.ones(96, 96, dtype=torch.bool, device=device).triu(1)
    if spread:
        mask = torch.rand(4, 1, 96, 96, device=device)
        mask = mask.to(getattr(torch, dtype or amp)) if dtype or amp else mask

    def loss() -> Any:
        h = m["embed"](x)
        for block in m["blocks"]:
            h = block(h, mask)
        return F.cross_entropy(m["head"](h).view(-1, 500).float(), y)

    return _stepper(m, loss, amp, accumulate)


class Picture(nn.Module):
    """Convolutions of several kinds, norms with and without a layout of their own, pooling, a skip and a head."""

    def __init__(self, c: int, device: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1, device=device), nn.BatchNorm2d(c, device=device), nn.ReLU()
        )
        self.deep = nn.Conv2d(c, c, 3, padding=1, groups=c, device=device)
        self.group, self.down = nn.GroupNorm(4, c, device=device), nn.Conv2d(c, 2 * c, 3, 2, 1, device=device)
        self.head = nn.Linear(2 * c, 10, device=device)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        x = x + F.silu(self.group(self.deep(x)))
        return self.head(F.max_pool2d(self.down(x), 2).mean((2, 3)))


def pictures(device: Any, amp: str = "", dtype: str = "", last: bool = False, tf32: bool = False) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    m: Any = Picture(16, device)
    x, y = torch.randn(8, 3, 32, 32, device=device), torch.randint(0, 10, (8,), device=device)
    if dtype:
        m, x = m.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))
    if last:
        m, x = m.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return _stepper(m, lambda: F.cross_entropy(m(x).float(), y), amp, 1)


def _stepper(m: nn.Module, loss_of: Callable[[], Any], amp: str, accumulate: int) -> Callable[[], None]:
    opt = torch.optim.AdamW(m.parameters(), fused=True)

    def step() -> None:
        opt.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            if amp:
                with torch.autocast("cuda", dtype=getattr(torch, amp)):
                    loss = loss_of() / accumulate
            else:
                loss = loss_of() / accumulate
            loss.backward()
        opt.step()

    return step


@cache
def captured(build: Callable[..., Any], *arguments: tuple[str, Any]) -> Graph:
    return capture(lambda device: build(device, **dict(arguments)), {}, source="")


def kernels(graph: Graph, strides: bool = False) -> Counter[Any]:
    """Ops that launch something, by name, shapes and types; `strides` beside them where more than one element long."""
    return Counter(_key(graph, op, strides) for op in graph.ops if op.kernels)


def _key(graph: Graph, op: Op, strides: bool) -> Any:
    lies = [tuple(s for n, s in zip(t.shape, t.strides, strict=True) if n > 1) for t in graph.inputs_of(op)]
    return op.name, tuple((t.shape, t.dtype) for t in graph.inputs_of(op)), tuple(lies) if strides else ()


def different(one: Graph, other: Graph, strides: bool = False) -> Counter[Any]:
    a, b = kernels(one, strides), kernels(other, strides)
    return (a - b) + (b - a)


def agree(edited: Graph, anew: Graph, gpu: float = 0.01, host: float = 0.03, memory: float = 0.01) -> None:
    """An edited graph is valid, and takes as long and as much memory as the one captured anew."""
    assert not list(faults(edited))
    (a, ha, ma), (b, hb, mb) = _cost(edited), _cost(anew)
    assert abs(a / b - 1) <= gpu, f"GPU {a / b - 1:+.2%}"
    assert abs(ha / hb - 1) <= host, f"host {ha / hb - 1:+.2%}"
    assert abs(ma / mb - 1) <= memory, f"memory {ma / mb - 1:+.2%}"


def _cost(graph: Graph) -> tuple[float, float, int]:
    where = _h200()
    times = kernel_times(graph, where)
    built = step_program(graph, times, where.host)
    return sum(t.seconds for t in times), built.host_total, memory_profile(graph).peak_allocated


@cache
def _h200() -> Any:
    return machine("h200")
