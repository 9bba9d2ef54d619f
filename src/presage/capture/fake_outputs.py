"""What ops return that fake tensors cannot run, or run only for some dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _prims_common

aten = torch.ops.aten
_prims: Any = _prims_common  # the function has its suffix since torch 2.11
is_dense = getattr(_prims, "is_non_overlapping_and_dense_or_false", None) or _prims.is_non_overlapping_and_dense
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


def _like_second(grad: Any, x: Any, *rest: Any) -> Any:
    del grad, rest
    return torch.empty_like(x)


def _gru_cell(x: Any, h: Any, hx: Any, *biases: Any) -> Any:
    del h, biases
    return torch.empty_like(hx), x.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad: Any, kept: Any, has_bias: bool) -> Any:
    gates = (grad.shape[0], 3 * grad.shape[1])
    biases = [grad.new_empty(gates[1]) if has_bias else None for _ in range(2)]
    return kept.new_empty(gates), kept.new_empty(gates), torch.empty_like(grad), *biases


OUTCOMES: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss_backward.default: _like_second,
    aten._ctc_loss_backward.Tensor: _like_second,
    aten._cudnn_rnn.default: _recurrent,
    aten._cudnn_rnn_backward.default: _recurrent_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._grouped_mm.default: _grouped_mm,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}


# ---- Strides that CUDA gives an op's outputs and a fake run does not.


def as_on_cuda(func: Any, args: Any, out: Any) -> Any:
    """The outputs, laid out as CUDA lays them out. To be called where new tensors come out fake."""
    if func is aten.convolution.default:
        return _laid_out(out, _wants_channels_last(args[0], args[1], args[6], args[8]))
    if func is aten.convolution_backward.default:
        last = _wants_channels_last(args[1], args[2], args[7], args[9])
        return tuple(t if t is None or t.dim() < 4 else _laid_out(t, last) for t in out)
    return out


def _wants_channels_last(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    del transposed, groups
    return _is_channels_last(x) or _is_channels_last(weight)


def _is_channels_last(t: torch.Tensor) -> bool:
    return torch._prims_common.suggest_memory_format(t) in (torch.channels_last, torch.channels_last_3d)


def _laid_out(t: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if channels_last:
        order = torch.channels_last_3d if t.dim() == 5 else torch.channels_last
    else:
        order = torch.contiguous_format
    if t.dim() < 4 or t.is_contiguous(memory_format=order):
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device, memory_format=order)


# ---- Autograd works in place on plain tensors where it may, and never on subclasses, as fake tensors are: undone he

_IN_PLACE = {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
_INTO_ZEROS = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_OWN_NODES = {"BinaryCrossEntropyWithLogitsBackward0"}  # gradient formulas with an in-place form for plain tensors
_STORAGE_HOLDERS = 2  # the tensor, and the handle by which it was counted
_TENSOR_HOLDERS = 4  # autograd's buffer, and those of the call on its way here


def as_on_plain_tensors(func: Any, args: Any, node: Any) -> tuple[Any, Any]:
    """The op and arguments that autograd would have used in the place of `func` and `args`."""
    if func is aten.index_put.default and "Index" in node.name():
        return aten._index_put_impl_.default, (*args[:3], bool(args[3]) if len(args) > 3 else False, True)
    if func in _IN_PLACE and node.name() in _OWN_NODES and _only_here(args[0], None):
        return _IN_PLACE[func], args
    if func in _INTO_ZEROS and _only_here(args[0], None):
        return _INTO_ZEROS[func], args
    if func is aten.add.Tensor and len(args) == 2 and not _in_users_backward():
        one, other = args
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return func, args
        alike = one.layout == other.layout == torch.strided and one.shape == other.shape
        if alike and _only_here(one, _TENSOR_HOLDERS):
            return aten.add_.Tensor, (one, other)
    return func, args


def _in_users_backward() -> bool:
    """Whether an op was called by the backward of the user's own autograd function, and not by autograd's engine."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == "apply" and path.endswith("function.py") and "autograd" in path:
            return True
        if name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False


def _only_here(tensor: Any, holders: int | None) -> bool:
    """Nobody else holds the tensor or its memory, and its memory has no holes."""
    if not isinstance(tensor, torch.Tensor):
        return False
    if holders is not None and tensor._use_count() > holders:  # type: ignore[attr-defined]
        return False
    handle = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(handle._cdata)
    return count <= _STORAGE_HOLDERS and bool(is_dense(tensor))
