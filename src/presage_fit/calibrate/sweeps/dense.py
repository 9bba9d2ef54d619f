"""Matrix products and attention.

Products come in scenes: layers of transformers (tokens by widths, forward, data gradient, weight gradient), layers of
recommenders (batch by odd widths), batched products (scores of attention, interactions of features), and anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import (
    MOST_BYTES,
    Parts,
    both_ways,
    log_int,
    near,
    one,
    pick,
    tensor,
    typical,
    values,
)

# Rough H200 rates, only to keep a draw's time bounded.
RATE = {"float32": 5e13, "tf32": 4e14, "bfloat16": 7e14, "float16": 7e14}
LONGEST = 8e-3
WIDTHS = (
    64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 800, 896, 960, 1024, 1152, 1280, 1408, 1536, 1600, 1664,
    1792, 1920, 2048, 2304, 2560, 2816, 3072, 3200, 3584, 4096, 5120, 6144, 7168, 8192,
)  # fmt: skip
FACTORS = (1, 1, 1, 2, 3, 3, 4, 4, 4, 0.25, 0.5, 8 / 3, 3.5, 1.5, 6)
SEQUENCES = (16, 32, 49, 50, 64, 77, 100, 128, 144, 196, 197, 256, 257, 384, 512, 576, 577, 768, 1024, 1500, 2048, 4096)
OUTPUTS = (2, 10, 100, 1000, 8192, 21841, 30522, 32000, 32128, 32768, 50257, 50304, 50265, 64000, 128256)
KINDS = {"bfloat16": 0.5, "float16": 0.06, "tf32": 0.17, "float32": 0.27}


def _directed(rng: np.random.Generator, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """One of the three products of a layer, as [m, k] x [k, n]."""
    way = pick(rng, ("forward", "forward_plain", "data", "data_plain", "weight"), [0.33, 0.05, 0.26, 0.05, 0.31])
    if way.startswith("forward"):
        return {"m": rows, "n": outputs, "k": inputs, "layout": "nn" if way.endswith("plain") else "nt"}
    if way.startswith("data"):
        return {"m": rows, "n": inputs, "k": outputs, "layout": "nt" if way.endswith("plain") else "nn"}
    return {"m": outputs, "n": inputs, "k": rows, "layout": "tn"}


def _layer(rng: np.random.Generator) -> dict[str, Any]:
    width = values(rng, WIDTHS, 0.85, 32, 8192)
    other = max(8, round(width * pick(rng, FACTORS) / 8) * 8)
    if rng.random() < 0.08:
        other = int(pick(rng, OUTPUTS))
    sequence = values(rng, SEQUENCES, 0.8, 16, 8192)
    rows = sequence * values(rng, (1, 2, 4, 8, 16, 32, 64), 0.8, 1, 128)
    if rng.random() < 0.12:
        rows = typical(rng, 1, 4096)
    ends = (width, other) if rng.random() < 0.5 else (other, width)
    return {**_directed(rng, rows, *ends), "batch": 1}


def _recommender(rng: np.random.Generator) -> dict[str, Any]:
    rows = 1 << int(rng.integers(6, 17)) if rng.random() < 0.8 else typical(rng, 32, 65536)
    ends = [
        1 << int(rng.integers(2, 13)) if rng.random() < 0.6 else log_int(rng, 1, 4096) if rng.random() < 0.6 else 64
        for _ in range(2)
    ]
    if rng.random() < 0.12:
        ends[1] = 1
    return {**_directed(rng, rows, ends[0], ends[1]), "batch": 1}


def _batched(rng: np.random.Generator) -> dict[str, Any]:
    layout = pick(rng, ("nn", "nt", "tn"), [0.4, 0.35, 0.25])
    if rng.random() < 0.55:  # attention scores and their products with values
        s, d = values(rng, SEQUENCES, 0.8, 8, 4096), int(pick(rng, (16, 32, 40, 64, 80, 96, 128, 256)))
        t = s if rng.random() < 0.9 else values(rng, SEQUENCES, 0.8, 8, 4096)
        batch = log_int(rng, 1, 64) * int(pick(rng, (1, 4, 8, 12, 16, 20, 32)))
        m, n, k = (s, t, d) if layout == "nt" else (s, d, t)
    else:  # interactions of features, small products by the thousand
        batch, m, k = typical(rng, 2, 32768), log_int(rng, 2, 128), typical(rng, 4, 512)
        m, n, k = (m, m, k) if layout == "nt" else (m, k, m)
        if rng.random() < 0.3:
            batch, m, n, k = typical(rng, 2, 64), *(typical(rng, 16, 4096) for _ in range(3))
    return {"batch": max(2, batch), "m": m, "n": n, "k": k, "layout": layout}


def _any(rng: np.random.Generator) -> dict[str, Any]:
    m, n, k = (typical(rng, 1, 66000) if rng.random() < 0.1 else typical(rng, 16, 33000) for _ in range(3))
    return {"batch": 1, "m": m, "n": n, "k": k, "layout": pick(rng, ("nn", "nt", "tn"))}


def sample_gemm(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        scene = near(rng, {_layer: 0.52, _recommender: 0.18, _batched: 0.18, _any: 0.12})
        kinds = {"float32": 0.7, "tf32": 0.15, "bfloat16": 0.15} if scene is _recommender else KINDS
        p = {"kind": near(rng, kinds), **scene(rng)}
        b, m, n, k = p["batch"], p["m"], p["n"], p["k"]
        width = 4 if p["kind"] in ("float32", "tf32") else 2
        time = 2 * b * m * n * k / RATE[p["kind"]]
        if time < LONGEST and width * b * (m * k + k * n + m * n) < MOST_BYTES and b * m * n * k >= 512:
            break
    added = rng.random()
    return {**p, "bias": bool(b == 1 and p["layout"] != "tn" and added < 0.4), "added": bool(b > 1 and added < 0.12)}


def build_gemm(torch: Any, p: dict[str, Any]) -> Parts:
    torch.backends.cuda.matmul.allow_tf32 = p["kind"] == "tf32"
    dtype = "float32" if p["kind"] == "tf32" else p["kind"]
    b, m, n, k = p["batch"], p["m"], p["n"], p["k"]
    order = {"n": [0, 1, 2], "t": [0, 2, 1]}
    x = tensor(torch, (b, m, k), dtype, order=order[p["layout"][0]])
    y = tensor(torch, (b, k, n), dtype, order=order[p["layout"][1]])
    if p["added"]:
        z = tensor(torch, (b, m, n), dtype)
        return one(lambda: torch.baddbmm(z, x, y))
    if b > 1:
        return one(lambda: torch.bmm(x, y))
    x, y = x[0], y[0]
    if p["bias"]:
        z = tensor(torch, (n,), dtype)
        return one(lambda: torch.addmm(z, x, y))
    return one(lambda: torch.mm(x, y))


def sample_attention(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        dtype = pick(rng, ("bfloat16", "float16", "float32"), [0.58, 0.12, 0.3])
        b, h = values(rng, (1, 2, 4, 8, 16, 32, 64), 0.7, 1, 256), pick(rng, (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 64))
        d = int(near(rng, {16: 0.02, 32: 0.07, 40: 0.04, 48: 0.03, 64: 0.42, 72: 0.02, 80: 0.06, 96: 0.06, 128: 0.24}))
        s = values(rng, (*SEQUENCES, 8192, 16384), 0.75, 8, 16384)
        t = s if rng.random() < 0.86 else values(rng, SEQUENCES, 0.7, 8, 8192)
        if 4 * b * h * s * t * d / (3e13 if dtype == "float32" else 3e14) < 6e-3 and b * h * (s + t) * d < 3e8:
            break
    return {
        "dtype": dtype,
        "b": b,
        "h": int(h),
        "s": s,
        "t": t,
        "d": d,
        "causal": bool(s == t and rng.random() < 0.5),
        "dropout": 0.1 if rng.random() < 0.12 else 0.0,
        "bias": bool(rng.random() < 0.1),
        "interleaved": bool(rng.random() < 0.7),
        "backend": near(rng, {"": 0.7, "FLASH_ATTENTION": 0.15, "EFFICIENT_ATTENTION": 0.15}),
    }


def build_attention(torch: Any, p: dict[str, Any]) -> Parts:
    from contextlib import nullcontext

    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [0, 2, 1, 3] if p["interleaved"] else None
    shape = (p["b"], p["h"], p["s"], p["d"])
    q = tensor(torch, shape, p["dtype"], True, order)
    k, v = (tensor(torch, (p["b"], p["h"], p["t"], p["d"]), p["dtype"], True, order) for _ in range(2))
    flash = p["backend"] == "FLASH_ATTENTION"
    masked = p["bias"] and not p["causal"] and not flash
    bias = tensor(torch, (1, 1, p["s"], p["t"]), p["dtype"]) if masked else None
    grad = tensor(torch, shape, p["dtype"], order=order)
    options = {"attn_mask": bias, "is_causal": p["causal"], "dropout_p": p["dropout"]}
    attend = torch.nn.functional.scaled_dot_product_attention
    forced = p["backend"] and not (flash and p["dtype"] == "float32")

    def run() -> Any:
        with sdpa_kernel(getattr(SDPBackend, p["backend"])) if forced else nullcontext():
            return attend(q, k, v, **options)

    return both_ways(torch, run, [q, k, v], grad)


FAMILIES = {"gemm": (sample_gemm, build_gemm, 20000), "attention": (sample_attention, build_attention, 1500)}
