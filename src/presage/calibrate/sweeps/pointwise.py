"""Elementwise ops of one, two and three tensors: plain, in place, broadcast, strided, of mixed types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import Parts, log_int, near, one, pick, tensor, typical, values

__all__ = ["FAMILIES", "extent"]

Call = Callable[..., Any]

UNARY: dict[str, Call] = {
    **{n: (lambda n: lambda t, x: getattr(t, n)(x))(n) for n in (
        "neg", "abs", "exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "reciprocal", "erf",
        "floor", "sign", "relu", "isneginf", "square")},
    **{n: (lambda n: lambda t, x: getattr(t.nn.functional, n)(x))(n) for n in (
        "gelu", "silu", "mish", "hardswish", "softplus", "elu", "leaky_relu", "logsigmoid", "hardtanh", "relu6")},
    "pow2": lambda t, x: x.pow(2),
    "pow3": lambda t, x: x.pow(3.0),
    "mul_scalar": lambda t, x: x * 1.5,
    "add_scalar": lambda t, x: x + 1.5,
    "div_scalar": lambda t, x: x / 1.5,
    "clamp": lambda t, x: x.clamp(-1, 1),
    "clamp_min": lambda t, x: x.clamp_min(0.0),
    "clamp_min_": lambda t, x: x.clamp_min_(0.0),
    "gt_scalar": lambda t, x: x > 0.5,
    "mul_scalar_": lambda t, x: x.mul_(1.0),
    "gelu_tanh": lambda t, x: t.nn.functional.gelu(x, approximate="tanh"),
    "tril": lambda t, x: x.tril(),
}  # fmt: skip
BINARY: dict[str, Call] = {
    **{n: (lambda n: lambda t, x, y: getattr(t, n)(x, y))(n) for n in (
        "add", "mul", "sub", "div", "maximum", "minimum", "gt", "eq", "lt", "ge", "add", "mul", "pow")},
    "add_": lambda t, x, y: x.add_(y),
    "mul_": lambda t, x, y: x.mul_(y),
    "add_alpha_": lambda t, x, y: x.add_(y, alpha=0.5),
    "copy_": lambda t, x, y: x.copy_(y),
    "gelu_backward": lambda t, x, y: t.ops.aten.gelu_backward(x, y),
    "gelu_backward_tanh": lambda t, x, y: t.ops.aten.gelu_backward(x, y, approximate="tanh"),
    "silu_backward": lambda t, x, y: t.ops.aten.silu_backward(x, y),
    "threshold_backward": lambda t, x, y: t.ops.aten.threshold_backward(x, y, 0),
    "tanh_backward": lambda t, x, y: t.ops.aten.tanh_backward(x, y),
    "sigmoid_backward": lambda t, x, y: t.ops.aten.sigmoid_backward(x, y),
    "mish_backward": lambda t, x, y: t.ops.aten.mish_backward(x, y),
    "hardswish_backward": lambda t, x, y: t.ops.aten.hardswish_backward(x, y),
    "leaky_relu_backward": lambda t, x, y: t.ops.aten.leaky_relu_backward(x, y, 0.01, False),
    "elu_backward": lambda t, x, y: t.ops.aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    "softplus_backward": lambda t, x, y: t.ops.aten.softplus_backward(x, y, 1.0, 20.0),
    "hardtanh_backward": lambda t, x, y: t.ops.aten.hardtanh_backward(x, y, -1.0, 1.0),
}  # fmt: skip
MASKED: dict[str, Call] = {
    "where": lambda t, x, y, mask: t.where(mask, x, y),
    "masked_fill": lambda t, x, y, mask: x.masked_fill(mask, 0.0),
    "masked_fill_": lambda t, x, y, mask: x.masked_fill_(mask, 0.0),
    "dropout_backward": lambda t, x, y, mask: t.ops.aten.native_dropout_backward(x, mask, 1.1),
    "mul_mask": lambda t, x, y, mask: x * mask,
}
TERNARY: dict[str, Call] = {
    "addcmul": lambda t, x, y, z: t.addcmul(x, y, z),
    "addcdiv": lambda t, x, y, z: t.addcdiv(x, y, z),
    "addcmul_": lambda t, x, y, z: x.addcmul_(y, z, value=0.01),
    "addcdiv_": lambda t, x, y, z: x.addcdiv_(y, z, value=0.01),
    "lerp_": lambda t, x, y, z: x.lerp_(y, 0.1),
}
CLASSES: dict[str, dict[str, Call]] = {"unary": UNARY, "binary": BINARY, "masked": MASKED, "ternary": TERNARY}


def extent(rng: np.random.Generator, most: float = 3e8) -> tuple[int, int]:
    """Rows and columns of a tensor, from one element to `most`, mostly of the sizes activations have."""
    total = log_int(rng, 1, most) if rng.random() < 0.25 else log_int(rng, 2e4, most)
    columns = min(total, typical(rng, 1, 65536) if rng.random() < 0.4 else typical(rng, 64, 8192))
    return max(1, total // columns), columns


def sample_pointwise(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = extent(rng)
    what = near(rng, {"unary": 0.33, "binary": 0.45, "masked": 0.12, "ternary": 0.1})
    dtype = near(rng, {"float32": 0.5, "bfloat16": 0.42, "float16": 0.08})
    layouts = {
        "plain": 0.62,
        "row": 0.1,
        "column": 0.05,
        "middle": 0.05,
        "zero": 0.03,
        "transposed": 0.09,
        "sliced": 0.06,
    }
    return {
        "what": what,
        "op": pick(rng, list(CLASSES[what])),
        "dtype": dtype,
        "other": dtype if rng.random() < 0.75 else pick(rng, ("float32", "bfloat16", "bool", "int64")),
        "rows": rows,
        "columns": columns,
        "split": values(rng, (1, 4, 8, 12, 16), 0.9, 1, 64),
        "layout": near(rng, layouts),
        "both": bool(rng.random() < 0.3),
    }


def _laid_out(torch: Any, p: dict[str, Any], dtype: str, layout: str) -> Any:
    """An operand: of the plain layout, broadcast, transposed in memory, or a slice of a wider tensor."""
    r, c = p["rows"], p["columns"]
    if layout == "row":
        return tensor(torch, (c,), dtype)
    if layout == "column":
        return tensor(torch, (r, 1), dtype)
    if layout == "zero":
        return tensor(torch, (), dtype)
    if layout == "transposed":
        return tensor(torch, (r, c), dtype, order=[1, 0])
    if layout == "sliced":
        return tensor(torch, (r, c + 64), dtype)[:, :c]
    return tensor(torch, (r, c), dtype)


def build_pointwise(torch: Any, p: dict[str, Any]) -> Parts:
    what, layout, call = p["what"], p["layout"], CLASSES[p["what"]][p["op"]]
    strided = layout in ("transposed", "sliced")
    if what == "unary":
        x = _laid_out(torch, p, p["dtype"], layout if strided else "plain")
        return one(lambda: call(torch, x))
    x = _laid_out(torch, p, p["dtype"], layout if strided and p["both"] else "plain")
    y = _laid_out(torch, p, p["other"], "plain" if layout == "middle" else layout)
    if layout == "middle" and p["rows"] % p["split"] == 0:
        x = x.view(-1, p["split"], p["columns"])
        y = tensor(torch, (p["rows"] // p["split"], 1, p["columns"]), p["other"])
    if what == "binary":
        return one(lambda: call(torch, x, y))
    if what == "masked":
        shape = (1, *y.shape[1:]) if layout == "middle" and y.dim() == 3 else tuple(x.shape)
        mask = tensor(torch, shape, "bool")
        other = y if p["op"] == "where" else None
        return one(lambda: call(torch, x, other, mask))
    z = _laid_out(torch, p, p["dtype"], "plain").view_as(x)
    y = y.to(x.dtype)
    return one(lambda: call(torch, x, y, z))


FAMILIES = {"pointwise": (sample_pointwise, build_pointwise, 7000)}
