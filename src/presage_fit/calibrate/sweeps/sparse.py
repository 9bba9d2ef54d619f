"""Lookups and scatters: embeddings, embedding bags, index, gather, index_add, index_put, sort, topk.

How often the same row is asked for decides much, so what was drawn is written down: how many rows are distinct, and how
often the most frequent one came.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, one, pick, tensor, typical, values


def indices(torch: Any, p: dict[str, Any], count: int, rows: int, alpha: float) -> Any:
    """`count` row numbers below `rows`; the larger alpha, the more they repeat (0: uniform)."""
    if alpha == 0:
        found = torch.randint(0, rows, (count,), device="cuda")
    else:
        u = torch.rand(count, device="cuda", dtype=torch.float64)
        rank = ((float(rows) ** (1 - alpha) - 1) * u + 1) ** (1 / (1 - alpha))
        found = ((rank.long().clamp(1, rows) - 1) * 2654435761 + 12345) % rows
    ones = torch.ones(count, device="cuda", dtype=torch.int32)
    counts = torch.zeros(rows, device="cuda", dtype=torch.int32).index_add_(0, found, ones)
    p["distinct"], p["most"] = int((counts > 0).sum()), int(counts.max())
    return found


def sample_embedding(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {"embedding": 0.42, "bag": 0.5, "bag_sparse": 0.08})
    dim = int(pick(rng, (1, 4, 8, 16, 32, 64, 64, 96, 128, 128, 256, 512, 768, 1024, 1600, 2048, 4096)))
    rows = log_int(rng, 2, min(4e7, 1.5e9 / dim))
    batch = 1 << int(rng.integers(4, 17)) if rng.random() < 0.8 else log_int(rng, 16, 65536)
    pool = 1 if what == "embedding" or rng.random() < 0.25 else values(rng, (4, 10, 20, 32, 64, 100, 128), 0.6, 1, 256)
    pool = int(max(1, min(pool, 8e6 / batch, 1.5e9 / dim / batch)))
    batch = int(max(1, min(batch, 1e9 / dim)))
    return {
        "what": what,
        "dim": dim,
        "rows": rows,
        "batch": batch,
        "pool": pool,
        "mode": near(rng, {"sum": 0.8, "mean": 0.2}),
        "alpha": near(rng, {0.0: 0.6, 0.6: 0.08, 0.9: 0.1, 1.05: 0.12, 1.2: 0.1}),
        "dtype": near(rng, {"float32": 0.85, "bfloat16": 0.15}),
    }


def build_embedding(torch: Any, p: dict[str, Any]) -> Parts:
    kind, count = getattr(torch, p["dtype"]), p["batch"] * p["pool"]
    i = indices(torch, p, count, p["rows"], p["alpha"])
    if p["what"] == "embedding":
        m = torch.nn.Embedding(p["rows"], p["dim"], device="cuda", dtype=kind)
        return both_ways(torch, lambda: m(i), [m.weight])
    sparse = p["what"] == "bag_sparse"
    m = torch.nn.EmbeddingBag(p["rows"], p["dim"], mode=p["mode"], sparse=sparse, device="cuda", dtype=kind)
    offsets = torch.arange(0, count, p["pool"], device="cuda")
    return both_ways(torch, lambda: m(i, offsets), [m.weight])


INDEXING = (
    "index", "index_select", "gather", "index_add", "scatter_add", "index_put", "index_both", "roll", "scatter",
    "index_copy",
)  # fmt: skip


def sample_index(rng: np.random.Generator) -> dict[str, Any]:
    columns = typical(rng, 1, 4096)
    return {
        "what": pick(rng, INDEXING),
        "dtype": pick(rng, ("float32", "bfloat16"), [0.7, 0.3]),
        "rows": log_int(rng, 2, 2e8 / columns),
        "columns": columns,
        "count": log_int(rng, 1, 1e8 / columns),
        "alpha": near(rng, {0.0: 0.7, 0.9: 0.15, 1.1: 0.15}),
    }


def build_index(torch: Any, p: dict[str, Any]) -> Parts:
    x, what = tensor(torch, (p["rows"], p["columns"]), p["dtype"]), p["what"]
    if what == "roll":
        return one(lambda: x.roll(3, -1))
    i = indices(torch, p, p["count"], p["rows"], p["alpha"])
    if what == "index":
        return one(lambda: x[i])
    if what == "index_select":
        return one(lambda: x.index_select(0, i))
    source = tensor(torch, (p["count"], p["columns"]), p["dtype"])
    wide = i.unsqueeze(1).expand(-1, p["columns"])
    calls: dict[str, Any] = {
        "gather": lambda: x.gather(0, wide),
        "index_add": lambda: x.index_add_(0, i, source),
        "scatter_add": lambda: x.scatter_add_(0, wide, source),
        "scatter": lambda: x.scatter_(0, wide, source),
        "index_copy": lambda: x.index_copy_(0, i, source),
        "index_put": lambda: x.index_put_((i,), source, accumulate=True),
    }
    if what in calls:
        return one(calls[what])
    x.requires_grad_(True)
    return both_ways(torch, lambda: x[i], [x], source)


def sample_twice(rng: np.random.Generator) -> dict[str, Any]:
    """x[:, i, j] and x[:, i]: what is picked, by two indices or one, lies behind a dimension of samples."""
    rows, columns = (log_int(rng, 2, 100) for _ in range(2))
    pair = bool(rng.random() < 0.7)
    count = min(log_int(rng, 1, 4096), 4 * rows * columns)
    found = {
        "what": "pair" if pair else "row",
        "dtype": pick(rng, ("float32", "bfloat16"), [0.7, 0.3]),
        "samples": log_int(rng, 1, min(65536, 1.5e8 / rows / columns, 1e8 / count / (1 if pair else columns))),
        "rows": rows,
        "columns": columns,
        "count": count,
        "once": bool(rng.random() < 0.5),  # no place comes again
    }
    places = rows * columns if pair else rows
    return found | {"count": min(count, places)} if found["once"] else found


def build_twice(torch: Any, p: dict[str, Any]) -> Parts:
    rows, columns, pair = p["rows"], p["columns"], p["what"] == "pair"
    places = rows * columns if pair else rows
    if p["once"]:
        at = torch.randperm(places, device="cuda")[: p["count"]]
        p["distinct"], p["most"] = p["count"], 1
    else:
        at = indices(torch, p, p["count"], places, 0.0)
    x = tensor(torch, (p["samples"], rows, columns), p["dtype"]).requires_grad_(True)
    if pair:
        i, j = at // columns, at % columns
        return both_ways(torch, lambda: x[:, i, j], [x])
    return both_ways(torch, lambda: x[:, at], [x])


def sample_sort(rng: np.random.Generator) -> dict[str, Any]:
    columns = log_int(rng, 2, 1e6)
    return {
        "what": pick(rng, ("sort", "topk", "argsort", "unique", "nonzero")),
        "dtype": pick(rng, ("float32", "int64")),
        "rows": log_int(rng, 1, max(2.0, 2e7 / columns)),
        "columns": columns,
        "k": int(pick(rng, (1, 2, 8, 50))),
    }


def build_sort(torch: Any, p: dict[str, Any]) -> Parts:
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"])
    if p["what"] == "topk":
        return one(lambda: x.topk(min(p["k"], p["columns"]), -1))
    if p["what"] == "nonzero":
        return one(lambda: (x > 0.5).nonzero())
    if p["what"] == "unique":
        y = x.flatten()[:2_000_000]
        return one(lambda: torch.unique(y))
    return one(lambda: getattr(x, p["what"])(-1))


FAMILIES = {
    "embedding": (sample_embedding, build_embedding, 3500),
    "index": (sample_index, build_index, 1800),
    "sort": (sample_sort, build_sort, 300),
    "twice": (sample_twice, build_twice, 400),
}
