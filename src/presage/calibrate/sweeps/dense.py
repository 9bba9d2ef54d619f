"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import MOST_BYTES, both_ways, log_int, pick, tensor, typical

# Rough H200 rates, only to keep a draw's time bounded.
RATE = {"float32": 5e13, "tf32": 4e14, "bfloat16": 7e14, "float16": 7e14}
LONGEST = 12e-3


def sample_gemm(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind = pick(rng, ("float32", "tf32", "bfloat16", "float16"), [0.25, 0.2, 0.4, 0.15])
        m, n, k = (typical(rng, 1, 66000) if rng.random() < 0.1 else typical(rng, 16, 33000) for _ in range(3))
        batch = 1 if rng.random() < 0.75 else typical(rng, 2, 2048)
        width = 4 if kind in ("float32", "tf32") else 2
        small = 2 * batch * m * n * k / RATE[kind] < LONGEST and width * batch * (m * k + k * n + m * n) < MOST_BYTES
        if small and batch * m * n * k >= 4096:
            break
    layout = pick(rng, ("nn", "nt", "tn"), [0.3, 0.4, 0.3])
    return {
        "kind": kind,
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "layout": layout,
        "bias": bool(batch == 1 and rng.random() < 0.4),
    }


def build_gemm(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    torch.backends.cuda.matmul.allow_tf32 = p["kind"] == "tf32"
    dtype = "float32" if p["kind"] == "tf32" else p["kind"]
    b, m, n, k = p["batch"], p["m"], p["n"], p["k"]
    order = {"n": [0, 1, 2], "t": [0, 2, 1]}
    x = tensor(torch, (b, m, k), dtype, order=order[p["layout"][0]])
    y = tensor(torch, (b, k, n), dtype, order=order[p["layout"][1]])
    if b > 1:
        return lambda: torch.bmm(x, y)
    x, y = x[0], y[0]
    if p["bias"]:
        z = tensor(torch, (n,), dtype)
        return lambda: torch.addmm(z, x, y)
    return lambda: torch.mm(x, y)


def sample_attention(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        dtype = pick(rng, ("bfloat16", "float16", "float32"), [0.55, 0.2, 0.25])
        b, h = log_int(rng, 1, 128), pick(rng, (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 64))
        d = pick(rng, (32, 40, 48, 64, 80, 96, 128, 256), [0.06, 0.05, 0.04, 0.4, 0.07, 0.06, 0.27, 0.05])
        s = typical(rng, 16, 16384)
        t = s if rng.random() < 0.85 else typical(rng, 16, 8192)
        if 4 * b * h * s * t * d / (3e13 if dtype == "float32" else 3e14) < LONGEST and b * h * (s + t) * d < 3e8:
            break
    return {
        "dtype": dtype,
        "b": b,
        "h": h,
        "s": s,
        "t": t,
        "d": d,
        "causal": bool(s == t and rng.random() < 0.5),
        "dropout": 0.1 if rng.random() < 0.15 else 0.0,
        "bias": bool(rng.random() < 0.1),
        "interleaved": bool(rng.random() < 0.5),
    }


def build_attention(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    order = [0, 2, 1, 3] if p["interleaved"] else None
    shape = (p["b"], p["h"], p["s"], p["d"])
    q = tensor(torch, shape, p["dtype"], True, order)
    k, v = (tensor(torch, (p["b"], p["h"], p["t"], p["d"]), p["dtype"], True, order) for _ in range(2))
    bias = tensor(torch, (1, 1, p["s"], p["t"]), p["dtype"]) if p["bias"] and not p["causal"] else None
    grad = tensor(torch, shape, p["dtype"], order=order)
    options = {"attn_mask": bias, "is_causal": p["causal"], "dropout_p": p["dropout"]}
    attend = torch.nn.functional.scaled_dot_product_attention
    return both_ways(torch, lambda: attend(q, k, v, **options), [q, k, v], grad)


FAMILIES = {"gemm": (sample_gemm, build_gemm, 1500), "attention": (sample_attention, build_attention, 320)}
