"""Ops that run as they are, as a compiler has them run: products with sizes that are multiples of 16 bytes, under
autocast all in low precision; max pooling with places in a window of one byte.

Inductor pads a product whose rows do not begin at multiples of 16 bytes where its arithmetic outweighs its bytes and
the copies this takes (`fx_passes/pad_mm.py`; it measures both ways, here a rule decides). What is computed anyway for
the product is written padded at once; parameters and results of other products are copied.

AOTAutograd traces the backward pass while autocast is on: products that eager autograd runs in float32, as their
forward did, run in low precision. The step is under autocast where its forward pass casts parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

from msgspec.structs import replace

from presage.fusing.lower import OUTSIDE, sort_of
from presage.fusing.rebuild import dense_strides
from presage.fusing.rules import RULES
from presage.graph.builder import GraphBuilder, retarget
from presage.graph.graph import DTYPE_BYTES, Graph, Op, Ref, Tensor, aten, uses

PRODUCTS = aten("mm addmm bmm baddbmm")
POOLS = aten("max_pool2d_with_indices")
HALF = ("bfloat16", "float16")
MULTIPLE = 16  # bytes
BALANCE = {2: 103.0, 4: 51.0}  # operations for an element moved, by width: half of an H200's peak over its bandwidth
RATE, BANDWIDTH = {2: 6e14, 4: 3e14}, 4e12  # what products and copies run at


def _copy(builder: GraphBuilder, source: Tensor, like: Tensor, op: Op) -> tuple[int, Op]:
    """A copy of a tensor in memory of its own, with the shape and dtype of another, and the op that writes it."""
    t = builder.add_tensor(
        builder.add_storage(like.nbytes, "activation"), like.shape, like.dtype, 0, dense_strides(like)
    )
    copy = replace(
        op, name="aten::copy_", overload="", inputs=(Ref(t), Ref(source.id), False), outputs=(t,), writes=(t,),
        names=("self", "src", "non_blocking"), within=(*op.within, "aten::to", "aten::_to_copy"),
    )  # fmt: skip
    return t, copy


def rewrite_externs(graph: Graph, regions: Callable[[Graph], Sequence[int]]) -> Graph:
    """The graph with the ops that a compiler leaves as they are changed as it changes them."""
    for change in (_low_precision, _padded, _small_places):
        graph = change(graph, regions(graph))
    return graph


# ---- precision


def _low_precision(graph: Graph, region: Sequence[int]) -> Graph:
    """The graph with the float32 products of its compiled backward regions in autocast's type."""
    half = _autocast(graph)
    own = [
        i for i, op in enumerate(graph.ops)
        if half and region[i] != OUTSIDE and op.thread == "autograd" and op.name in PRODUCTS
        and all(t.dtype == "float32" for t in graph.inputs_of(op))
    ]  # fmt: skip
    results = {t.storage for i in own for t in graph.outputs_of(graph.ops[i])}
    if not own:
        return graph
    builder = GraphBuilder(_narrowed(graph, region, results, half))
    for i in own:
        op, casts, copies = builder.ops[i], dict[int, int](), list[Op]()
        for t in builder.source.inputs_of(op):
            if t.dtype == "float32" and t.id not in casts:
                casts[t.id], copy = _copy(builder, t, replace(t, dtype=half), op)
                copies.append(copy)
        builder.replace(i, *copies, retarget(op, casts))
    return builder.build(prune=True)


def _autocast(graph: Graph) -> str:
    """The type that the forward pass casts parameters to; '' where it casts none."""
    for op in graph.ops:
        if op.phase == "forward" and op.name == "aten::copy_" and "aten::_to_copy" in op.within:
            to, *source = graph.inputs_of(op)
            parameters = [t for t in source if graph.storages[t.storage].role == "parameter" and t.dtype == "float32"]
            if parameters and to.dtype in HALF:
                return to.dtype
    return ""


