"""Fusion: by a compiler, or without one in chains of small ops of a module, which become one op forward and one or two
backward, as hand-written kernels do it (a norm made of small ops, GELU or SiLU times a gate, bias and activation,
dropout and residual).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from presage.capture.variants import NotApplicable, Variant
from presage.fusing.dataflow import Flow, Piece, inlined_pieces, with_recompute
from presage.fusing.grouping import Chain, find_chains, residuals, sum_residuals_first
from presage.fusing.inductor import INDUCTOR, compile_regions
from presage.fusing.inductor import compiled as as_inductor_runs_it
from presage.fusing.lower import OUTSIDE
from presage.fusing.rebuild import ValuePlaces, fused_op, values_to_write
from presage.fusing.rules import lower_op_by_op
from presage.graph.graph import Graph, Op, references, uses
from presage.whatif.edits.edit import plain

ENGINE = "autograd::engine::evaluate_function: "
BACKWARD = "FusedChainBackward"


def compiled(graph: Graph) -> Graph:
    """The step with its loss compiled (default mode: no CUDA graphs, no tuning of products)."""
    if any(INDUCTOR in op.compiled for op in graph.ops):
        raise NotApplicable("the code compiles the step already (torch.compile)")
    edited = as_inductor_runs_it(graph)
    if edited is graph:
        raise NotApplicable(
            "no elementwise work or reductions in a forward or backward pass, which a compiler would fuse"
        )
    return edited


def fused_chains(graph: Graph) -> Graph:
    """Chains of elementwise ops, and of sums along rows with what is done with them, as one op each."""
    region = compile_regions(graph)
    flow = lower_op_by_op(graph, region).flow
    unread = _unread(flow)
    flow, apart = sum_residuals_first(graph, flow, residuals(graph, flow))
    own = [Piece(n, k, n.reads, n.writes, (i,)) for i, (n, k) in enumerate(zip(flow.nodes, flow.region, strict=True))]
    flow = _again(flow, region, graph, _inner(flow, _chains(graph, flow, own, apart), apart))
    found = inlined_pieces(flow, unread, lambda n: flow.region[n] != region[flow.nodes[n].op])
    made = [c for c in _chains(graph, flow, found, apart) if len(c.ops) > 1 or any(len(p.inside) > 1 for p in c.pieces)]
    if not made:
        raise NotApplicable("no two elementwise ops in a row in one module, which one kernel could do")
    return _replaced(graph, flow, found, made)


def _chains(graph: Graph, flow: Flow, found: Sequence[Piece], apart: set[int]) -> list[Chain]:
    """The chains of every region."""
    by_region: dict[int, list[Piece]] = {}
    for p in found:
        by_region.setdefault(p.region, []).append(p)
    return [c for k, some in by_region.items() if k != OUTSIDE for c in find_chains(graph, flow, some, apart)]


def _unread(flow: Flow) -> set[int]:
    """Values that no op reads."""
    return {v for n in flow.nodes for v in n.writes} - {v for n in flow.nodes for v in n.reads}


def _inner(flow: Flow, chains: Sequence[Chain], apart: set[int]) -> set[int]:
    """Elementwise values that only chains read: a backward chain makes them again from what the forward one read."""
    at = {n: (c, flow.region[n]) for c, chain in enumerate(chains) for p in chain.pieces for n in p.inside}
    users, out = flow.users(), set[int]()
    for n, (c, k) in at.items():
        node = flow.nodes[n]
        if node.kind != "pointwise" or node.fixed or node.op in apart:
            continue
        for v in node.writes:
            readers = users.get(v, [])
            find_chains = all(
                flow.nodes[r].fuses and (flow.region[r] != k or at.get(r, (-1, 0))[0] == c) for r in readers
            )
            if readers and find_chains:
                out.add(v)
    return out


def _again(flow: Flow, region: Sequence[int], graph: Graph, inner: set[int]) -> Flow:
    order = [k for k in dict.fromkeys(region) if k != OUTSIDE]
    thread = {k: op.thread for k, op in zip(region, graph.ops, strict=True)}
    forward = [k for k in order if thread[k] == "main"]
    for k in order:
        if thread[k] == "autograd":
            flow = with_recompute(flow, forward, k, lambda v: v not in inner)
    return flow


def _replaced(graph: Graph, flow: Flow, found: Sequence[Piece], made: Sequence[Chain]) -> Graph:
    """The graph with an op for each chain, where its last op was."""
    places, changes = ValuePlaces(graph, flow), dict[int, list[Op]]()
    freed = {e.storage for e in graph.events if not e.allocates}
    live_out = {v for v, value in enumerate(flow.values) if value.storage >= 0 and value.storage not in freed}
    number = {id(p): i for i, p in enumerate(found)}
    groups = [chain.group([number[id(p)] for p in chain.pieces]) for chain in made]
    chosen = {m for group in groups for m in group.members}
    others = [p for i, p in enumerate(found) if i not in chosen]
    places.stays |= {v for p in others for v in (*p.reads, *p.writes)}
    wanted = values_to_write(groups, found, others, live_out)
    for chain, group, values in zip(made, groups, wanted, strict=True):
        changes.update((i, []) for i in chain.ops)
        last = chain.ops[-1]
        changes[last] = [_named(fused_op(places, group, found, values, graph.ops[last], "fused"))]
    changes |= {i: [] for i in _idle(graph, changes)}
    for position, ops in changes.items():
        places.builder.replace(position, *ops)
    return places.builder.build(prune=True, prompt=True)


def _named(op: Op) -> Op:
    return replace(op, within=(ENGINE + BACKWARD, BACKWARD) if op.thread == "autograd" else ())


def _idle(graph: Graph, changes: Mapping[int, Sequence[Op]]) -> list[int]:
    """Views and bookkeeping of memory that no op works on any more."""
    kept = [op for i, op in enumerate(graph.ops) if op.kernels and i not in changes]
    left = {s for op in kept for s in uses(graph, op)}
    for op in (op for ops in changes.values() for op in ops):
        known = [i for i in (*references(op.inputs), *op.outputs) if i < len(graph.tensors)]
        left |= {graph.tensors[i].storage for i in known}
    gone = {s for i in changes for s in uses(graph, graph.ops[i])} - left
    return [i for i, op in enumerate(graph.ops) if not op.kernels and i not in changes and uses(graph, op) & gone]


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
    plain(
        "fused_chains",
        "Chains of small ops in one module run as library kernels would run them: a norm or softmax written out as one "
        "kernel forward, in the backward pass one for the input and one for the sums of scale and shift; an activation "
        "and its gate, bias, dropout and residual as one each way. Only what a chain reads and sums of rows are kept.",
        fused_chains,
    ),
)
