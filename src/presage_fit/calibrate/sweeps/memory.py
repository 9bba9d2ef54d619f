"""Ops that move bytes: copies and casts of any layout, fills, concatenation, reductions, random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, one, pick, tensor, values
from presage_fit.calibrate.sweeps.pointwise import extent

# Memory orders that models make: heads out of tokens and back, last two swapped, channels last and first, ...
ORDERS = (
    (0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (0, 1, 3, 2),
)  # fmt: skip


def sample_copy(rng: np.random.Generator) -> dict[str, Any]:
    total = log_int(rng, 16, 2e8) if rng.random() < 0.2 else log_int(rng, 5e4, 2e8)
    last = values(rng, (16, 32, 64, 96, 128, 256, 768, 1024), 0.7, 1, 4096)
    dims = [values(rng, (2, 4, 8, 12, 16, 32, 64, 128, 197, 256, 512, 1024), 0.8, 1, 2048) for _ in range(2)]
    first = max(1, total // (dims[0] * dims[1] * last))
    what = near(rng, {
        "permute": 0.26, "cast": 0.14, "cast_permuted": 0.08, "clone": 0.06, "fill": 0.05, "zeros": 0.05, "cat": 0.14,
        "stack": 0.05, "split": 0.06, "pad": 0.03, "slice_backward": 0.03, "expand": 0.05,
    })  # fmt: skip
    dtype = pick(rng, ("float32", "bfloat16", "float16", "int64"), [0.45, 0.43, 0.07, 0.05])
    return {
        "what": what,
        "dtype": dtype,
        "other": pick(rng, ("float32", "bfloat16", "float16", "bool", "int64"), [0.42, 0.42, 0.08, 0.04, 0.04]),
        "shape": [min(first, 4096), *dims, last],
        "order": list(pick(rng, ORDERS)) if rng.random() < 0.85 else [int(i) for i in rng.permutation(4)],
        "parts": log_int(rng, 2, 40),
        "even": bool(rng.random() < 0.5),
        "dim": int(pick(rng, (0, 1, 2, 3), [0.2, 0.3, 0.15, 0.35])),
    }


def _pieces(torch: Any, p: dict[str, Any]) -> list[Any]:
    """What to put together: alike, or of sizes 1, 2, 3, ... along the dimension."""
    shape, dim, parts = p["shape"], p["dim"], p["parts"]
    each = max(1, shape[dim] // parts)
    sizes = [each if p["even"] or p["what"] == "stack" else 1 + k % max(1, 2 * each) for k in range(parts)]
    return [tensor(torch, [*shape[:dim], n, *shape[dim + 1 :]], p["dtype"]) for n in sizes]


def build_copy(torch: Any, p: dict[str, Any]) -> Parts:
    what = p["what"]
    if what in ("cat", "stack"):
        pieces = _pieces(torch, p)
        return one(lambda: getattr(torch, what)(pieces, p["dim"]))
    x = tensor(torch, p["shape"], p["dtype"])
    kind = getattr(torch, p["other"] if p["other"] != p["dtype"] else "float64")
    if what == "permute":
        return one(lambda: x.permute(p["order"]).contiguous())
    if what == "cast":
        return one(lambda: x.to(kind))
    if what == "cast_permuted":
        z = x.permute(p["order"])
        y = torch.empty(z.shape, device="cuda", dtype=kind)
        return one(lambda: y.copy_(z))
    if what == "fill":
        return one(lambda: x.fill_(1))
    if what == "zeros":
        return one(lambda: torch.zeros(p["shape"], device="cuda", dtype=x.dtype))
    if what == "split":
        y = x.flatten(0, 2)
        pieces = y.split(max(1, y.shape[-1] // 3), -1)
        return [z.contiguous for z in pieces][:3]
    if what == "pad":
        return one(lambda: torch.nn.functional.pad(x, (1, 1, 1, 1)))
    if what == "expand":
        y = x[:, :1]
        return one(lambda: y.expand(*p["shape"]).contiguous())
    if what == "slice_backward" and x.is_floating_point():
        x.requires_grad_(True)
        half = max(1, p["shape"][-1] // 2)
        return both_ways(torch, lambda: x[..., :half], [x])
    return one(x.clone)


REDUCTIONS = {
    "sum": 0.5, "mean": 0.15, "amax": 0.05, "norm": 0.06, "var": 0.04, "argmax": 0.04, "cumsum": 0.05, "any": 0.04,
    "max": 0.04, "prod": 0.03,
}  # fmt: skip


def sample_reduce(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = extent(rng)
    return {
        "what": near(rng, REDUCTIONS),
        "dtype": near(rng, {"float32": 0.5, "bfloat16": 0.42, "float16": 0.08}),
        "rows": rows,
        "columns": columns,
        "split": int(pick(rng, (2, 4, 8, 16, 64, 196, 784, 3136))),
        "dim": near(rng, {"last": 0.3, "first": 0.32, "all": 0.1, "middle": 0.1, "ends": 0.1, "ends_last": 0.08}),
    }


def build_reduce(torch: Any, p: dict[str, Any]) -> Parts:
    r, c, where, what = p["rows"], p["columns"], p["dim"], p["what"]
    x = tensor(torch, (r, c), p["dtype"])
    dim: Any = {"last": -1, "first": 0, "all": None, "middle": 1, "ends": (0, 2), "ends_last": (0, 1)}[where]
    if where in ("middle", "ends", "ends_last"):
        split = next((k for k in (p["split"], 8, 4, 2) if r % k == 0), 1)
        x = x.view(split, r // split, c)
        single = what in ("argmax", "cumsum", "max", "prod", "any")
        dim = 1 if single and isinstance(dim, tuple) else dim
    if what == "cumsum":
        return one(lambda: x.cumsum(dim if dim is not None else 0))
    if what == "any":
        y = x > 0
        return one(lambda: y.any() if dim is None else y.any(dim))
    if what == "norm":
        return one(lambda: torch.linalg.vector_norm(x, dim=dim))
    f = getattr(torch, what)
    return one(lambda: f(x) if dim is None else f(x, dim))


def sample_random(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = extent(rng)
    return {
        "what": near(
            rng, {"dropout": 0.55, "randn": 0.09, "rand": 0.09, "bernoulli": 0.09, "randint": 0.09, "arange": 0.09}
        ),
        "dtype": pick(rng, ("float32", "bfloat16", "float16"), [0.5, 0.4, 0.1]),
        "rows": rows,
        "columns": columns,
    }


def build_random(torch: Any, p: dict[str, Any]) -> Parts:
    shape, kind = (p["rows"], p["columns"]), getattr(torch, p["dtype"])
    if p["what"] == "dropout":
        x = tensor(torch, shape, p["dtype"], True)
        return both_ways(torch, lambda: torch.nn.functional.dropout(x, 0.1), [x])
    if p["what"] == "bernoulli":
        x = torch.rand(shape, device="cuda")
        return one(lambda: torch.bernoulli(x))
    if p["what"] == "randint":
        return one(lambda: torch.randint(0, 1000, shape, device="cuda"))
    if p["what"] == "arange":
        return one(lambda: torch.arange(p["rows"] * p["columns"], device="cuda"))
    return one(lambda: getattr(torch, p["what"])(shape, device="cuda", dtype=kind))


FAMILIES = {
    "copy": (sample_copy, build_copy, 4500),
    "reduce": (sample_reduce, build_reduce, 3500),
    "random": (sample_random, build_random, 500),
}
