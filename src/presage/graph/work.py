"""The work of an op and of a whole graph: FLOPs, bytes of memory traffic, bytes of collectives.

FLOPs follow torch's FlopCounterMode: matrix multiplies, convolutions and attention count two per multiply-add, biases
and everything else count nothing, and attention counts the whole score matrix whether or not it is causal
(`useful_flops` leaves out what a causal mask hides). Where that counter is inexact, this is exact: the weight gradient
of a grouped convolution is not multiplied by its groups, and recurrent layers, matrix-vector products and grouped
matrix multiplies are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from presage.graph.families import family
from presage.graph.graph import Graph, Op, Tensor, argument, aten, flag, output_mask, references, tensor, tensors
from presage.graph.traffic import MemoryTraffic, bytes_moved, bytes_touched

__all__ = [
    "MemoryTraffic",
    "OpWork",
    "bytes_moved",
    "bytes_touched",
    "collective",
    "collective_bytes",
    "family",
    "flops",
    "has_rule",
    "output_mask",
    "total",
    "useful_flops",
    "work",
]


@dataclass(frozen=True, slots=True)
class OpWork:
    """Op and kernel counts, FLOPs and bytes; values add with `+`."""

    ops: int = 0
    kernels: int = 0  # ops that launch something
    flops: int = 0
    bytes: MemoryTraffic = field(default_factory=MemoryTraffic)

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.ops + other.ops,
            self.kernels + other.kernels,
            self.flops + other.flops,
            self.bytes + other.bytes,
        )


def work(graph: Graph, op: Op) -> OpWork:
    return OpWork(1, int(op.kernels), flops(graph, op), bytes_moved(graph, op))


def total(graph: Graph, ops: Iterable[Op] | None = None) -> OpWork:
    """The work of these ops, or of all."""
    return sum((work(graph, op) for op in (graph.ops if ops is None else ops)), OpWork())


# ---- FLOPs

Rule: TypeAlias = Callable[[Graph, Op], int]


def flops(graph: Graph, op: Op) -> int:
    """Floating-point operations of one op; 0 for an op that multiplies no matrices."""
    if op.cost is not None:
        return int(op.cost.flops)
    rule = _RULES.get(op.name)
    return rule(graph, op) if rule else 0


def useful_flops(graph: Graph, op: Op) -> int:
    """As `count`, without the attention scores that a causal mask throws away."""
    sizes = _ATTENTION.get(op.name)
    if sizes is None:
        return flops(graph, op)
    return _products(graph, op) * sizes(graph, op).unmasked


def has_rule(name: str) -> bool:
    return name in _RULES


# ---- matrix multiplies


def _matmul(a: Tensor, b: Tensor) -> int:
    """a: [..., m, k], b: [..., k, n]."""
    return 2 * a.elements * b.shape[-1]


def _product_at(place: int) -> Rule:
    return lambda graph, op: _matmul(tensor(graph, op, place), tensor(graph, op, place + 1))


def _vector_at(place: int) -> Rule:
    """A matrix (or vector) times a vector: each of its elements is used once."""
    return lambda graph, op: 2 * tensor(graph, op, place).elements


def _linear(graph: Graph, op: Op) -> int:
    return 2 * tensor(graph, op, 0).elements * tensor(graph, op, 1).shape[0]


def _grouped(graph: Graph, op: Op) -> int:
    """A matrix, or the inner dimension, is cut into groups: each row, column or slice meets one group only."""
    a, b = tensor(graph, op, 0), tensor(graph, op, 1)
    if len(a.shape) == 3 and len(b.shape) == 2:
        return 2 * prod(a.shape[1:]) * b.shape[-1]
    return _matmul(a, b)


# ---- convolutions


def _forward_convolution(graph: Graph, op: Op) -> int:
    x, weight = tensor(graph, op, 0), tensor(graph, op, 1)
    return _convolution(x, weight, graph.outputs_of(op)[0], _transposed(op, 6))


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    """Each point of the output (of the input, if transposed) meets the filter once; weight.shape[1] is per group."""
    met = x if transposed else out
    return 2 * met.elements * prod(weight.shape[1:])


def _transposed(op: Op, place: int) -> bool:
    return "transpose" in op.name or (op.name in _GENERAL and flag(op, "transposed", place))


def _backward_convolution(graph: Graph, op: Op) -> int:
    """The data gradient and the weight gradient each cost what the forward did."""
    grad, x, weight = (tensor(graph, op, i) for i in range(3))
    wanted = output_mask(op)
    place = 6 if "overrideable" in op.name else 7
    return _convolution(x, weight, grad, _transposed(op, place)) * (wanted[0] + wanted[1])


# ---- attention


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of an attention: how many heads in the whole batch, and the rows and columns of each score matrix."""

    heads: int
    queries: int
    keys: int
    causal: bool

    @property
    def scores(self) -> int:
        return self.heads * self.queries * self.keys

    @property
    def unmasked(self) -> int:
        """Query i sees keys 0..i: the mask is aligned to the first query, as `is_causal` defines it."""
        if not self.causal:
            return self.scores
        seen = min(self.queries, self.keys)
        return self.heads * (seen * (seen + 1) // 2 + (self.queries - seen) * self.keys)


def _products(graph: Graph, op: Op) -> int:
    """Operations per score: q k' and p v forward; backward q k' again, and the gradients of v, p, q and k."""
    first = _first(op)
    depth, value_depth = tensor(graph, op, first).shape[-1], tensor(graph, op, first + 2).shape[-1]
    return 2 * (3 * depth + 2 * value_depth) if first else 2 * (depth + value_depth)


def _first(op: Op) -> int:
    """Where the query is: backward ops have the output's gradient before it."""
    return 1 if op.name.endswith("_backward") else 0


def _sizes(heads_at: int) -> Callable[[Graph, Op], _Sizes]:
    """Attention over [batch, heads, rows, depth] or [batch, rows, heads, depth], or over sequences laid end to end.

    How long each of those sequences is, is data: each counts as the longest.
    """

    def sizes(graph: Graph, op: Op) -> _Sizes:
        q, k = tensor(graph, op, _first(op)).shape, tensor(graph, op, _first(op) + 1).shape
        causal = flag(op, "is_causal") or flag(op, "custom_mask_type")
        starts = tensors(graph, argument(op, "cum_seq_q")) or tensors(graph, argument(op, "cu_seqlens_q"))
        longest = [argument(op, n) or argument(op, f"max_seqlen_{n[-1]}") for n in ("max_q", "max_k")]
        if starts and starts[0].elements and isinstance(longest[0], int) and isinstance(longest[1], int):
            return _Sizes((starts[0].elements - 1) * q[-2], longest[0], longest[1], causal)
        rows_at = 3 - heads_at
        return _Sizes(q[0] * q[heads_at], q[rows_at], k[rows_at], causal)

    return sizes


def _attention(graph: Graph, op: Op) -> int:
    return _products(graph, op) * _ATTENTION[op.name](graph, op).scores


# ---- recurrent layers


def _recurrent(graph: Graph, op: Op) -> int:
    """Each weight matrix, of every layer and direction, is applied once to every row of every time step."""
    x = tensor(graph, op, 0)
    packed = bool(argument(op, "batch_sizes"))
    rows = x.shape[0] if packed else prod(x.shape[:-1])
    return 2 * rows * sum(w.elements for w in tensors(graph, argument(op, "weight", 1)) if len(w.shape) == 2)


def _recurrent_backward(graph: Graph, op: Op) -> int:
    """The data gradients cost a forward, with the input's, which cuDNN computes wanted or not; so do the weights'."""
    mask = argument(op, "output_mask", len(op.inputs) - 1)
    weights = bool(mask[3]) if isinstance(mask, list) and len(mask) == 4 else True
    return _recurrent(graph, op) * (1 + weights)


# ---- the tables


_GENERAL = frozenset(
    aten("convolution _convolution convolution_overrideable convolution_backward convolution_backward_overrideable")
)
_CONVOLUTIONS = aten(
    "cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu "
    "_conv_depthwise2d conv_depthwise3d _slow_conv2d_forward thnn_conv2d slow_conv3d_forward slow_conv3d "
    "slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d mkldnn_convolution"
)
_CONVOLUTIONS_BACKWARD = aten("_conv_depthwise2d_backward conv_depthwise3d_backward _slow_conv2d_backward")

_ATTENTION: dict[str, Callable[[Graph, Op], _Sizes]] = {
    **{
        f"aten::_scaled_dot_product_{kind}{way}": _sizes(heads_at=1)
        for kind in ("cudnn_attention", "flash_attention", "efficient_attention", "fused_attention_overrideable")
        for way in ("", "_backward")
    },
    **{f"aten::_cudnn_attention_{way}": _sizes(heads_at=1) for way in ("forward", "backward")},
    **{f"aten::_flash_attention_{way}": _sizes(heads_at=2) for way in ("forward", "backward")},
    **{f"aten::_efficient_attention_{way}": _sizes(heads_at=2) for way in ("forward", "backward")},
}

_RULES: dict[str, Rule] = {
    **dict.fromkeys(aten("mm bmm _scaled_mm _int_mm"), _product_at(0)),
    **dict.fromkeys(aten("addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ _addmm_activation"), _product_at(1)),
    **dict.fromkeys(aten("mv dot vdot"), _vector_at(0)),
    **dict.fromkeys(aten("addmv addmv_"), _vector_at(1)),
    **dict.fromkeys(aten("_grouped_mm _scaled_grouped_mm"), _grouped),
    "aten::linear": _linear,
    **dict.fromkeys(_CONVOLUTIONS, _forward_convolution),
    **dict.fromkeys(_CONVOLUTIONS_BACKWARD, _backward_convolution),
    **{n: _backward_convolution if "backward" in n else _forward_convolution for n in _GENERAL},
    **dict.fromkeys(_ATTENTION, _attention),
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
}


# ---- Collectives among a graph's ops: what they do, and how many bytes that is as NCCL's own tests count them.

# The collective that an op is, by the names PyTorch's profiler shows.
COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send_recv",
    "c10d::recv_": "send_recv",
}
WAIT = "c10d::wait"  # the stream waits for a collective on the op's tensors: Work.wait


def collective(op: Op) -> str | None:
    """all_reduce, all_gather, ...; None where the op is none."""
    return COLLECTIVES.get(op.name)


def collective_bytes(graph: Graph, op: Op) -> int:
    """The largest buffer: the whole for all-gather and reduce-scatter, the rank's own for the others.

    A list of tensors is one buffer in pieces.
    """
    sizes = [sum(graph.tensors[i].nbytes for i in references([value])) for value in op.inputs]
    return max([*sizes, sum(t.nbytes for t in graph.outputs_of(op))])
