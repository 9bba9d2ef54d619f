"""What ops return that fake tensors cannot run, or run only for some dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OUTCOMES"]

aten = torch.ops.aten
LSTM, GRU = 2, 3
KEPT = {LSTM: 5, GRU: 6}  # values cuDNN keeps for the backward, per unit, position and layer; 1 for plain RNNs


def _reserve(x: torch.Tensor, hidden: int, mode: int, layers: int, both_ways: bool, dropout: float) -> int:
    """Bytes that cuDNN keeps for the backward (measured with cuDNN 9.19)."""
    positions = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    units = positions * hidden * (2 if both_ways else 1)
    kept = units * x.element_size() * (KEPT.get(mode, 1) * layers + layers - 1)
    masks = units * (layers - 1) // 8 if dropout > 0 else 0
    return int(kept + masks + 256)


def _recurrent(
    x: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, both_ways: bool, batches: Any, state: Any,
) -> Any:  # fmt: skip
    del weights, stride, batches, state
    width = (projected or hidden) * (2 if both_ways else 1)
    out = x.new_empty(*x.shape[:-1], width)
    if batch_first and x.dim() == 3:
        out = x.new_empty(x.shape[1], x.shape[0], width).transpose(0, 1)
    kept = _reserve(x, hidden, mode, layers, both_ways, dropout) if train else 0
    reserve = torch.empty(kept, dtype=torch.uint8, device=x.device)
    cell = torch.empty_like(cx) if cx is not None else x.new_empty(0)
    return out, torch.empty_like(hx), cell, reserve, buffer


def _recurrent_backward(x: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, *rest: Any) -> Any:
    del stride, buffer
    batch_first = rest[8] and x.dim() == 3
    flat = x.new_empty(sum(w.numel() for w in weights))
    grads, start = [], 0
    for w in weights:
        grads.append(flat.narrow(0, start, w.numel()).view(w.shape))
        start += w.numel()
    grad = x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) if batch_first else torch.empty_like(x)
    return grad, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), grads


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    del bias
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[2])
    elif b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(shape, dtype=dtype)


def _rms_norm(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    """The normalised rows, and one over the root of each row's mean square, which the backward needs."""
    del weight, eps
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.new_empty((*x.shape[: x.dim() - len(shape)], *[1] * len(shape)), dtype=kept)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rows


def _rms_norm_backward(grad: Any, x: Any, shape: Any, rows: Any, weight: Any, wanted: Any) -> Any:
    del grad, shape, rows
    whole = torch.contiguous_format
    given = zip((x, weight), wanted, strict=True)
    return tuple(torch.empty_like(t, memory_format=whole) if want and t is not None else None for t, want in given)


OUTCOMES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _recurrent,
    aten._cudnn_rnn_backward.default: _recurrent_backward,
    aten._grouped_mm.default: _grouped_mm,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}
