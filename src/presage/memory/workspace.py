"""GPU memory of ops besides inputs and outputs: transient buffers, and library workspaces that stay.

A rule says what the CUDA implementation of an op allocates, from the shapes alone. Sizes were checked against the
allocator's own history on an H200 (PyTorch 2.11, CUDA 13.0, cuDNN 9.19), over training steps and single ops. No rule
knows a workload. An op without a rule needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias, TypeVar

from presage.graph.graph import Graph, Op, Tensor, argument, aten
from presage.hardware import Gpu
from presage.memory import workspace_conv as conv
from presage.memory import workspace_rnn as rnn
from presage.memory.workspace_reduce import H200
from presage.memory.workspace_reduce import buffers as reduction_buffers

R = TypeVar("R")
Buffers: TypeAlias = tuple[int, ...]  # bytes of each buffer, all alive together
Rule: TypeAlias = Callable[[Graph, Op], Buffers]
RuleOfChip: TypeAlias = Callable[[Graph, Op, Gpu], Buffers]  # where the size depends on the GPU

_CUBLAS = frozenset(aten("mm addmm bmm baddbmm addbmm mv addmv dot vdot _addmm_activation linear matmul"))


def library_bytes(chip: Gpu = H200) -> dict[str, int]:
    """The workspaces of libraries.

    PyTorch gives cuBLAS some per handle and stream, 32 MiB on compute capability 9, and cuBLASLt its own. Both come out
    of the caching allocator at the first use and stay. Every host thread has its own handle: the main thread and
    autograd's count separately. Recurrent layers with dropout have cuDNN keep the state of a random number generator,
    of 24 bytes, for each thread of all multiprocessors.
    """
    dropout = 24 * chip.threads_per_sm * chip.sms
    return {"cublas": chip.cublas_workspace, "cublaslt": chip.cublaslt_workspace, "cudnn dropout": dropout}


def library(graph: Graph, op: Op) -> tuple[str, ...]:
    """The library workspaces an op needs to be there: keys of `library_bytes`."""
    if op.name == "aten::_cudnn_rnn":
        return ("cudnn dropout",) if rnn.drops(op) else ()
    if op.name not in _CUBLAS or not op.kernels:
        return ()
    return ("cublas", "cublaslt") if _adds_bias_in_place(graph, op) else ("cublas",)


def transient(graph: Graph, op: Op, chip: Gpu = H200) -> Buffers:
    """Buffers an op holds only while it runs."""
    if not op.kernels:
        return ()
    if op.name in RULES_OF_CHIP:
        return RULES_OF_CHIP[op.name](graph, op, chip)
    return RULES[op.name](graph, op) if op.name in RULES else ()


def _adds_bias_in_place(graph: Graph, op: Op) -> bool:
    """Whether a GEMM with a bias row runs in cuBLASLt, which fuses the bias."""
    tensors = graph.inputs_of(op)
    if op.name not in ("aten::addmm", "aten::_addmm_activation") or len(tensors) < 3:
        return False
    bias, _, right = tensors[:3]
    return len(bias.shape) == 1 and bias.shape[0] == right.shape[1] and min(right.shape) > 1


def _first(graph: Graph, op: Op) -> Tensor:
    return graph.inputs_of(op)[0]


def _is_dense(t: Tensor) -> bool:
    """No element twice: an expanded tensor, of stride 0, must be written out before most kernels can read it."""
    return all(stride != 0 or size == 1 for stride, size in zip(t.strides, t.shape, strict=True))


def _reduction(accumulate: int) -> RuleOfChip:
    """Blocks that share an output leave partial results, of `accumulate` bytes, in a buffer."""

    def rule(graph: Graph, op: Op, chip: Gpu) -> Buffers:
        x = _first(graph, op)
        dims = argument(op, "dim", 1)
        axes = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
        axes = [d for d in axes if isinstance(d, int)] if isinstance(axes, list) else []
        if not x.shape:
            return ()
        size = 2 * accumulate if x.dtype in ("float64", "int64") and accumulate == 4 else accumulate
        return reduction_buffers(x.shape, x.strides, axes, size, chip)

    return rule


def _expanded_operands(graph: Graph, op: Op) -> Buffers:
    """cuBLAS reads rows or columns: an operand that has neither is copied."""
    return tuple(t.nbytes for t in graph.inputs_of(op) if len(t.shape) >= 2 and not _is_dense(t))


def _softmax(graph: Graph, op: Op) -> Buffers:
    """Softmax and its logarithm read contiguous tensors; so do their gradients."""
    return tuple(t.nbytes for t in graph.inputs_of(op)[:2] if not t.is_contiguous)


def _softmax_backward(graph: Graph, op: Op) -> Buffers:
    """The product of gradient and output is written out before the row sums are subtracted."""
    return (_first(graph, op).nbytes, *(t.nbytes for t in graph.inputs_of(op)[1:2] if not t.is_contiguous))


def _layer_norm(graph: Graph, op: Op) -> Buffers:
    """A normalised axis that is not the fastest is first copied into place."""
    x = _first(graph, op)
    return () if x.is_contiguous else (x.nbytes,)


def _layer_norm_backward(graph: Graph, op: Op, chip: Gpu) -> Buffers:
    """Copies of what is not contiguous; for many short rows the weight's gradient is summed in two steps."""
    dy, x = graph.inputs_of(op)[:2]
    copies = tuple(t.nbytes for t in (dy, x) if not t.is_contiguous)
    normalized = argument(op, "normalized_shape", 2)
    columns = prod(n for n in normalized if isinstance(n, int)) if isinstance(normalized, list) else x.shape[-1]
    rows = x.elements // max(1, columns)
    if rows <= 64 * 1024 or columns // 32 >= chip.sms // 2:
        return copies
    parts = -(-rows // 32)
    partial = parts * columns * x.itemsize
    return (*copies, partial, partial, *reduction_buffers((parts, columns), (columns, 1), (0,), chip=chip))


def _group_norm(graph: Graph, op: Op) -> Buffers:
    """A scale and an offset for every image and channel."""
    x = _first(graph, op)
    per_channel = 4 * prod(x.shape[:2])
    return (per_channel, per_channel)


def _batch_norm(graph: Graph, op: Op) -> Buffers:
    """Channels-last statistics: two partial sums per channel from each of up to 256 blocks of rows."""
    x = _first(graph, op)
    if len(x.shape) < 4 or x.is_contiguous or x.strides[1] != 1:
        return ()
    rows = x.elements // max(1, x.shape[1])
    return (8 * x.shape[1] * min(256, -(-rows // 128)),)


def _radix_sort(pairs: int, key: int) -> int:
    """Device-wide sort of (key, 64-bit place): a second copy of both, and a histogram."""
    return pairs * (key + 8) + pairs // 4 + 16 * 1024


def _sort(graph: Graph, op: Op) -> Buffers:
    """Up to 4096 elements a row are sorted in shared memory; longer rows by radix, with their places written out."""
    x = _first(graph, op)
    if x.elements == 0 or x.shape[-1:] == () or x.shape[-1] <= 4096:
        return (8 * x.elements,)
    return (8 * x.elements, _radix_sort(x.elements, x.itemsize))


def _random_permutation(graph: Graph, op: Op) -> Buffers:
    """Random keys are sorted, with the places as values."""
    n = graph.outputs_of(op)[0].elements
    return (8 * n, 8 * n, 8 * n, _radix_sort(n, 8))


def _embedding_backward(weights: int, width: int, count: int) -> Buffers:
    """Indices are sorted with their places, cut into segments of equal index and those into parts of ten rows.

    Each part's sum is kept in float32 until the parts of a segment are added.
    """
    segments = min(count, weights)
    parts = count // 10 + segments
    return (8 * count, 8 * count, 8 * count, 8 * segments, 8 * segments, 8 * parts, 4 * parts * width)


def _dense_embedding_backward(graph: Graph, op: Op) -> Buffers:
    dy, indices = graph.inputs_of(op)[:2]
    weights = argument(op, "num_weights", 2)
    padding = argument(op, "padding_idx", 3)
    copy = () if _is_dense(dy) else (dy.nbytes,)
    if not isinstance(weights, int) or (indices.elements <= 3072 and isinstance(padding, int) and padding < 0):
        return copy  # few indices are added one after the other
    return copy + _embedding_backward(weights, dy.shape[-1], indices.elements)


def _bag_backward(graph: Graph, op: Op) -> Buffers:
    """Dense gradients of sums and means are computed as those of plain embeddings; maxima are scattered."""
    tensors = graph.inputs_of(op)
    dy, indices = tensors[0], tensors[1]
    copy = () if dy.is_contiguous else (dy.nbytes,)
    weights, mode = _weights_and_mode(op)
    if weights == 0 or mode == 2 or argument(op, "sparse", 9) is True or indices.elements == 0:
        return copy
    return copy + _embedding_backward(weights, dy.shape[-1], indices.elements)


def _weights_and_mode(op: Op) -> tuple[int, int]:
    places = (6, 8) if op.name == "aten::_embedding_bag_backward" else (5, 7)
    weights, mode = argument(op, "num_weights", places[0]), argument(op, "mode", places[1])
    return weights if isinstance(weights, int) else 0, mode if isinstance(mode, int) else 0


def _index_put(graph: Graph, op: Op) -> Buffers:
    """Deterministic accumulation sorts the indices; values that are not contiguous are copied."""
    tensors = graph.inputs_of(op)
    if len(tensors) < 3 or argument(op, "accumulate", 3) is not True:
        return ()
    values, indices = tensors[-1], max((t.elements for t in tensors[1:-1]), default=0)
    sort = (_radix_sort(indices, 8),) if indices > 4096 else ()
    return (*(() if values.is_contiguous else (values.nbytes,)), *(8 * indices,) * 4, *sort)


def _cudnn_attention_backward(graph: Graph, op: Op) -> Buffers:
    """The query's gradient in float32, and for each query row the dot product of output and its gradient.

    Where several query heads share a key, each gets its own key and value gradient, added up afterwards.
    """
    dy, q, k = graph.inputs_of(op)[:3]
    shared = 2 * k.itemsize * prod(q.shape[:2]) * k.shape[2] * k.shape[3] if q.shape[1] != k.shape[1] else 0
    copy = () if _is_dense(dy) else (dy.nbytes,)
    return (*copy, 4 * q.elements + 4 * prod(q.shape[:3]) + shared + 256)


def _heads_first(op: Op, t: Tensor) -> tuple[int, int, int, int]:
    """Batch, heads, rows and head size: the kernels' own ops take heads after rows, those around them before."""
    batch, second, third, depth = t.shape
    return (batch, second, third, depth) if "scaled_dot_product" in op.name else (batch, third, second, depth)


def _efficient_attention_backward(graph: Graph, op: Op) -> Buffers:
    """The query's gradient in float32, in whole tiles of 64 rows and 64 columns, with a counter for each."""
    dy, q = graph.inputs_of(op)[:2]
    batch, heads, rows, depth = _heads_first(op, q)
    tiles, wide = -(-rows // 64), -(-depth // 64) * 64
    copy = () if _is_dense(dy) else (dy.nbytes,)
    return (*copy, 4 * batch * heads * rows, batch * heads * tiles * (64 * wide * 4 + 16))


def _flash_attention_backward(graph: Graph, op: Op) -> Buffers:
    """The query's gradient in float32 and the row sums, rows rounded up to 128, head size to 32."""
    _, q, k = graph.inputs_of(op)[:3]
    batch, heads, rows, depth = _heads_first(op, q)
    _, key_heads, keys, _ = _heads_first(op, k)
    rows, wide = -(-rows // 128) * 128, -(-depth // 32) * 32
    sums = (4 * batch * heads * rows * wide, 4 * batch * heads * rows)
    return (*sums, 2 * k.itemsize * batch * heads * keys * depth) if heads != key_heads else sums


def _binary_cross_entropy(graph: Graph, op: Op) -> Buffers:
    """The loss of every element, and one intermediate, before the mean."""
    n = _first(graph, op).nbytes
    return (n, n)


def _contiguous_first(graph: Graph, op: Op) -> Buffers:
    """The gradient is read as a contiguous tensor."""
    x = _first(graph, op)
    return () if _is_dense(x) else (x.nbytes,)


def _coalesce(graph: Graph, op: Op) -> Buffers:
    """One sort key per entry, its place, and the sort's second copy of both."""
    count = max((t.shape[-1] for t in graph.inputs_of(op) if t.dtype == "int64" and t.shape), default=0)
    return (8 * count, 8 * count, 16 * count + 512)


def _named(names: str, rule: R) -> dict[str, R]:
    return dict.fromkeys(aten(names), rule)


RULES_OF_CHIP: dict[str, RuleOfChip] = {
    **_named("sum mean prod norm linalg_vector_norm amax amin any all logsumexp", _reduction(4)),
    **_named("max min argmax argmin var std var_mean std_mean", _reduction(16)),
    **_named("native_layer_norm_backward _fused_rms_norm_backward", _layer_norm_backward),
    **_named("convolution_backward", conv.backward),
    **_named("convolution _convolution cudnn_convolution cudnn_convolution_transpose", conv.forward),
}
RULES: dict[str, Rule] = {
    **_named("mm addmm bmm baddbmm", _expanded_operands),
    **_named("_softmax _log_softmax _log_softmax_backward_data", _softmax),
    **_named("_softmax_backward_data", _softmax_backward),
    **_named("native_layer_norm _fused_rms_norm", _layer_norm),
    **_named("native_group_norm native_group_norm_backward", _group_norm),
    **_named("native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward", _batch_norm),
    **_named("sort argsort", _sort),
    **_named("randperm", _random_permutation),
    **_named("embedding_dense_backward", _dense_embedding_backward),
    **_named("_embedding_bag_backward _embedding_bag_dense_backward", _bag_backward),
    **_named("index_put index_put_ _index_put_impl_", _index_put),
    **_named("_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward", _cudnn_attention_backward),
    **_named(
        "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward", _efficient_attention_backward
    ),
    **_named("_scaled_dot_product_flash_attention_backward _flash_attention_backward", _flash_attention_backward),
    **_named("binary_cross_entropy_with_logits", _binary_cross_entropy),
    **_named("max_pool2d_with_indices_backward avg_pool2d_backward reflection_pad2d_backward roll", _contiguous_first),
    **_named("_coalesce", _coalesce),
    **_named("_cudnn_rnn _cudnn_rnn_backward", rnn.scratch),
}
