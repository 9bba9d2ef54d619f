"""TorchRec and FBGEMM on fake tensors: a group's lookup as the two ops that a profiler shows, with its tables beside.

FBGEMM's table-batched lookup is C++ for CUDA tensors. In its place stand its forward op and its backward op, with the
optimizer in it, by their bytes: rows looked up, each once where a batch repeats it (rows are taken to be drawn
evenly, as index data made for a capture is), pooled rows, indices. The ops keep rows and columns of their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture.compiled import is_capturing
from presage.capture.contents import current_recorder
from presage.graph.graph import OpCost

LOOKUP = "fbgemm::split_embedding_codegen_lookup_function"
BACKWARD = LOOKUP + "Backward"
SORTED = 6 * 16  # bytes through memory for each lookup that is sorted: six passes over pairs of 8 bytes
CHECK_AND_LOOKUP, SORT_AND_UPDATE = 2, 8  # kernels
EVENLY = "rows of FBGEMM's tables are taken to be looked up evenly: where some are looked up often, it is faster"


def _replace_slice(module: Any) -> None:
    """A slice of a group's weights is a parameter that views them, not an object of a class of its own."""
    own = module.TableBatchedEmbeddingSlice.__new__

    def new(cls: Any, data: Any, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int) -> Any:
        if not is_capturing() or not isinstance(data, FakeTensor):
            return own(cls, data, start_offset, end_offset, num_embeddings, embedding_dim)
        view = data[start_offset:end_offset].view(num_embeddings, embedding_dim)
        return nn.Parameter(view, requires_grad=data.requires_grad)

    module.TableBatchedEmbeddingSlice.__new__ = new


def _replace_lookup(module: Any) -> None:
    """The lookup of a group of tables is recorded, not run."""
    group = module.SplitTableBatchedEmbeddingBagsCodegen
    own = group.forward

    def forward(self: Any, indices: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or current_recorder() is None or not isinstance(indices, FakeTensor):
            return own(self, indices, offsets, *args, **kwargs)
        rows, dims = _tables(self)
        anchor = self.weights_dev.new_empty(0).requires_grad_()  # the update is the backward's: weights get no gradient
        return _Lookup.apply(  # type: ignore[no-untyped-call]
            anchor, self.weights_dev.detach(), indices, offsets, rows, dims
        )

    group.forward = forward
    dense = module.DenseTableBatchedEmbeddingBagsCodegen
    dense_own = dense.forward

    def dense_forward(self: Any, indices: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or current_recorder() is None or not isinstance(indices, FakeTensor):
            return dense_own(self, indices, offsets, *args, **kwargs)
        return _DenseLookup.apply(self.weights, indices, offsets, *_tables(self))  # type: ignore[no-untyped-call]

    dense.forward = dense_forward


def _tables(group: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and columns of the table of each feature."""
    specs = group.embedding_specs
    features = getattr(group, "feature_table_map", None) or range(len(specs))
    rows, dims = (tuple(int(specs[t][k]) for t in features) for k in (0, 1))
    return rows, dims


def _replace_placement(module: Any) -> None:
    """Every rank's tensors are on the one device of a capture, whatever index its own has."""
    own = module._remote_device.device

    def device(self: Any) -> Any:
        found = own(self)
        here = is_capturing() and current_recorder() is not None and found.type == "cuda"
        return torch.device("cuda", 0) if here else found

    module._remote_device.device = device


def _skip_validation(module: Any) -> None:
    """A flag that the first rank sends once per process: the captures of all ranks are in one."""
    module._INITIALIZED = True


class _Lookup(torch.autograd.Function):
    """Forward and backward of a group's lookup."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, weights: Any, indices: Any, offsets: Any, rows: Any, dims: Any) -> Any:
        del anchor
        samples = (offsets.numel() - 1) // max(1, len(rows))
        out = weights.new_empty((samples, sum(dims)), dtype=torch.float32)
        ctx.tables = rows, dims
        ctx.save_for_backward(weights, indices, offsets)
        cost = _forward_cost(indices, out, rows, dims, weights)
        _record(LOOKUP, [weights, indices, offsets], [out], [], rows, dims, cost)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, indices, offsets = ctx.saved_tensors
        rows, dims = ctx.tables
        cost = _backward_cost(indices, gradients[0], rows, dims, weights)
        _record(BACKWARD, [weights, gradients[0], indices, offsets], [], [weights], rows, dims, cost)
        return None, None, None, None, None, None


class _DenseLookup(torch.autograd.Function):
    """A group whose weights get a dense gradient: tables that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, weights: Any, indices: Any, offsets: Any, rows: Any, dims: Any) -> Any:
        return _Lookup.forward(ctx, None, weights, indices, offsets, rows, dims)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, indices, offsets = ctx.saved_tensors
        rows, dims = ctx.tables
        out = torch.zeros_like(weights)
        cost = _backward_cost(indices, gradients[0], rows, dims, weights)
        _record(BACKWARD, [out, gradients[0], indices, offsets], [], [out], rows, dims, cost)
        return out, None, None, None, None


def _record(
    name: str, given: list[Any], made: list[Any], written: list[Any], rows: Any, dims: Any, cost: OpCost
) -> None:
    recorder = current_recorder()
    if recorder is not None:
        recorder.note(EVENLY)
        recorder.record_kernel(name, [*given, list(rows), list(dims)], made, written, cost)


def distinct_rows(lookups: float, rows: Sequence[int]) -> list[float]:
    """Rows of each table that a batch uses, lookups spread evenly over tables and rows."""
    each = lookups / max(1, len(rows))
    return [n * (1 - (1 - 1 / n) ** each) if n else 0.0 for n in rows]


def _row_bytes(indices: Any, rows: Any, dims: Any, weights: Any) -> float:
    used = distinct_rows(float(indices.numel()), rows)
    return float(sum(n * d for n, d in zip(used, dims, strict=True)) * weights.element_size())


def _forward_cost(indices: Any, out: Any, rows: Any, dims: Any, weights: Any) -> OpCost:
    read = 2 * indices.numel() * indices.element_size()  # checked, then looked up
    pooled = out.numel() * out.element_size()
    return OpCost(bytes=_row_bytes(indices, rows, dims, weights) + read + pooled, launches=CHECK_AND_LOOKUP)


def _backward_cost(indices: Any, gradient: Any, rows: Any, dims: Any, weights: Any) -> OpCost:
    each = sum(dims) / max(1, len(dims))
    gathered = indices.numel() * each * gradient.element_size()
    update = 2 * _row_bytes(indices, rows, dims, weights)
    return OpCost(bytes=update + gathered + indices.numel() * SORTED, launches=SORT_AND_UPDATE)


HOOKED: dict[str, Callable[[Any], None]] = {
    "torch.distributed.remote_device": _replace_placement,
    "torchrec.distributed.collective_utils": _skip_validation,
    "torchrec.distributed.composable.table_batched_embedding_slice": _replace_slice,
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": _replace_lookup,
}
