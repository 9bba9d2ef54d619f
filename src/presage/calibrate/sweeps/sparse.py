"""Lookups and scatters: embeddings, embedding bags, index, gather, index_add, index_put, sort, topk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import both_ways, log_int, pick, tensor, typical


def indices(torch: Any, count: int, rows: int, alpha: float) -> Any:
    """`count` row numbers below `rows`; the larger alpha, the more they repeat (0: uniform)."""
    if alpha == 0:
        return torch.randint(0, rows, (count,), device="cuda")
    u = torch.rand(count, device="cuda", dtype=torch.float64)
    rank = ((float(rows) ** (1 - alpha) - 1) * u + 1) ** (1 / (1 - alpha))
    return ((rank.long().clamp(1, rows) - 1) * 2654435761 + 12345) % rows


def sample_embedding(rng: np.random.Generator) -> dict[str, Any]:
    dim = pick(rng, (1, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096))
    rows = log_int(rng, 2, min(2e7, 2e9 / dim))
    what = pick(rng, ("embedding", "bag", "bag_sparse"), [0.45, 0.45, 0.1])
    pool = 1 if rng.random() < 0.3 else log_int(rng, 1, 128)
    count = log_int(rng, 16, min(4e6, 1e9 / dim))
    return {
        "what": what,
        "dim": dim,
        "rows": rows,
        "count": max(pool, count // pool * pool),
        "pool": pool,
        "alpha": pick(rng, (0.0, 0.0, 0.6, 0.9, 1.05, 1.2)),
        "dtype": pick(rng, ("float32", "bfloat16"), [0.85, 0.15]),
    }


def build_embedding(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    kind = getattr(torch, p["dtype"])
    i = indices(torch, p["count"], p["rows"], p["alpha"])
    if p["what"] == "embedding":
        m = torch.nn.Embedding(p["rows"], p["dim"], device="cuda", dtype=kind)
        run = lambda: m(i)  # noqa: E731
    else:
        sparse = p["what"] == "bag_sparse"
        m = torch.nn.EmbeddingBag(p["rows"], p["dim"], mode="sum", sparse=sparse, device="cuda", dtype=kind)
        offsets = torch.arange(0, p["count"], p["pool"], device="cuda")
        run = lambda: m(i, offsets)  # noqa: E731
    return both_ways(torch, run, [m.weight])


def sample_index(rng: np.random.Generator) -> dict[str, Any]:
    columns = typical(rng, 1, 2048)
    rows = log_int(rng, 2, 1e8 / columns)
    return {
        "what": pick(
            rng,
            ("index", "index_select", "gather", "index_add", "scatter_add", "index_put", "masked_fill", "index_both"),
        ),
        "dtype": pick(rng, ("float32", "bfloat16"), [0.7, 0.3]),
        "rows": rows,
        "columns": columns,
        "count": log_int(rng, 1, 1e8 / columns),
        "alpha": pick(rng, (0.0, 0.0, 0.9, 1.1)),
    }


def build_index(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"])
    i = indices(torch, p["count"], p["rows"], p["alpha"])
    what = p["what"]
    if what == "index":
        return lambda: x[i]
    if what == "index_select":
        return lambda: x.index_select(0, i)
    if what == "masked_fill":
        mask = x > 0
        return lambda: x.masked_fill(mask, 0.0)
    source = tensor(torch, (p["count"], p["columns"]), p["dtype"])
    wide = i.unsqueeze(1).expand(-1, p["columns"])
    if what == "gather":
        return lambda: x.gather(0, wide)
    if what == "index_add":
        return lambda: x.index_add_(0, i, source)
    if what == "scatter_add":
        return lambda: x.scatter_add_(0, wide, source)
    if what == "index_put":
        return lambda: x.index_put_((i,), source, accumulate=True)
    x.requires_grad_(True)
    return both_ways(torch, lambda: x[i], [x], source)


def sample_sort(rng: np.random.Generator) -> dict[str, Any]:
    columns = log_int(rng, 2, 1e6)
    return {
        "what": pick(rng, ("sort", "topk", "argsort", "unique")),
        "dtype": pick(rng, ("float32", "int64")),
        "rows": log_int(rng, 1, max(2.0, 2e7 / columns)),
        "columns": columns,
    }


def build_sort(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"])
    if p["what"] == "topk":
        return lambda: x.topk(min(8, p["columns"]), -1)
    if p["what"] == "unique":
        y = x.flatten()[:2_000_000]
        return lambda: torch.unique(y)
    return lambda: getattr(x, p["what"])(-1)


FAMILIES = {
    "embedding": (sample_embedding, build_embedding, 320),
    "index": (sample_index, build_index, 260),
    "sort": (sample_sort, build_sort, 70),
}