def _narrowed(graph: Graph, region: Sequence[int], chosen: Collection[int], dtype: str) -> Graph:
    """The graph with what is in some storages in a narrower type, where only compiled ops use it."""
    beyond = {s for op, k in zip(graph.ops, region, strict=True) if k == OUTSIDE for s in uses(graph, op)}
    made = {t.storage: t.itemsize // DTYPE_BYTES[dtype] for t in graph.tensors if t.storage in chosen} if chosen else {}
    made = {s: times for s, times in made.items() if s not in beyond and times}
    builder = GraphBuilder(graph)
    builder.tensors = [replace(t, dtype=dtype) if t.storage in made else t for t in graph.tensors]
    for storage, times in made.items():
        builder.resize(storage, graph.storages[storage].nbytes // times)
    return builder.build() if made else graph


def _small_places(graph: Graph, region: Sequence[int]) -> Graph:
    """The graph in which max pooling notes places in windows: a byte each."""
    pools = [op for op, k in zip(graph.ops, region, strict=True) if k != OUTSIDE and op.name in POOLS]
    places = {t.storage for op in pools for t in graph.outputs_of(op)[1:] if t.dtype == "int64"}
    return _narrowed(graph, region, places, "int8")


# ---- padding


def _padded(graph: Graph, region: Sequence[int]) -> Graph:
    """The graph with the products of its compiled regions padded where that pays."""
    builder, producer, padded = GraphBuilder(graph), dict[int, Op](), False
    for i, op in enumerate(graph.ops):
        if region[i] != OUTSIDE and op.name in PRODUCTS:
            padded |= _pad(builder, i, producer)
        if op.kernels:
            producer.update((graph.tensors[t].storage, op) for t in (*op.outputs, *op.writes))
    return builder.build(prune=True) if padded else graph


def _pad(builder: GraphBuilder, i: int, producer: Mapping[int, Op]) -> bool:
    """Pad the operands and the result of one product, if that pays."""
    graph, op = builder.source, builder.source.ops[i]
    tensors, outputs = graph.inputs_of(op), graph.outputs_of(op)
    if len(tensors) < 2 or len(outputs) != 1 or any(len(t.shape) < 1 or not t.strides for t in (*tensors, *outputs)):
        return False
    a, b, out = *tensors[-2:], outputs[0]
    width = a.itemsize
    if a.dtype not in HALF and not (a.dtype == "float32" and graph.flags.get("allow_tf32")):
        return False
    each = MULTIPLE // width
    copied = [t for t in (a, b) if any(n % each for n in t.shape[-2:]) and not _written_for(t, producer)]
    if all(_rows(t) % each == 0 for t in (a, b, out)) or not _pays(a, b, copied):
        return False
    padded, copies = dict[int, int](), list[Op]()
    for t in dict.fromkeys((*tensors, out)):
        wide = _wider(t, each)
        if t in copied:
            padded[t.id], copy = _copy(builder, t, wide, op)
            copies.append(copy)
        else:
            padded[t.id] = builder.add_tensor(t.storage, wide.shape, t.dtype, t.offset, wide.strides)
    builder.replace(i, *copies, retarget(op, padded))
    return True


def _rows(t: Tensor) -> int:
    """Elements from the beginning of a row (or column) to that of the next."""
    return max(t.strides[-2:])


def _written_for(t: Tensor, producer: Mapping[int, Op]) -> bool:
    """Whether a tensor is made by work that can as well write it padded."""
    op = producer.get(t.storage)
    return op is not None and (sort_of(op) != "extern" or op.name in RULES)


def _pays(a: Tensor, b: Tensor, copied: Sequence[Tensor]) -> bool:
    """Whether the product is bound by arithmetic and takes longer than the copies."""
    (m, k), n, width = a.shape[-2:], b.shape[-1], a.itemsize
    work = m * n * k
    if not work or work / (m * k + k * n + m * n) <= BALANCE[width]:
        return False
    seconds = 2 * work * prod(a.shape[:-2]) / RATE[width]
    return seconds > 2 * sum(t.nbytes for t in copied) / BANDWIDTH


def _wider(t: Tensor, each: int) -> Tensor:
    """A tensor whose last two dimensions are filled up to multiples."""
    start = max(0, len(t.shape) - 2)
    shape = tuple(n if d < start or n == 1 else -(-n // each) * each for d, n in enumerate(t.shape))
    new = replace(t, shape=shape)
    return replace(new, strides=dense_strides(new))
