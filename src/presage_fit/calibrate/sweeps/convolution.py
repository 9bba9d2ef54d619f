"""Convolutions (forward, data gradient, weight gradient apart), pooling and upsampling, recurrent nets."""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, pick, tensor, typical, values

LONGEST = 5e-3
CHANNELS = (
    8, 16, 24, 32, 40, 48, 64, 64, 80, 96, 112, 128, 128, 144, 160, 192, 224, 240, 256, 256, 288, 320, 384, 432, 480,
    512, 512, 576, 640, 672, 728, 768, 816, 960, 1024, 1024, 1152, 1280, 1536, 2048,
)  # fmt: skip
SIZES = {
    1: (128, 256, 512, 1000, 1024, 1500, 3000, 4096, 8000, 16000),
    2: (
        4, 7, 7, 8, 14, 14, 16, 17, 19, 24, 28, 28, 32, 35, 38, 40, 48, 56, 56, 64, 75, 80, 96, 112, 128, 150, 224, 256,
    ),
    3: (4, 7, 8, 14, 16, 28, 32, 56),
}  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS = {"float32": 0.2, "tf32": 0.35, "bfloat16": 0.35, "float16": 0.1}


def _shape(rng: np.random.Generator, dims: int) -> dict[str, Any]:
    i, o = (values(rng, CHANNELS, 0.85, 8, 2048) for _ in range(2))
    k = int(near(rng, {1: 0.38, 2: 0.04, 3: 0.38, 4: 0.03, 5: 0.06, 7: 0.07}))
    stride = int(near(rng, {1: 0.75, 2: 0.25}))
    padding = int(pick(rng, (0, k // 2), [0.15, 0.85]))
    groups = 1
    scene = rng.random()
    if scene < 0.05:  # the stem of a net
        i, stride, k = int(near(rng, {3: 0.8, 1: 0.1, 4: 0.1})), int(pick(rng, (1, 2))), int(pick(rng, (3, 5, 7)))
        padding = k // 2
    elif scene < 0.1 and dims < 3:  # patches
        i = 3 if rng.random() < 0.5 else i
        k = stride = int(pick(rng, (2, 4, 8, 14, 16, 32)))
        padding = 0
    elif scene < 0.26:  # depthwise
        o, groups, k = i, i, int(pick(rng, (3, 3, 5, 7)))
        padding = k // 2
    elif scene < 0.33:
        groups = int(pick(rng, (2, 4, 8, 16, 32, 64)))
    return {"i": i, "o": o, "k": k, "stride": stride, "padding": padding, "groups": groups}


def sample_conv(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind, dims = near(rng, KINDS), int(near(rng, {1: 0.08, 2: 0.86, 3: 0.06}))
        n, size = values(rng, BATCHES, 0.75, 1, 512), values(rng, SIZES[dims], 0.8, 4, max(SIZES[dims]))
        s = _shape(rng, dims)
        if s["i"] % s["groups"] or s["o"] % s["groups"] or s["k"] > size + 2 * s["padding"]:
            continue
        out = max(1, size // s["stride"]) ** dims
        flops = 2 * n * out * s["o"] * (s["i"] // s["groups"]) * s["k"] ** dims
        moved = 4 * n * (size**dims * s["i"] + out * s["o"])
        rate = 4e13 if kind == "float32" else 2e14
        if flops > 1e5 and flops / rate < LONGEST and moved < (1e9 if s["groups"] > 1 else 2e9):
            break
    wide = dims > 1 and rng.random() < (0.6 if kind in ("bfloat16", "float16") else 0.25)
    return {
        "kind": kind,
        "dims": dims,
        "n": n,
        "size": size,
        **s,
        "dilation": 2 if s["k"] == 3 and rng.random() < 0.05 else 1,
        "transposed": bool(rng.random() < 0.06 and s["groups"] == 1),
        "channels_last": bool(wide),
    }


def build_conv(torch: Any, p: dict[str, Any]) -> Parts:
    """The two gradients are asked for one by one: a backward pass that needs both takes the sum."""
    torch.backends.cudnn.allow_tf32 = p["kind"] == "tf32"
    dtype, dims, groups = "float32" if p["kind"] == "tf32" else p["kind"], p["dims"], p["groups"]
    ends = (p["i"], p["o"] // groups) if p["transposed"] else (p["o"], p["i"] // groups)
    w = tensor(torch, (*ends, *[p["k"]] * dims), dtype)
    x = tensor(torch, (p["n"], p["i"], *[p["size"]] * dims), dtype)
    if p["channels_last"]:
        last = torch.channels_last if dims == 2 else torch.channels_last_3d
        w, x = w.to(memory_format=last), x.to(memory_format=last)
    options = ([p["stride"]] * dims, [p["padding"]] * dims, [p["dilation"]] * dims)
    rest = (p["transposed"], [0] * dims, groups)
    y = torch.randn_like(torch.ops.aten.convolution(x, w, None, *options, *rest))

    def gradient(*mask: bool) -> Any:
        return lambda: torch.ops.aten.convolution_backward(y, x, w, None, *options, *rest, [*mask, False])

    return (
        lambda: torch.ops.aten.convolution(x, w, None, *options, *rest),
        gradient(True, False),
        gradient(False, True),
    )


def sample_pool(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "what": pick(rng, ("max", "avg", "adaptive", "adaptive_max", "nearest", "bilinear")),
        "dtype": pick(rng, ("float32", "bfloat16", "float16"), [0.55, 0.35, 0.1]),
        "n": values(rng, BATCHES, 0.7, 1, 512),
        "c": values(rng, CHANNELS, 0.8, 3, 2048),
        "size": values(rng, SIZES[2], 0.8, 4, 256),
        "k": int(pick(rng, (2, 3))),
        "out": int(pick(rng, (1, 1, 2, 6, 7))),
        "channels_last": bool(rng.random() < 0.4),
    }


def build_pool(torch: Any, p: dict[str, Any]) -> Parts:
    n = min(p["n"], max(1, int(8e8 / (p["c"] * p["size"] ** 2 * 4))))
    x = tensor(torch, (n, p["c"], p["size"], p["size"]), p["dtype"])
    if p["channels_last"]:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    f = torch.nn.functional
    go = {
        "max": lambda: f.max_pool2d(x, p["k"], 2, p["k"] // 3),
        "avg": lambda: f.avg_pool2d(x, p["k"], 2),
        "adaptive": lambda: f.adaptive_avg_pool2d(x, p["out"]),
        "adaptive_max": lambda: f.adaptive_max_pool2d(x, p["out"]),
        "nearest": lambda: f.interpolate(x, scale_factor=2, mode="nearest"),
        "bilinear": lambda: f.interpolate(x, scale_factor=2, mode="bilinear"),
    }[p["what"]]
    return both_ways(torch, go, [x])


def sample_rnn(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "what": pick(rng, ("LSTM", "GRU", "RNN"), [0.55, 0.35, 0.1]),
        "dtype": pick(rng, ("float32", "bfloat16", "float16"), [0.65, 0.25, 0.1]),
        "b": values(rng, BATCHES, 0.6, 1, 512),
        "s": log_int(rng, 8, 256),
        "i": typical(rng, 32, 1024),
        "d": values(rng, (64, 128, 256, 512, 650, 1024), 0.7, 32, 1536),
        "layers": int(pick(rng, (1, 2, 3))),
        "both": bool(rng.random() < 0.25),
        "tf32": bool(rng.random() < 0.7),
    }


def build_rnn(torch: Any, p: dict[str, Any]) -> Parts:
    torch.backends.cudnn.allow_tf32 = p["tf32"]
    kind = getattr(torch, p["dtype"])
    make = getattr(torch.nn, p["what"])
    m = make(p["i"], p["d"], p["layers"], batch_first=True, bidirectional=p["both"], device="cuda", dtype=kind)
    x = tensor(torch, (p["b"], p["s"], p["i"]), p["dtype"], True)
    return both_ways(torch, lambda: m(x)[0], [x, *m.parameters()])


FAMILIES = {
    "conv": (sample_conv, build_conv, 5000),
    "pool": (sample_pool, build_pool, 700),
    "rnn": (sample_rnn, build_rnn, 200),
}
