"""torch.compile: a step, or the calls of compiled functions in it, as Inductor would run them.

Ops that ran in a call of a compiled function (and in its backward pass) say so: `Op.compiled` is how it was compiled
(`INDUCTOR`, `CUDA_GRAPHS`, both, or another backend's name), "#" and the number of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from presage.fusing.dataflow import Flow, Piece, inlined_pieces, saved_values, with_recompute
from presage.fusing.externs import rewrite_externs
from presage.fusing.grouping import KernelGroup, group_pieces
from presage.fusing.lower import OUTSIDE, Lowering
from presage.fusing.rebuild import ValuePlaces, fused_op, rebuild_graph, topological_order, values_to_write
from presage.fusing.rules import lower_for_compile
from presage.graph.builder import map_ops, map_tensors
from presage.graph.graph import Graph, Op, Ref

ENGINE = "autograd::engine::evaluate_function: "
FORWARD, BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
WITHIN = {"main": (FORWARD,), "autograd": (ENGINE + BACKWARD, BACKWARD)}


INDUCTOR, CUDA_GRAPHS = "inductor", "CUDA graphs"
Chosen: TypeAlias = Callable[[Op], bool]


def compiled(graph: Graph, chosen: Chosen | None = None) -> Graph:
    """The step with its loss, or the `chosen` ops, compiled (default mode: no CUDA graphs, no tuning of products).

    The graph itself where there is nothing to fuse.
    """
    regions = partial(compile_regions, chosen=chosen or _of_the_loss)
    before, graph = graph, rewrite_externs(graph, regions)
    region = regions(graph)
    low = lower_for_compile(graph, region)
    flow = _partitioned(low.flow, region, graph)
    live_out = _lasting(graph, low)
    found = inlined_pieces(flow, live_out)
    if not any(p.node.fuses for p in found):
        return before
    together = {k: group_pieces([p for p in found if p.region == k], flow.values) for k in set(region) - {OUTSIDE}}
    for group in (g for some in together.values() for g in some):
        for v, (parts, results) in group.crossed.items():
            flow.values[v] = changed(flow.values[v], elements=parts * results)
    places = ValuePlaces(graph, flow)
    made = {k: _compiled(places, low, k, some, found, live_out) for k, some in together.items()}
    return rebuild_graph(graph, places, region, made)


def as_compiled(graph: Graph) -> Graph:
    """The step with the calls of its compiled functions as their compiler has them run."""
    if any(INDUCTOR in op.compiled for op in graph.ops):
        graph = compiled(graph, lambda op: INDUCTOR in op.compiled)
    replayed = [i for i, op in enumerate(graph.ops) if CUDA_GRAPHS in op.compiled and not _waits(op)]
    return map_ops(graph, replayed, lambda _, op: replace(op, replayed=f"{op.compiled} {op.phase}"))


def compile_regions(graph: Graph, chosen: Chosen | None = None) -> list[int]:
    """The number of the region of ops that each is compiled in: a run of forward or of backward ops, of one call.

    What waits for the GPU ends a region, as do other streams and what is compiled already; what adds up gradients is
    no part of it, and runs after it.
    """
    chosen = chosen or _of_the_loss
    out: list[int] = []
    number, where = -1, ("", "", "")
    for op in graph.ops:
        here: tuple[str, str, str] = (op.phase, op.thread, op.compiled)
        if op.within and op.within[0].endswith("AccumulateGrad"):
            out.append(OUTSIDE)
        elif not chosen(op) or _apart(op):
            out.append(OUTSIDE)
            where = ("", "", "")
        else:
            number += here != where
            where = here
            out.append(number)
    return out


def _of_the_loss(op: Op) -> bool:
    return op.phase in ("forward", "backward")


def _waits(op: Op) -> bool:
    return op.sync or op.opaque


def _apart(op: Op) -> bool:
    return _waits(op) or bool(op.stream or op.group) or op.within in WITHIN.values()


def _partitioned(flow: Flow, region: Sequence[int], graph: Graph) -> Flow:
    """Every backward region with what it computes again of the forward regions before it, of the same call."""
    order = [k for k in dict.fromkeys(region) if k != OUTSIDE]
    first = dict(reversed(list(zip(region, graph.ops, strict=True))))
    forward: dict[str, list[int]] = {}
    last: dict[str, str] = {}  # by call the thread of its last region
    for k in order:
        call, thread = first[k].compiled, first[k].thread
        if thread == "autograd":
            own = forward.get(call, [])
            flow = with_recompute(flow, own, k, saved_values(flow, own, k).__contains__)
        elif last.get(call) == "autograd":
            forward[call] = [k]
        else:
            forward.setdefault(call, []).append(k)
        last[call] = thread
    return flow


def _lasting(graph: Graph, low: Lowering) -> set[int]:
    """Values that are there when the step ends, and those of the forward pass that nobody reads but that outlast it:
    its results. What is freed before that is not computed."""
    freed = {e.storage: e.op for e in graph.events if not e.allocates}
    ends = {k: i for i, k in enumerate(low.region)}
    read = {v for node in low.flow.nodes for v in node.reads}
    results = set[int]()
    for node, k in zip(low.flow.nodes, low.flow.region, strict=True):
        if graph.ops[node.op].phase == "forward":
            own = [v for v in node.writes if v not in read and low.flow.values[v].tensor >= 0]
            results |= {v for v in own if freed.get(low.flow.values[v].storage, 1 << 62) > ends[k]}
    return results | {v for s, v in low.now.items() if s not in freed}


def _compiled(
    places: ValuePlaces, low: Lowering, k: int, together: list[KernelGroup], found: list[Piece], live_out: set[int]
) -> list[tuple[Op, int]]:
    """The ops of region `k`, with the places of those that run as they are."""
    ops, own = places.graph.ops, [p for p in found if p.region == k]
    producers = {v: g for g, group in enumerate(together) for v in group.writes}
    crossed = {v: parts for group in together for v, parts in group.crossed.items()}
    wanted = values_to_write(together, own, [p for p in found if p.region != k], live_out)
    sequence = max((ops[p.node.op].sequence for p in own), default=-1)
    phase, thread = next((op.phase, op.thread) for op, number in zip(ops, low.region, strict=True) if number == k)
    out: list[tuple[Op, int]] = []
    for g in topological_order(together, producers):
        first, at = together[g].nodes[0], -1
        if not first.fuses:
            op, at = _extern(places, low, first.op), first.op
        elif len(together[g].nodes) == 1 and first.reads and set(first.reads) <= crossed.keys():
            op = _summed(places, ops[first.op], first.reads[0], crossed[first.reads[0]], first.writes)
        else:
            like = ops[max(together[g].nodes, key=lambda n: n.elements).op]
            op = fused_op(places, together[g], own, wanted[g], like, "triton")
        out.append((replace(op, phase=phase, thread=thread, within=WITHIN[thread], sequence=sequence), at))
    return out


def _summed(places: ValuePlaces, like: Op, v: int, parts: tuple[int, int], writes: Sequence[int]) -> Op:
    """The sum of the parts that a kernel with sums both ways leaves: PyTorch's own op."""
    source = places.shaped(v, parts)
    return replace(
        like, name="aten::sum", overload="dim_IntList", inputs=(Ref(source), [0], False, None), writes=(),
        outputs=tuple(places.whole(w) for w in writes), names=("self", "dim", "keepdim", "dtype"),
    )  # fmt: skip


def _extern(places: ValuePlaces, low: Lowering, at: int) -> Op:
    """An op that runs as it is, on the tensors as they are now."""
    op, read, written = places.graph.ops[at], low.held[at], low.left[at]

    def tensor(i: int) -> int:
        t = places.graph.tensors[i]
        return places.view(t, written.get(t.storage) if i in op.writes or i in op.outputs else read.get(i))

    return map_tensors(op, tensor)
