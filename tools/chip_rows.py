"""Measured products and attention that chips are fitted on: published kernel tables and our own measurements."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from presage_fit.table_split import held_out_widths

SLOW_PATH = 1.3  # a product so much slower than one with more rows was not the kernel's doing
MS, US = 1e-3, 1e-6
SMALLEST = 1e8  # FLOPs
HOST_BOUND = 1.5e-4  # seconds
# Collectors of attention that run the fused kernels training runs too, and not those of a paged cache.
FUSED = {
    "a100_sxm": ("sglang0.5.10", "sglang0.5.9", "vllm0.14.0"),
    "h100_sxm": ("sglang0.5.10", "sglang0.5.14", "sglang0.5.9", "vllm0.24.0"),
    "h200_sxm": ("sglang0.5.10", "sglang0.5.14", "sglang0.5.9", "vllm0.24.0"),
    "b200_sxm": ("sglang0.5.14", "sglang0.5.9", "vllm0.19.0", "vllm0.22.0", "vllm0.24.0"),
    "l40s": ("sglang0.5.10", "sglang0.5.9", "vllm0.14.0", "vllm0.22.0"),
}
SLOW_KERNELS = ("triton", "vllm_flashinfer_trtllmdecode")


@dataclass(frozen=True)
class Product:
    m: int
    n: int
    k: int
    batch: int
    seconds: float
    left: bool = False
    right: bool = True

    @property
    def held(self) -> bool:
        """A fifth of the pairs of widths, whatever the tokens."""
        return held_out_widths("gemm", (self.m, self.n, self.k))

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    value_dim: int
    causal: bool
    window: int
    seconds: float

    @property
    def held(self) -> bool:
        """A fifth of the pairs of batch and heads."""
        return held_out_widths("attention", (self.batch, self.length, self.heads, self.kv_heads, self.dim, self.window))


def table(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as f:
        yield from csv.DictReader(f)


def gemm_table(path: Path) -> list[Product]:
    """Medians over the collectors, without slow paths."""
    times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for r in table(path):
        times[int(r["n"]), int(r["k"]), int(r["m"])].append(float(r["latency_ms"]) * MS)
    found = sorted((shape, float(np.median(t))) for shape, t in times.items())
    slow = {a[0] for a, b in pairwise(found) if a[0][:2] == b[0][:2] and a[1] > SLOW_PATH * b[1]}
    return [Product(m, n, k, 1, t) for (n, k, m), t in found if (n, k, m) not in slow]


def attention_table(path: Path) -> list[Attention]:
    """Medians over the collectors of fused kernels; heads wider than 256 have none."""
    chosen = FUSED[next(name for name in FUSED if path.name.startswith(name))]
    columns = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim", "window_size")
    times: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for r in table(path):
        if r["framework"] + r["version"] in chosen and r["kernel"] not in SLOW_KERNELS:
            times[tuple(int(r[c]) for c in columns)].append(float(r["latency_ms"]) * MS)
    return [
        Attention(b, h, kv, s, d, d, True, w, float(np.median(t)))
        for (b, h, kv, s, d, w), t in times.items()
        if d <= 256
    ]


def neusight(folder: Path, device: str) -> list[Product]:
    """Float32 products, CUDA-event times."""
    out = []
    for name in ("train_linear", "test_linear", "train_bmm", "test_bmm", "amd_test_linear", "amd_test_bmm"):
        for r in table(folder / f"{name}.csv.gz"):
            if r["device"] == device:
                b, m, n, k = (int(float(r[c])) for c in "BMNK")
                rows, batch = (b * m, 1) if "linear" in name else (m, b)
                out.append(Product(rows, n, k, batch, float(r["latency_ms"]) * MS))
    return [p for p in out if p.flops > SMALLEST]


def pack_products(pack: Path, kind: str) -> list[Product]:
    """Kernel times of our own H200, warm."""
    out = []
    with gzip.open(pack / "gemm.jsonl.gz", "rt") as f:
        for line in f:
            row = json.loads(line)
            if row["p"].get("kind") == kind:
                out += [p for p in map(_leaf, row["ops"]) if p is not None and p.flops > SMALLEST]
    return out


def _leaf(op: dict[str, Any]) -> Product | None:
    if op["op"] not in ("aten::mm", "aten::bmm"):
        return None
    a, b = op["dims"][:2]
    if min(a[-2], a[-1], b[-1]) < 64:
        return None
    first, second = op["strides"][:2]
    batch = a[0] if len(a) == 3 else 1
    return Product(a[-2], b[-1], a[-1], batch, op["us"] * US, first[-1] != 1, second[-1] != 1)


def jobs(folder: Path, name: str) -> Any:
    """Rows of our own bursts on an H200."""
    with gzip.open(folder / f"{name}.json.gz", "rt") as f:
        return json.load(f)["rows"]


def jobs_products(folder: Path, kind: str) -> list[Product]:
    """In fp8 as Transformer Engine has them: one in three forward, with quick sums, the others with exact ones."""
    rows = jobs(folder, "products")
    if kind == "fp8":
        return [Product(r["m"], r["n"], r["k"], 1, (r["fp8"] + 2 * r["fp8_exact"]) / 3) for r in rows]
    out = [Product(r["m"], r["n"], r["k"], 1, r["bf16"]) for r in rows]
    return out + [Product(r["m"], r["n"], r["k"], 1, r["bf16"], True, False) for r in jobs(folder, "gradients")]


def jobs_attention(folder: Path, backend: str, way: str) -> list[Attention]:
    """Under a mask or not. Left out: times long enough to lower the clock, slow paths without a mask, and backward
    passes so short that the host's part shows."""
    return [
        Attention(r["batch"], r["heads"], r["kv_heads"], r["length"], r["dim"], r["value_dim"], r["causal"], 0, r[way])
        for r in jobs(folder, "attention")
        if r["backend"] == backend
        and isinstance(r.get(way), float)
        and r["length"] <= 16384
        and r["batch"] * r["length"] >= 2048
        and (r["causal"] or r["dim"] == r["value_dim"])
        and r[way] > (HOST_BOUND if way == "backward" else 0.0)
    ]
