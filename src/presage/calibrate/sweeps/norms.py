"""Normalisations, softmax and losses, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import both_ways, log_int, pick, tensor, typical


def sample_norm(rng: np.random.Generator) -> dict[str, Any]:
    what = pick(rng, ("layer", "batch", "group", "batch_flat"), [0.45, 0.3, 0.15, 0.1])
    channels = typical(rng, 16, 8192 if what == "layer" else 2048)
    size = log_int(rng, 4, 112)
    rows = (
        log_int(rng, 8, 1.5e8 / channels)
        if what in ("layer", "batch_flat")
        else max(1, int(log_int(rng, 1e4, 1.5e8) / (channels * size**2)))
    )
    return {
        "what": what,
        "dtype": pick(rng, ("float32", "bfloat16")),
        "rows": int(rows),
        "channels": channels,
        "size": size,
        "groups": pick(rng, (1, 8, 32)),
        "channels_last": bool(rng.random() < 0.5),
        "mixed": bool(rng.random() < 0.5),
    }


def build_norm(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    nn, c = torch.nn, p["channels"]
    weights = torch.float32 if p["mixed"] and p["what"] != "layer" else getattr(torch, p["dtype"])
    if p["what"] == "layer":
        m, x = nn.LayerNorm(c, device="cuda", dtype=weights), tensor(torch, (p["rows"], c), p["dtype"])
    elif p["what"] == "batch_flat":
        m, x = nn.BatchNorm1d(c, device="cuda", dtype=weights), tensor(torch, (p["rows"], c), p["dtype"])
    else:
        x = tensor(torch, (p["rows"], c, p["size"], p["size"]), p["dtype"])
        if p["what"] == "batch":
            m = nn.BatchNorm2d(c, device="cuda", dtype=weights)
        else:
            groups = next(g for g in (p["groups"], 8, 1) if c % g == 0)
            m = nn.GroupNorm(groups, c, device="cuda", dtype=getattr(torch, p["dtype"]))
        if p["channels_last"]:
            x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    return both_ways(torch, lambda: m(x), [x, *m.parameters()])


def sample_softmax(rng: np.random.Generator) -> dict[str, Any]:
    columns = typical(rng, 2, 200000)
    return {
        "what": pick(
            rng, ("softmax", "log_softmax", "cross_entropy", "bce", "mse", "nll"), [0.3, 0.2, 0.25, 0.1, 0.1, 0.05]
        ),
        "dtype": pick(rng, ("float32", "bfloat16"), [0.7, 0.3]),
        "rows": log_int(rng, 1, max(2.0, 1.2e8 / columns)),
        "columns": columns,
    }


def build_softmax(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    f = torch.nn.functional
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"], True)
    target = torch.randint(0, p["columns"], (p["rows"],), device="cuda")
    other = torch.rand_like(x.detach())
    go = {
        "softmax": lambda: x.softmax(-1),
        "log_softmax": lambda: x.log_softmax(-1),
        "cross_entropy": lambda: f.cross_entropy(x, target),
        "nll": lambda: f.nll_loss(x, target),
        "bce": lambda: f.binary_cross_entropy_with_logits(x, other),
        "mse": lambda: f.mse_loss(x, other),
    }[p["what"]]
    return both_ways(torch, go, [x])


FAMILIES = {"norm": (sample_norm, build_norm, 420), "softmax": (sample_softmax, build_softmax, 260)}
