"""Draws and tensors that the sweeps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
MOST_BYTES = 6e9

Parts = Sequence[Callable[[], Any]]


def log_int(rng: np.random.Generator, low: float, high: float) -> int:
    """A whole number, uniform in its logarithm."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def typical(rng: np.random.Generator, low: float, high: float) -> int:
    """Sizes as models have them: mostly multiples of 64 or 8 or powers of two, sometimes odd."""
    value = log_int(rng, low, high)
    kind = rng.random()
    if kind < 0.35:
        value = 1 << max(0, round(float(np.log2(max(value, 1)))))
    elif kind < 0.75:
        value = max(1, round(value / 64)) * 64 if value >= 64 else max(1, round(value / 8)) * 8
    elif kind < 0.9:
        value = max(1, round(value / 8)) * 8
    return int(min(max(value, low), high))


def pick(rng: np.random.Generator, options: Any, p: Any = None) -> Any:
    return options[int(rng.choice(len(options), p=p))]


def values(rng: np.random.Generator, usual: Sequence[int], share: float, low: float, high: float) -> int:
    """One of the usual sizes with this probability, else any."""
    return int(pick(rng, usual)) if rng.random() < share else typical(rng, low, high)


def near(rng: np.random.Generator, choices: dict[Any, float]) -> Any:
    """A key, with probability proportional to its value."""
    weights = np.array(list(choices.values()))
    return pick(rng, list(choices), weights / weights.sum())


def one(call: Callable[[], Any]) -> Parts:
    """A call of one part."""
    return (call,)


def both_ways(torch: Any, run: Callable[[], Any], leaves: Sequence[Any], grad: Any = None) -> Parts:
    """Forward, then backward of `run`; the gradients of `leaves` are dropped after each call."""
    given = torch.randn_like(run()) if grad is None else grad
    made: list[Any] = []

    def forward() -> None:
        made.append(run())

    def backward() -> None:
        made.pop().backward(given)
        for leaf in leaves:
            leaf.grad = None

    return forward, backward


def tensor(torch: Any, shape: Any, dtype: str, grad: bool = False, order: Any = None) -> Any:
    """Random values; `order` is the memory order of the dimensions (slowest first)."""
    kind = getattr(torch, dtype)
    if order is None:
        x = torch.empty(tuple(shape), device="cuda", dtype=kind)
    else:
        inverse = [order.index(i) for i in range(len(shape))]
        x = torch.empty([shape[i] for i in order], device="cuda", dtype=kind).permute(inverse)
    if kind.is_floating_point:
        x.normal_()
    elif kind is torch.bool:
        x.copy_(torch.rand(tuple(shape), device="cuda") < 0.5)
    else:
        x.random_(0, 100)
    return x.requires_grad_(grad)
