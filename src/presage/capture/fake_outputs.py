"""What ops return that fake tensors cannot run, or run only for some dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _prims_common

from presage.capture.contents import per_op
from presage.graph.graph import OpCost

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


@per_op
def has_outcome(func: Any) -> bool:
    return func in OUTCOMES


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
    return count <= _STORAGE_HOLDERS and (tensor.is_contiguous() or bool(is_dense(tensor)))


# ---- Sparse tensors: fake tensors have few of their ops, so these are taken apart as CUDA takes them apart. A matrix
# in compressed rows (CSR) becomes one in coordinates: its products run the same kernels of cuSPARSE.

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ROWS_AT_HAND = "_rows_at_hand"  # the mark of a matrix that came in compressed rows: its products need no sorting
Kernel = Callable[..., None]  # records a kernel: name, inputs, outputs, written, cost


def is_sparse(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout != torch.strided


def _coordinates(indices: Any, values: Any, shape: Any, coalesced: bool) -> Any:
    out = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return out._coalesced_(coalesced)


def moved(x: Any, *, device: Any = None, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    """A sparse host tensor on the GPU: its indices and its values are copied."""
    compressed = x.layout in _COMPRESSED
    source = x.to_sparse(layout=torch.sparse_coo) if compressed else x
    indices, values = source._indices(), source._values()
    if device is not None:
        indices = indices.to(device, non_blocking=non_blocking)
        values = values.to(device, non_blocking=non_blocking)
    values = values if dtype is None else values.to(dtype)
    out = _coordinates(indices, values, x.shape, compressed or source.is_coalesced())
    if compressed or hasattr(x, _ROWS_AT_HAND):
        setattr(out, _ROWS_AT_HAND, True)
    return out


def _compressed(record: Kernel, rows: Any, columns: Any, values: Any, shape: Any, **_: Any) -> Any:
    """A matrix in compressed rows, made of tensors on the GPU."""
    del record
    each = rows.diff()
    numbers = torch.arange(len(each), device=rows.device)
    row = numbers.repeat_interleave(each, output_size=columns.numel())
    out = _coordinates(torch.stack([row, columns.to(row.dtype)]), values, shape, coalesced=True)
    setattr(out, _ROWS_AT_HAND, True)
    return out


def _flat(indices: Any, shape: Any) -> Any:
    """The place of each entry along all sparse dimensions at once."""
    out = indices[0]
    for dim in range(1, len(indices)):
        out = out * shape[dim] + indices[dim]
    return out


def _coalesce(record: Kernel, x: Any) -> Any:
    """Sorted, and entries of the same place summed; how many are left decides the size."""
    del record
    if x.is_coalesced():
        return x
    indices, values = x._indices(), x._values()
    place, order = _flat(indices, x.shape).sort()
    kept, inverse = torch.unique_consecutive(place, return_inverse=True)
    total = values.new_zeros(len(kept), *values.shape[1:])
    total.index_add_(0, inverse, values.index_select(0, order))
    found, rest = [], kept
    for size in reversed(x.shape[1 : len(indices)]):
        found.append(rest % size)
        rest = rest // size
    return _coordinates(torch.stack([rest, *reversed(found)]), total, x.shape, coalesced=True)


def _product(record: Kernel, name: str, a: Any, b: Any) -> Any:
    """A sparse matrix times a dense one, by cuSPARSE: every entry reads a row of the dense one."""
    a = _coalesce(record, a)
    values = a._values()
    entries, columns = values.shape[0], b.shape[1] if b.dim() > 1 else 1
    out = b.new_empty(a.shape[0], *b.shape[1:])
    if not hasattr(a, _ROWS_AT_HAND):
        row = a._indices()[0]
        bounds = row.new_empty(a.shape[0] + 1, dtype=torch.int32)
        record("aten::_convert_indices_from_coo_to_csr", [row], [bounds], (), OpCost(bytes=8.0 * entries))
    moved_bytes = entries * (4 + values.element_size() * (1 + columns)) + out.numel() * out.element_size()
    cost = OpCost(flops=2.0 * entries * columns, bytes=float(moved_bytes))
    record(name, [a._indices(), values, b], [out], (), cost)
    return out


def _mm(record: Kernel, a: Any, b: Any) -> Any:
    if not is_sparse(a):  # dense times sparse: the other way round, transposed
        return _mm(record, _transpose(record, b), a.t()).t()
    return _product(record, "aten::_sparse_mm", a, b)


def _addmm(record: Kernel, c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = _mm(record, a, b)
    out = out if alpha == 1 else out * alpha
    return out if beta == 0 else c * beta + out


def _transpose(record: Kernel, x: Any, one: int = 0, other: int = 1) -> Any:
    del record
    order = list(range(x.dim()))
    order[one], order[other] = order[other], order[one]
    indices = torch.stack([x._indices()[dim] for dim in order[: x.sparse_dim()]])
    compressed = hasattr(x, _ROWS_AT_HAND)
    out = _coordinates(indices, x._values(), [x.shape[dim] for dim in order], compressed)
    if compressed:
        setattr(out, _ROWS_AT_HAND, True)
    return out


def _mask(record: Kernel, x: Any, mask: Any, *_: Any) -> Any:
    """The entries of a dense tensor at the places of a sparse one."""
    del record
    indices, deep = mask._indices(), mask.sparse_dim()
    rows = x.reshape(-1, *x.shape[deep:]).index_select(0, _flat(indices, x.shape))
    return _coordinates(indices, rows, x.shape, mask.is_coalesced())


def _dense(record: Kernel, x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    del record
    out = torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)
    return out.add_(x)


def _with_values(op: Any) -> Callable[..., Any]:
    """An op that changes each value by itself."""

    def run(record: Kernel, x: Any, *args: Any, **kwargs: Any) -> Any:
        del record
        out = _coordinates(x._indices(), op(x._values(), *args, **kwargs), x.shape, x.is_coalesced())
        if hasattr(x, _ROWS_AT_HAND):
            setattr(out, _ROWS_AT_HAND, True)
        return out

    return run


def _clone(record: Kernel, x: Any, **_: Any) -> Any:
    node = torch._C._current_autograd_node()
    if node is not None and not torch.is_grad_enabled() and "AccumulateGrad" in node.name():
        return x  # a plain sparse gradient is taken over, not copied
    return _with_values(aten.clone.default)(record, x)


def _to_copy(record: Kernel, x: Any, **options: Any) -> Any:
    del record
    return moved(x, **options)


SPARSE_OPS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.sparse_compressed_tensor.comp_plain_value_size: _compressed,
    aten._sparse_compressed_tensor_unsafe.default: _compressed,
    aten._sparse_csr_tensor_unsafe.default: _compressed,
    aten._coalesce.default: _coalesce,
    aten.mm.default: _mm,
    aten.mv.default: lambda record, a, b: _product(record, "aten::_sparse_mm", a, b),
    aten._sparse_mm.default: _mm,
    aten.addmm.default: _addmm,
    aten._sparse_addmm.default: _addmm,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.sparse_mask.default: _mask,
    aten._to_dense.default: _dense,
    aten.to_dense.default: _dense,
    aten.clone.default: _clone,
    aten.mul.Tensor: _with_values(aten.mul.Tensor),
    aten.div.Tensor: _with_values(aten.div.Tensor),
    aten.neg.default: _with_values(aten.neg.default),
}

ON_BOTH = {op for op in SPARSE_OPS if "sparse" not in op.name()}  # ops of dense tensors too
