"""What the rows of published kernel tables are in PyTorch: the call each one timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from presage.costs.call import Call, Shape, Value

__all__ = ["BUILDERS", "Unknown", "Work", "attention", "gemm"]

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
ATTENTION = ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
WIDEST_HEAD = 256  # of fused attention
WINDOW_TILE = 128  # a window meets this much more than itself: its two ends lie within tiles

Sizes = Mapping[str, int]


class Work(NamedTuple):
    """What a row timed: the kind of kernel, the call, and the least FLOPs it takes (zero where not looked at). Rows of
    serving engines have their sizes in the order of the table's columns."""

    kernel: str
    call: Call
    flops: float
    sizes: tuple[int, ...] = ()


class Unknown(ValueError):
    """A row that no model is for."""


def _dense(sizes: tuple[int, ...], dtype: str = "float32") -> Shape:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return Shape(sizes, tuple(reversed(strides)), dtype)


def _number(dtype: str) -> str:
    if dtype not in DTYPES:
        raise Unknown(f"no model of numbers of type {dtype!r}")
    return DTYPES[dtype]


def gemm(sizes: Sizes, dtype: str) -> Work:
    """A linear layer without bias: its weights lie in memory as [n, k]."""
    m, n, k, kind = sizes["m"], sizes["n"], sizes["k"], _number(dtype)
    call = Call("aten::mm", (_dense((m, k), kind), Shape((k, n), (1, k), kind)))
    return Work("gemm", call, 2.0 * m * n * k, (m, n, k))


def attention(sizes: Sizes, dtype: str) -> Work:
    """Causal, key and value heads repeated. Under a window each query meets only so many keys: as if there were no
    more, and no mask. Narrow heads get cuDNN's kernel, made for an H200 as the engines' own are for each GPU: flash
    kernels run an H200 with instructions of older GPUs, so what they reach of its peak tells nothing of others."""
    every = b, s, h, _, d, window = tuple(sizes[k] for k in ATTENTION)
    kind = _number(dtype)
    if d > WIDEST_HEAD:
        raise Unknown(f"heads wider than {WIDEST_HEAD}: no fused kernel")
    cut = 0 < window < s
    t = min(s, window + WINDOW_TILE) if cut else s
    flops = 4.0 * b * h * d * (s * min(s, window) if cut else s * s) / 2
    name = "attention, window" if cut else "attention"
    if d <= 128:
        q, kv = (Shape((b, h, n, d), (n * h * d, d, h * d, 1), kind) for n in (s, t))
        given: tuple[Value, ...] = (q, kv, kv, None, None, None, s, t, False, 0.0, not cut, False, None)
        return Work(name, Call("aten::_cudnn_attention_forward", given), flops, every)
    q, kv = (_dense((b, n, h, d), kind) for n in (s, t))
    given = (q, kv, kv, None, None, s, t, 0.0, not cut, False, None)
    return Work(name, Call("aten::_flash_attention_forward", given), flops, every)


def _bmm(s: Sizes, _: str) -> Call:
    return Call("aten::bmm", (_dense((s["B"], s["M"], s["K"])), _dense((s["B"], s["K"], s["N"]))))


def _linear(s: Sizes, _: str) -> Call:
    k, n = s["K"], s["N"]
    x, w = _dense((s["B"] * s["M"], k)), Shape((k, n), (1, k), "float32")
    return Call("aten::addmm", (_dense((n,)), x, w, 1, 1))


def _pair(s: Sizes, op: str) -> Call:
    x = _dense((s["B"], s["H"]))
    return Call(f"aten::{op}", (x, x, 1) if op == "add" else (x, x))


def _with_number(s: Sizes, op: str) -> Call:
    x = _dense((s["B"], s["H"]))
    return Call(f"aten::{op[:-1]}", (x, 2.0, 1) if op == "addu" else (x, 2.0))


def _single(s: Sizes, op: str) -> Call:
    return Call(f"aten::{op}", (_dense((s["B"], s["H"])),))


def _layer_norm(s: Sizes, _: str) -> Call:
    rows = _dense((s["H"],))
    return Call("aten::native_layer_norm", (_dense((s["B"], s["H"])), (s["H"],), rows, rows, 1e-5))


def _softmax(s: Sizes, _: str) -> Call:
    return Call("aten::_softmax", (_dense((s["B"], s["H"])), -1, False))


def _conv(s: Sizes, _: str) -> Call:
    side, k, pad, step = s["HW"], s["ksize"], s["padding"], s["stride"]
    x, w = _dense((s["B"], s["C_in"], side, side)), _dense((s["C_out"], s["C_in"], k, k))
    return Call("aten::cudnn_convolution", (x, w, (pad, pad), (step, step), (1, 1), 1, False, False, False))


# By the op of a row: the kind of kernel, and the call of its sizes. All are float32 without TF32.
BUILDERS: dict[str, tuple[str, Callable[[Sizes, str], Call]]] = {
    "bmm": ("bmm", _bmm),
    "linear": ("linear", _linear),
    "conv": ("conv", _conv),
    "ln": ("layernorm", _layer_norm),
    "softmax": ("softmax", _softmax),
    **dict.fromkeys(("add", "div", "mul", "pow"), ("elementwise", _pair)),
    **dict.fromkeys(("addu", "divu", "mulu", "powu"), ("elementwise", _with_number)),
    **dict.fromkeys(("relu", "gelu", "tanh"), ("elementwise", _single)),
}
