"""Ops that move bytes: elementwise, casts, copies, fills, concatenation, reductions, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import DTYPES, both_ways, log_int, pick, tensor, typical

UNARY = ("neg", "abs", "exp", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "reciprocal", "square", "erf")
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "elu", "leaky_relu", "mish", "hardswish")
BINARY = ("add", "mul", "sub", "div", "maximum")


def _rows(rng: np.random.Generator, most: float = 2.5e8) -> tuple[int, int]:
    """Rows and columns of a tensor, from one element to `most`."""
    total = log_int(rng, 1, most)
    columns = min(total, typical(rng, 1, 65536))
    return max(1, total // columns), columns


def sample_pointwise(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = _rows(rng)
    what = pick(rng, ("unary", "binary", "scalar", "inplace", "activation", "where", "compare", "cast", "addcmul"))
    return {
        "what": what,
        "dtype": pick(rng, DTYPES, [0.5, 0.4, 0.1]),
        "rows": rows,
        "columns": columns,
        "op": pick(rng, {"unary": UNARY, "activation": ACTIVATIONS}.get(what, BINARY)),
        "layout": pick(rng, ("plain", "row", "column", "transposed", "sliced"), [0.6, 0.15, 0.05, 0.12, 0.08]),
        "other": pick(rng, DTYPES),
    }


def _laid_out(torch: Any, p: dict[str, Any], dtype: str) -> Any:
    """The second operand: of the same layout, broadcast, transposed in memory, or a slice of a wider tensor."""
    r, c = p["rows"], p["columns"]
    if p["layout"] == "row":
        return tensor(torch, (c,), dtype)
    if p["layout"] == "column":
        return tensor(torch, (r, 1), dtype)
    if p["layout"] == "transposed":
        return tensor(torch, (r, c), dtype, order=[1, 0])
    if p["layout"] == "sliced":
        return tensor(torch, (r, c + 64), dtype)[:, :c]
    return tensor(torch, (r, c), dtype)


def build_pointwise(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    x, what, op = tensor(torch, (p["rows"], p["columns"]), p["dtype"]), p["what"], p["op"]
    if what == "unary":
        y = _laid_out(torch, p, p["dtype"]) if p["layout"] in ("transposed", "sliced") else x
        return lambda: getattr(torch, op)(y)
    if what == "activation":
        x.requires_grad_(True)
        return both_ways(torch, lambda: getattr(torch.nn.functional, op)(x), [x])
    y = _laid_out(torch, p, p["dtype"])
    if what == "binary":
        return lambda: getattr(torch, op)(x, y)
    if what == "scalar":
        return lambda: x * 1.5
    if what == "inplace":
        return lambda: x.add_(y)
    if what == "compare":
        return lambda: x > y
    if what == "cast":
        z = _laid_out(torch, p, p["dtype"])
        kind = getattr(torch, p["other"] if p["other"] != p["dtype"] else "float32")
        return lambda: z.to(kind) if z.dtype != kind else z.clone()
    if what == "addcmul":
        return lambda: torch.addcmul(x, x, y)
    mask = tensor(torch, (p["rows"], p["columns"]), "bool")
    return lambda: torch.where(mask, x, y)


def sample_copy(rng: np.random.Generator) -> dict[str, Any]:
    total = log_int(rng, 16, 2e8)
    dims = [typical(rng, 1, 512) for _ in range(3)]
    first = max(1, total // (dims[0] * dims[1] * dims[2]))
    shape = [min(first, 4096), *dims]
    what = pick(rng, ("permute", "clone", "fill", "zeros", "cat", "stack", "split", "copy", "pad", "slice_backward"))
    order = [int(i) for i in rng.permutation(4)]
    return {
        "what": what,
        "dtype": pick(rng, ("float32", "bfloat16")),
        "shape": shape,
        "order": order,
        "parts": log_int(rng, 2, 32),
        "dim": int(rng.integers(0, 4)),
    }


def build_copy(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    x, what = tensor(torch, p["shape"], p["dtype"]), p["what"]
    if what == "permute":
        return lambda: x.permute(p["order"]).contiguous()
    if what == "fill":
        return lambda: x.fill_(1.0)
    if what == "zeros":
        return lambda: torch.zeros(p["shape"], device="cuda", dtype=x.dtype)
    if what in ("cat", "stack"):
        small = tensor(torch, (max(1, p["shape"][0] // p["parts"]), *p["shape"][1:]), p["dtype"])
        return lambda: getattr(torch, what)([small] * p["parts"], p["dim"])
    if what == "split":
        y = x.flatten(0, 2)
        return lambda: [z.contiguous() for z in y.split(max(1, y.shape[-1] // 3), -1)]
    if what == "copy":
        y = torch.empty_like(x)
        return lambda: y.copy_(x)
    if what == "pad":
        return lambda: torch.nn.functional.pad(x, (1, 1, 1, 1))
    if what == "slice_backward":
        x.requires_grad_(True)
        half = max(1, p["shape"][-1] // 2)
        return both_ways(torch, lambda: x[..., :half], [x])
    return lambda: x.clone()


def sample_reduce(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = _rows(rng)
    return {
        "what": pick(rng, ("sum", "mean", "amax", "norm", "var", "argmax", "cumsum", "any")),
        "dtype": pick(rng, ("float32", "bfloat16")),
        "rows": rows,
        "columns": columns,
        "dim": pick(rng, ("last", "first", "all", "middle"), [0.35, 0.35, 0.15, 0.15]),
    }


def build_reduce(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    r, c = p["rows"], p["columns"]
    x = tensor(torch, (r, c), p["dtype"])
    dim: Any = {"last": -1, "first": 0, "all": None, "middle": 1}[p["dim"]]
    if p["dim"] == "middle":
        split = next((k for k in (8, 4, 2) if r % k == 0), 1)
        x = x.view(split, r // split, c)
    if p["what"] == "cumsum":
        return lambda: x.cumsum(dim if dim is not None else 0)
    if p["what"] == "any":
        y = x > 0
        return lambda: y.any() if dim is None else y.any(dim)
    if p["what"] == "norm":
        return lambda: torch.linalg.vector_norm(x, dim=dim)
    f = getattr(torch, p["what"])
    return lambda: f(x) if dim is None else f(x, dim)


def sample_random(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = _rows(rng)
    return {
        "what": pick(
            rng, ("dropout", "randn", "rand", "bernoulli", "randint", "arange"), [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
        ),
        "dtype": pick(rng, ("float32", "bfloat16")),
        "rows": rows,
        "columns": columns,
    }


def build_random(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    shape, kind = (p["rows"], p["columns"]), getattr(torch, p["dtype"])
    if p["what"] == "dropout":
        x = tensor(torch, shape, p["dtype"], True)
        return both_ways(torch, lambda: torch.nn.functional.dropout(x, 0.1), [x])
    if p["what"] == "bernoulli":
        x = torch.rand(shape, device="cuda")
        return lambda: torch.bernoulli(x)
    if p["what"] == "randint":
        return lambda: torch.randint(0, 1000, shape, device="cuda")
    if p["what"] == "arange":
        return lambda: torch.arange(p["rows"] * p["columns"], device="cuda")
    return lambda: getattr(torch, p["what"])(shape, device="cuda", dtype=kind)


FAMILIES = {
    "pointwise": (sample_pointwise, build_pointwise, 900),
    "copy": (sample_copy, build_copy, 300),
    "reduce": (sample_reduce, build_reduce, 350),
    "random": (sample_random, build_random, 120),
}
