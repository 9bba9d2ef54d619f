"""torch.compile: forward and backward as Inductor would run them, the optimizer as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed

from msgspec.structs import replace

from presage.capture.variants import NotApplicable, Variant
from presage.graph.builder import map_tensors
from presage.graph.graph import Graph, Op, Ref
from presage.whatif.edits.edit import plain
from presage.whatif.edits.fusing.dataflow import Flow, Piece, inlined_pieces, saved_values, with_recompute
from presage.whatif.edits.fusing.externs import rewrite_externs
from presage.whatif.edits.fusing.grouping import KernelGroup, group_pieces
from presage.whatif.edits.fusing.lower import OUTSIDE, Lowering
from presage.whatif.edits.fusing.rebuild import ValuePlaces, fused_op, rebuild_graph, topological_order, values_to_write
from presage.whatif.edits.fusing.rules import lower_for_compile

ENGINE = "autograd::engine::evaluate_function: "
FORWARD, BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
WITHIN = {"main": (FORWARD,), "autograd": (ENGINE + BACKWARD, BACKWARD)}


def compiled(graph: Graph) -> Graph:
    """The step with its loss compiled (default mode: no CUDA graphs, no tuning of products)."""
    graph = rewrite_externs(graph, compile_regions)
    region = compile_regions(graph)
    low = lower_for_compile(graph, region)
    flow = _partitioned(low.flow, region, graph)
    live_out = _lasting(graph, low)
    found = inlined_pieces(flow, live_out)
    if not any(p.node.fuses for p in found):
        raise NotApplicable(
            "no elementwise work or reductions in a forward or backward pass, which a compiler would fuse"
        )
    together = {k: group_pieces([p for p in found if p.region == k], flow.values) for k in set(region) - {OUTSIDE}}
    for group in (g for some in together.values() for g in some):
        for v, (parts, results) in group.crossed.items():
            flow.values[v] = changed(flow.values[v], elements=parts * results)
    places = ValuePlaces(graph, flow)
    made = {k: _compiled(places, low, k, some, found, live_out) for k, some in together.items()}
    return rebuild_graph(graph, places, region, made)


def compile_regions(graph: Graph) -> list[int]:
    """The number of the region of ops that each is compiled in: a run of forward or of backward ops.

    What waits for the GPU ends a region, as do other streams and what is compiled already; what adds up gradients is
    no part of it, and runs after it.
    """
    out: list[int] = []
    number, where = -1, ("", "")
    for op in graph.ops:
        here: tuple[str, str] = (op.phase, op.thread)
        if op.within and op.within[0].endswith("AccumulateGrad"):
            out.append(OUTSIDE)
        elif op.phase not in ("forward", "backward") or _apart(op):
            out.append(OUTSIDE)
            where = ("", "")
        else:
            number += here != where
            where = here
            out.append(number)
    return out


def _apart(op: Op) -> bool:
    return op.sync or op.opaque or bool(op.stream or op.group) or op.within in WITHIN.values()


def _partitioned(flow: Flow, region: Sequence[int], graph: Graph) -> Flow:
    """Every backward region with what it computes again of the forward regions before it."""
    order = [k for k in dict.fromkeys(region) if k != OUTSIDE]
    thread = {k: op.thread for k, op in zip(region, graph.ops, strict=True)}
    forward: list[int] = []
    for before, k in zip([OUTSIDE, *order], order, strict=False):
        if thread[k] == "autograd":
            flow = with_recompute(flow, forward, k, saved_values(flow, forward, k).__contains__)
        elif thread.get(before) == "autograd":
            forward = [k]
        else:
            forward.append(k)
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


EDITS = (
    plain(
        "compile",
        "Forward and backward run as torch.compile's default mode (Inductor) would run them: elementwise work and "
        "reductions fused into one kernel each, products, convolutions and attention as they are (large products "
        "padded to multiples of 16 bytes, under autocast also backward in low precision); cheap values are computed "
        "again in the backward pass and not kept. The optimizer stays as it is. Shapes must not change.",
        compiled,
        caution="the first step compiles for minutes, and again where shapes change; graph breaks gain less",
        variant=Variant(traced=True),
    ),
)
