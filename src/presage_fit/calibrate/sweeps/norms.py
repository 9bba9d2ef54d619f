"""Normalisations, softmax and losses, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, pick, tensor, values
from presage_fit.calibrate.sweeps.convolution import BATCHES, CHANNELS, SIZES
from presage_fit.calibrate.sweeps.dense import OUTPUTS, SEQUENCES, WIDTHS


def sample_norm(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {"layer": 0.36, "rms": 0.1, "batch": 0.32, "group": 0.13, "batch_flat": 0.09})
    flat = what in ("layer", "rms", "batch_flat")
    while True:
        channels = values(rng, WIDTHS, 0.8, 16, 8192) if flat else values(rng, CHANNELS, 0.85, 8, 2048)
        size = values(rng, SIZES[2], 0.85, 4, 160)
        if flat:
            tokens = values(rng, SEQUENCES, 0.8, 8, 4096) * values(rng, (1, 2, 4, 8, 16, 32, 64), 0.8, 1, 128)
            rows = tokens if rng.random() < 0.75 else log_int(rng, 1, 262144)
        else:
            rows = values(rng, BATCHES, 0.8, 1, 512)
        if rows * channels * (1 if flat else size**2) < 3e8:
            break
    return {
        "what": what,
        "dtype": near(rng, {"float32": 0.5, "bfloat16": 0.42, "float16": 0.08}),
        "rows": int(rows),
        "channels": channels,
        "size": size,
        "groups": int(pick(rng, (1, 8, 16, 32))),
        "channels_last": bool(rng.random() < 0.45),
        "mixed": bool(rng.random() < 0.7),
        "affine": bool(rng.random() < 0.9),
    }


def build_norm(torch: Any, p: dict[str, Any]) -> Parts:
    nn, c, what = torch.nn, p["channels"], p["what"]
    kind = getattr(torch, p["dtype"])
    weights = torch.float32 if p["mixed"] and what.startswith("batch") else kind
    options = {"device": "cuda", "dtype": weights}
    if what in ("layer", "rms"):
        make = nn.LayerNorm if what == "layer" else nn.RMSNorm
        m, x = make(c, elementwise_affine=p["affine"], **options), tensor(torch, (p["rows"], c), p["dtype"])
    elif what == "batch_flat":
        m, x = nn.BatchNorm1d(c, **options), tensor(torch, (p["rows"], c), p["dtype"])
    else:
        x = tensor(torch, (p["rows"], c, p["size"], p["size"]), p["dtype"])
        groups = next(g for g in (p["groups"], 8, 1) if c % g == 0)
        m = nn.BatchNorm2d(c, **options) if what == "batch" else nn.GroupNorm(groups, c, **options)
        if p["channels_last"]:
            x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    return both_ways(torch, lambda: m(x), [x, *m.parameters()])


FEW = (1, 2, 3, 4, 6, 8, 8, 12, 16, 16, 16, 24, 24, 32, 32, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 192, 256)
SIDES = {1: (256, 200_000), 2: (14, 512), 3: (8, 160)}


def sample_planes(rng: np.random.Generator) -> dict[str, Any]:
    """Few channels over large planes, as first layers, volumes and sequences have them: few blocks do all the work."""
    while True:
        dims, n, channels = near(rng, {1: 0.15, 2: 0.55, 3: 0.3}), log_int(rng, 1, 512), int(pick(rng, FEW))
        size = [log_int(rng, *SIDES[dims])] * dims
        if dims == 3 and rng.random() < 0.4:
            size[0] = int(pick(rng, (4, 8, 16, 32)))
        if 2e4 < n * channels * float(np.prod(size)) < 2.5e8:
            break
    return {
        "what": near(rng, {"batch": 0.88, "instance": 0.12}),
        "dtype": near(rng, {"float32": 0.38, "bfloat16": 0.47, "float16": 0.15}),
        "n": n,
        "channels": channels,
        "size": size,
        "channels_last": bool(dims > 1 and rng.random() < 0.55),
        "mixed": bool(rng.random() < 0.9),
    }


def build_planes(torch: Any, p: dict[str, Any]) -> Parts:
    nn, dims = torch.nn, len(p["size"])
    x = tensor(torch, (p["n"], p["channels"], *p["size"]), p["dtype"])
    if p["channels_last"]:
        x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    make = getattr(nn, f"{'Batch' if p['what'] == 'batch' else 'Instance'}Norm{dims}d")
    weights = torch.float32 if p["mixed"] and p["what"] == "batch" else getattr(torch, p["dtype"])
    m = make(p["channels"], affine=True, device="cuda", dtype=weights)
    x.requires_grad_(True)
    return both_ways(torch, lambda: m(x), [x, *m.parameters()])


def sample_softmax(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {
        "softmax": 0.3, "log_softmax": 0.16, "cross_entropy": 0.2, "softmax_to_float": 0.08, "nll": 0.04, "bce": 0.07,
        "mse": 0.05, "smooth_l1": 0.03, "l1": 0.02, "kl_div": 0.02, "huber": 0.03,
    })  # fmt: skip
    if what.startswith("softmax"):
        columns = values(rng, SEQUENCES, 0.75, 2, 8192)
    else:
        columns = values(rng, OUTPUTS, 0.6, 2, 200000)
    tokens = values(rng, SEQUENCES, 0.8, 8, 4096) * values(rng, (1, 2, 4, 8, 16, 32), 0.8, 1, 128)
    rows = tokens if rng.random() < 0.7 else log_int(rng, 1, 1e6)
    return {
        "what": what,
        "dtype": near(rng, {"float32": 0.6, "bfloat16": 0.34, "float16": 0.06}),
        "rows": int(min(rows, max(1.0, 5e8 / columns))),
        "columns": columns,
    }


def build_softmax(torch: Any, p: dict[str, Any]) -> Parts:
    f, what = torch.nn.functional, p["what"]
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"], True)
    if what in ("cross_entropy", "nll"):
        target = torch.randint(0, p["columns"], (p["rows"],), device="cuda")
        loss = f.cross_entropy if what == "cross_entropy" else f.nll_loss
        return both_ways(torch, lambda: loss(x, target), [x])
    if what.endswith("softmax"):
        return both_ways(torch, lambda: getattr(x, what)(-1), [x])
    if what == "softmax_to_float":
        return both_ways(torch, lambda: x.softmax(-1, dtype=torch.float32), [x])
    other = torch.rand_like(x.detach())
    losses = {
        "bce": f.binary_cross_entropy_with_logits,
        "mse": f.mse_loss,
        "smooth_l1": f.smooth_l1_loss,
        "l1": f.l1_loss,
        "huber": f.huber_loss,
        "kl_div": f.kl_div,
    }
    return both_ways(torch, lambda: losses[what](x, other), [x])


FAMILIES = {
    "norm": (sample_norm, build_norm, 3500),
    "softmax": (sample_softmax, build_softmax, 2000),
    "planes": (sample_planes, build_planes, 3000),
}
