"""Elementwise ops of one, two and three tensors: plain, in place, broadcast, strided, of mixed types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, log_int, near, one, pick, tensor, typical, values


class Spec(NamedTuple):
    """An op of torch.ops.aten: which tensors it takes (x, y, z, mask), and what comes after them."""

    op: str
    tensors: str
    extra: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


def _specs(tensors: str, names: str, **others: Spec) -> dict[str, Spec]:
    return {n: Spec(n, tensors) for n in names.split()} | others


UNARY = _specs(
    "x",
    "neg abs exp log log1p sqrt rsqrt tanh sigmoid sin cos reciprocal erf floor sign relu isneginf square gelu silu "
    "mish hardswish softplus elu leaky_relu",
    logsigmoid=Spec("log_sigmoid", "x"),
    hardtanh=Spec("hardtanh", "x"),
    relu6=Spec("relu6", "x"),
    pow2=Spec("pow", "x", (2,)),
    pow3=Spec("pow", "x", (3.0,)),
    mul_scalar=Spec("mul", "x", (1.5,)),
    add_scalar=Spec("add", "x", (1.5,)),
    div_scalar=Spec("div", "x", (1.5,)),
    clamp=Spec("clamp", "x", (-1, 1)),
    clamp_min=Spec("clamp_min", "x", (0.0,)),
    clamp_min_=Spec("clamp_min_", "x", (0.0,)),
    gt_scalar=Spec("gt", "x", (0.5,)),
    mul_scalar_=Spec("mul_", "x", (1.0,)),
    gelu_tanh=Spec("gelu", "x", (), (("approximate", "tanh"),)),
    tril=Spec("tril", "x"),
)
BINARY = _specs(
    "xy",
    "add mul sub div maximum minimum gt eq lt ge pow",
    add_=Spec("add_", "xy"),
    mul_=Spec("mul_", "xy"),
    add_alpha_=Spec("add_", "xy", (), (("alpha", 0.5),)),
    copy_=Spec("copy_", "xy"),
    gelu_backward=Spec("gelu_backward", "xy"),
    gelu_backward_tanh=Spec("gelu_backward", "xy", (), (("approximate", "tanh"),)),
    silu_backward=Spec("silu_backward", "xy"),
    threshold_backward=Spec("threshold_backward", "xy", (0,)),
    tanh_backward=Spec("tanh_backward", "xy"),
    sigmoid_backward=Spec("sigmoid_backward", "xy"),
    mish_backward=Spec("mish_backward", "xy"),
    hardswish_backward=Spec("hardswish_backward", "xy"),
    leaky_relu_backward=Spec("leaky_relu_backward", "xy", (0.01, False)),
    elu_backward=Spec("elu_backward", "x_y", (1.0, 1.0, 1.0, False)),
    softplus_backward=Spec("softplus_backward", "xy", (1.0, 20.0)),
    hardtanh_backward=Spec("hardtanh_backward", "xy", (-1.0, 1.0)),
)
MASKED = {
    "where": Spec("where", "mxy"),
    "masked_fill": Spec("masked_fill", "xm", (0.0,)),
    "masked_fill_": Spec("masked_fill_", "xm", (0.0,)),
    "dropout_backward": Spec("native_dropout_backward", "xm", (1.1,)),
    "mul_mask": Spec("mul", "xm"),
}
TERNARY = {
    "addcmul": Spec("addcmul", "xyz"),
    "addcdiv": Spec("addcdiv", "xyz"),
    "addcmul_": Spec("addcmul_", "xyz", (), (("value", 0.01),)),
    "addcdiv_": Spec("addcdiv_", "xyz", (), (("value", 0.01),)),
    "lerp_": Spec("lerp_", "xy", (0.1,)),
}
CLASSES: dict[str, dict[str, Spec]] = {"unary": UNARY, "binary": BINARY, "masked": MASKED, "ternary": TERNARY}


def call_of(torch: Any, spec: Spec, **tensors: Any) -> Callable[[], Any]:
    """The op on these tensors; `_` in the spec stands for where the extra arguments go."""
    op = getattr(torch.ops.aten, spec.op)
    before, _, after = spec.tensors.partition("_")
    given = [*(tensors[k] for k in before), *spec.extra, *(tensors[k] for k in after)]
    return lambda: op(*given, **dict(spec.options))


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
        "plain": 0.62, "row": 0.1, "column": 0.05, "middle": 0.05, "zero": 0.03, "transposed": 0.09, "sliced": 0.06,
    }  # fmt: skip
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
    what, layout, spec = p["what"], p["layout"], CLASSES[p["what"]][p["op"]]
    strided = layout in ("transposed", "sliced")
    if what == "unary":
        return one(call_of(torch, spec, x=_laid_out(torch, p, p["dtype"], layout if strided else "plain")))
    x = _laid_out(torch, p, p["dtype"], layout if strided and p["both"] else "plain")
    y = _laid_out(torch, p, p["other"], "plain" if layout == "middle" else layout)
    if layout == "middle" and p["rows"] % p["split"] == 0:
        x = x.view(-1, p["split"], p["columns"])
        y = tensor(torch, (p["rows"] // p["split"], 1, p["columns"]), p["other"])
    if what == "binary":
        return one(call_of(torch, spec, x=x, y=y))
    if what == "masked":
        shape = (1, *y.shape[1:]) if layout == "middle" and y.dim() == 3 else tuple(x.shape)
        return one(call_of(torch, spec, x=x, y=y, m=tensor(torch, shape, "bool")))
    z = _laid_out(torch, p, p["dtype"], "plain").view_as(x)
    return one(call_of(torch, spec, x=x, y=y.to(x.dtype), z=z))


FAMILIES = {"pointwise": (sample_pointwise, build_pointwise, 7000)}
