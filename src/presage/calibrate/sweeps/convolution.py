"""Convolutions both ways, pooling and upsampling, recurrent nets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import both_ways, log_int, pick, tensor, typical

LONGEST = 15e-3


def sample_conv(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind = pick(rng, ("float32", "tf32", "bfloat16", "float16"), [0.25, 0.2, 0.4, 0.15])
        dims = pick(rng, (1, 2, 3), [0.1, 0.82, 0.08])
        n, size = log_int(rng, 1, 512), log_int(rng, 4, {1: 16000, 2: 320, 3: 48}[dims])
        depthwise = rng.random() < 0.15
        i = 3 if rng.random() < 0.08 else typical(rng, 8, 2048)
        o = i if depthwise else typical(rng, 8, 2048)
        k = pick(rng, (1, 2, 3, 4, 5, 7, 16), [0.36, 0.04, 0.42, 0.03, 0.06, 0.07, 0.02])
        groups = i if depthwise else (1 if rng.random() < 0.9 else pick(rng, (2, 4, 8, 32)))
        stride = pick(rng, (1, 2, 4), [0.72, 0.25, 0.03])
        transposed = bool(rng.random() < 0.06 and not depthwise)
        if i % groups or o % groups or k > size:
            continue
        out = (size // stride) ** dims
        flops = 2 * n * out * o * (i // groups) * k**dims
        moved = 4 * n * (size**dims * i + out * o)
        rate = 3e13 if kind == "float32" else 1.5e14
        if flops > 1e5 and flops / rate < LONGEST and moved < 3e9:
            break
    return {
        "kind": kind,
        "dims": dims,
        "n": n,
        "i": i,
        "o": o,
        "size": size,
        "k": k,
        "stride": stride,
        "groups": groups,
        "padding": int(pick(rng, (0, k // 2), [0.2, 0.8])),
        "dilation": 2 if k == 3 and rng.random() < 0.06 else 1,
        "transposed": transposed,
        "channels_last": bool(dims > 1 and rng.random() < 0.5),
        "bias": bool(rng.random() < 0.3),
    }


def build_conv(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    torch.backends.cudnn.allow_tf32 = p["kind"] == "tf32"
    dtype = "float32" if p["kind"] == "tf32" else p["kind"]
    name = f"Conv{'Transpose' if p['transposed'] else ''}{p['dims']}d"
    m = getattr(torch.nn, name)(
        p["i"],
        p["o"],
        p["k"],
        p["stride"],
        p["padding"],
        dilation=p["dilation"],
        groups=p["groups"],
        bias=p["bias"],
        device="cuda",
        dtype=getattr(torch, dtype),
    )
    x = tensor(torch, (p["n"], p["i"], *[p["size"]] * p["dims"]), dtype)
    if p["channels_last"]:
        last = torch.channels_last if p["dims"] == 2 else torch.channels_last_3d
        m, x = m.to(memory_format=last), x.to(memory_format=last)
    x.requires_grad_(True)
    return both_ways(torch, lambda: m(x), [x, *m.parameters()])


def sample_pool(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "what": pick(rng, ("max", "avg", "adaptive", "nearest", "bilinear")),
        "dtype": pick(rng, ("float32", "bfloat16")),
        "n": log_int(rng, 1, 256),
        "c": typical(rng, 8, 1024),
        "size": log_int(rng, 8, 128),
        "k": pick(rng, (2, 3)),
        "channels_last": bool(rng.random() < 0.5),
    }


def build_pool(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    n = min(p["n"], max(1, int(3e8 / (p["c"] * p["size"] ** 2 * 4))))
    x = tensor(torch, (n, p["c"], p["size"], p["size"]), p["dtype"])
    if p["channels_last"]:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    f = torch.nn.functional
    go = {
        "max": lambda: f.max_pool2d(x, p["k"], 2),
        "avg": lambda: f.avg_pool2d(x, p["k"], 2),
        "adaptive": lambda: f.adaptive_avg_pool2d(x, 1),
        "nearest": lambda: f.interpolate(x, scale_factor=2, mode="nearest"),
        "bilinear": lambda: f.interpolate(x, scale_factor=2, mode="bilinear"),
    }[p["what"]]
    return both_ways(torch, go, [x])


def sample_rnn(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "what": pick(rng, ("LSTM", "GRU", "RNN"), [0.5, 0.35, 0.15]),
        "dtype": pick(rng, ("float32", "bfloat16"), [0.7, 0.3]),
        "b": log_int(rng, 4, 512),
        "s": log_int(rng, 8, 256),
        "i": typical(rng, 32, 1024),
        "d": typical(rng, 32, 1024),
        "layers": pick(rng, (1, 2, 3)),
        "both": bool(rng.random() < 0.25),
    }


def build_rnn(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    torch.backends.cudnn.allow_tf32 = False
    kind = getattr(torch, p["dtype"])
    make = getattr(torch.nn, p["what"])
    m = make(p["i"], p["d"], p["layers"], batch_first=True, bidirectional=p["both"], device="cuda", dtype=kind)
    x = tensor(torch, (p["b"], p["s"], p["i"]), p["dtype"], True)
    return both_ways(torch, lambda: m(x)[0], [x, *m.parameters()])


FAMILIES = {
    "conv": (sample_conv, build_conv, 700),
    "pool": (sample_pool, build_pool, 80),
    "rnn": (sample_rnn, build_rnn, 50),
}
