"""TorchRec and FBGEMM on fake tensors: a group's lookup as the two ops that a profiler shows, with its tables beside.

FBGEMM's table-batched lookup is C++ for CUDA tensors. In its place stand its forward op and its backward op, with the
optimizer in it, by their bytes: rows looked up, each once where a batch repeats it, pooled rows, indices. The ops keep
rows and columns of their tables, and how skewed the lookups of each are: by the indices of the captured batch, before
they are sent to the ranks that hold the tables, or even where these are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from presage.capture.compiled import is_capturing
from presage.capture.contents import current_recorder
from presage.costs.lookups.captured import SORT_AND_UPDATE
from presage.costs.lookups.row_reuse import fit_alpha, zipf
from presage.errors import PresageError
from presage.graph.graph import OpCost

LOOKUP = "fbgemm::split_embedding_codegen_lookup_function"
BACKWARD = LOOKUP + "Backward"
SORTED = 6 * 16  # bytes through memory for each lookup that is sorted: six passes over pairs of 8 bytes
CHECK_AND_LOOKUP = 2  # kernels
EVENLY = "rows of FBGEMM's tables are taken to be looked up evenly: where some are looked up often, it is faster"
AS_CAPTURED = "rows of FBGEMM's tables repeat as in the captured batch, whose lookups have a skew of {} (0: even)"
OPTIMIZERS = {"exact_sgd": "sgd", "exact_row_wise_adagrad": "rowwise_adagrad"}  # FBGEMM's names of those measured
OTHER_OPTIMIZER = "FBGEMM's update of rows by {} was not measured: it is priced as row-wise Adagrad's"
WEIGHTED = "weighted bags of FBGEMM's lookups were not measured: they are priced as bags without weights"
SEQUENCES = (
    "sequence embeddings (TorchRec's EmbeddingCollection, FBGEMM's pooling mode NONE) are not modelled: capture the "
    "model with an EmbeddingBagCollection of one lookup a bag and as many samples as there are lookups"
)
IN_HOST_MEMORY = (
    "tables in host memory (compute kernels fused_uvm and fused_uvm_caching) are not captured: use the kernel 'fused', "
    "or a job file with cache_load_factor for `presage dlrm`"
)
CHANCE = 3.0  # standard deviations below which fewer distinct rows are not a skew
_SKEWS: dict[tuple[str, int], float] = {}  # by a table's name and rows: those of the first rank's batch


def _replace_input(module: Any) -> None:
    """Before indices are sent to the ranks that hold the tables, how often each table's rows repeat is counted."""
    sharded = module.ShardedEmbeddingBagCollection
    own = sharded.input_dist

    def input_dist(self: Any, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if is_capturing() and current_recorder() is not None:
            _count_repeats(self._embedding_bag_configs, features)
        return own(self, ctx, features, *args, **kwargs)

    sharded.input_dist = input_dist


def _count_repeats(tables: Any, features: Any) -> None:
    """Keep the skew of each table's lookups; nothing where the indices are not known."""
    found = [_numbers(getattr(features, name, None)) for name in ("_values", "_lengths")]
    if found[0] is None or found[1] is None:
        return
    (indices, lengths), keys = found, list(features.keys())
    ends = np.cumsum(lengths.reshape(len(keys), -1).sum(axis=1))
    by_key = dict(zip(keys, np.split(indices, ends[:-1]), strict=True))
    for table in tables:
        used = np.concatenate([by_key[name] for name in table.feature_names if name in by_key] or [indices[:0]])
        key = table.name, int(table.num_embeddings)
        if key not in _SKEWS or torch.distributed.get_rank() == 0:
            _SKEWS[key] = skew_of(used, key[1])


def _numbers(tensor: Any) -> Any:
    """What a tensor holds; None where that is not known."""
    if not isinstance(tensor, torch.Tensor):
        return None
    recorder = current_recorder()
    with _disable_current_modes():
        found = recorder.shadows.numbers(tensor)
        return None if found is None or found.assumed else np.asarray(found.data.tolist(), np.int64)


def skew_of(indices: Any, rows: int) -> float:
    """The skew of some lookups into a table, to a twentieth; 0 where rows repeat no more than by chance."""
    count, distinct = len(indices), len(np.unique(indices))
    if not count:
        return 0.0
    even = zipf(0.0, rows, count).distinct
    if distinct >= even - CHANCE * sqrt(max(count - even, 1.0)):
        return 0.0
    return round(20 * fit_alpha(distinct, count, rows)) / 20


def _replace_slice(module: Any) -> None:
    """A slice of a group's weights is a parameter that views them, not an object of a class of its own."""
    own = module.TableBatchedEmbeddingSlice.__new__

    def new(cls: Any, data: Any, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int) -> Any:
        if not is_capturing() or not isinstance(data, FakeTensor):
            return own(cls, data, start_offset, end_offset, num_embeddings, embedding_dim)
        view = data[start_offset:end_offset].view(num_embeddings, embedding_dim)
        return nn.Parameter(view, requires_grad=data.requires_grad)

    module.TableBatchedEmbeddingSlice.__new__ = new


def _refuse_sequences(module: Any) -> None:
    """A sharded collection whose lookups are not pooled gathers objects that differ by rank, and is not modelled."""
    sharded = module.ShardedEmbeddingCollection
    own = sharded.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_capturing():
            raise PresageError(SEQUENCES)
        own(self, *args, **kwargs)

    sharded.__init__ = init


def _check(group: Any, weights: Any) -> None:
    """Refuse a lookup that would be priced as something else."""
    if getattr(group, "pooling_mode", None) is not None and group.pooling_mode.name == "NONE":
        raise PresageError(SEQUENCES)
    if any(getattr(group, name, weights[:0]).numel() for name in ("weights_uvm", "weights_host")):
        raise PresageError(IN_HOST_MEMORY)
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise PresageError(f"tables of {weights.dtype} are not modelled: use float32, float16 or bfloat16")


def _note_unmeasured(optimizer: str, weighted: bool) -> None:
    recorder = current_recorder()
    if recorder is not None and optimizer not in OPTIMIZERS:
        recorder.note(OTHER_OPTIMIZER.format(optimizer))
    if recorder is not None and weighted:
        recorder.note(WEIGHTED)


def _replace_lookup(module: Any) -> None:
    """The lookup of a group of tables is recorded, not run."""
    group = module.SplitTableBatchedEmbeddingBagsCodegen
    own = group.forward

    def forward(self: Any, indices: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or current_recorder() is None or not isinstance(indices, FakeTensor):
            return own(self, indices, offsets, *args, **kwargs)
        weights, optimizer = self.weights_dev, self.optimizer.value
        _check(self, weights)
        _note_unmeasured(optimizer, (args[0] if args else kwargs.get("per_sample_weights")) is not None)
        anchor = weights.new_empty(0).requires_grad_()  # the update is the backward's: weights get no gradient
        made = module.SparseType.from_int(self.output_dtype).as_dtype()
        told = (*_tables(self), OPTIMIZERS.get(optimizer, "rowwise_adagrad"))
        return _Lookup.apply(anchor, weights.detach(), indices, offsets, made, told)  # type: ignore[no-untyped-call]

    group.forward = forward
    dense = module.DenseTableBatchedEmbeddingBagsCodegen
    dense_own = dense.forward

    def dense_forward(self: Any, indices: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or current_recorder() is None or not isinstance(indices, FakeTensor):
            return dense_own(self, indices, offsets, *args, **kwargs)
        _check(self, self.weights)
        made, told = module.SparseType.from_int(self.output_dtype).as_dtype(), (*_tables(self), "sgd")
        return _DenseLookup.apply(self.weights, indices, offsets, made, told)  # type: ignore[no-untyped-call]

    dense.forward = dense_forward


def _tables(group: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Rows, columns and skew of the table of each feature; no skews where one is not known."""
    specs = group.embedding_specs
    features = getattr(group, "feature_table_map", None) or range(len(specs))
    rows, dims = (tuple(int(specs[t][k]) for t in features) for k in (0, 1))
    names = getattr(group, "table_names", None) or []
    known = {name: skew for (name, _), skew in _SKEWS.items()}  # a table cut by rows has fewer here
    told = [known.get(names[t]) if t < len(names) else None for t in features]
    return rows, dims, tuple(x for x in told if x is not None) if None not in told else ()


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
    def forward(ctx: Any, anchor: Any, weights: Any, indices: Any, offsets: Any, made: Any, told: Any) -> Any:
        del anchor
        rows, dims, *_ = told
        samples = (offsets.numel() - 1) // max(1, len(rows))
        out = weights.new_empty((samples, sum(dims)), dtype=made)
        ctx.tables = told
        ctx.save_for_backward(weights, indices, offsets)
        cost = _forward_cost(indices, out, rows, dims, weights)
        _record(LOOKUP, [weights, indices, offsets], [out], [], ctx.tables, cost)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, indices, offsets = ctx.saved_tensors
        rows, dims, *_ = ctx.tables
        cost = _backward_cost(indices, gradients[0], rows, dims, weights)
        _record(BACKWARD, [weights, gradients[0], indices, offsets], [], [weights], ctx.tables, cost)
        return None, None, None, None, None, None


class _DenseLookup(torch.autograd.Function):
    """A group whose weights get a dense gradient: tables that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, weights: Any, indices: Any, offsets: Any, made: Any, told: Any) -> Any:
        return _Lookup.forward(ctx, None, weights, indices, offsets, made, told)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, indices, offsets = ctx.saved_tensors
        out = torch.zeros_like(weights)
        rows, dims, *_ = ctx.tables
        cost = _backward_cost(indices, gradients[0], rows, dims, weights)
        _record(BACKWARD, [out, gradients[0], indices, offsets], [], [out], ctx.tables, cost)
        return out, None, None, None, None


def _record(name: str, given: list[Any], made: list[Any], written: list[Any], tables: Any, cost: OpCost) -> None:
    rows, dims, skews, optimizer = tables
    recorder = current_recorder()
    if recorder is not None:
        span = f"{min(skews):.4g} to {max(skews):.4g}" if len(set(skews)) > 1 else f"{max(skews, default=0):.4g}"
        recorder.note(AS_CAPTURED.format(span) if skews else EVENLY)
        recorder.record_kernel(name, [*given, optimizer, list(rows), list(dims), list(skews)], made, written, cost)


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
    "torchrec.distributed.embedding": _refuse_sequences,
    "torchrec.distributed.embeddingbag": _replace_input,
    "torchrec.distributed.composable.table_batched_embedding_slice": _replace_slice,
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": _replace_lookup,
}
