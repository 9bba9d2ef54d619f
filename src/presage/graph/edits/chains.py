"""Fused chains, without a compiler: elementwise work of one module as one op forward and one backward, as hand-written
kernels do it (a norm made of small ops, GELU or SiLU times a gate, bias and activation, dropout and residual).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.check import uses
from presage.graph.edit import replace_ops, spans
from presage.graph.edits.compile import stretches
from presage.graph.edits.edit import NotApplicable, plain
from presage.graph.edits.fusing.cut import recomputed
from presage.graph.edits.fusing.flow import Flow
from presage.graph.edits.fusing.group import Group, groups
from presage.graph.edits.fusing.inline import Piece, pieces
from presage.graph.edits.fusing.lower import OUTSIDE
from presage.graph.edits.fusing.rebuild import Places, fused_op
from presage.graph.edits.fusing.rules import plainly
from presage.graph.graph import Event, Graph, Op

__all__ = ["EDITS", "fused_chains"]

ENGINE = "autograd::engine::evaluate_function: "
BACKWARD = "FusedChainBackward"


def fused_chains(graph: Graph) -> Graph:
    """Chains of elementwise ops, and of sums along rows with what is done with them, as one op each."""
    stretch = stretches(graph)
    low = plainly(graph, stretch)
    chains = [c for k in set(stretch) - {OUTSIDE} for c in _chains(graph, low.flow, k)]
    inner = _inner(low.flow, chains)
    flow = _again(low.flow, stretch, graph, inner)
    found = pieces(flow, set(), lambda n: flow.stretch[n] != stretch[flow.nodes[n].op])
    made = [c for k in set(stretch) - {OUTSIDE} for c in _fused(graph, flow, [p for p in found if p.stretch == k])]
    if not made:
        raise NotApplicable("no two elementwise ops in a row in one module, which one kernel could do")
    return _replaced(graph, flow, found, made)


@dataclass(frozen=True)
class _Chain:
    """Pieces that become one op."""

    group: Group
    pieces: tuple[Piece, ...]

    @property
    def ops(self) -> list[int]:
        return sorted({p.node.op for p in self.pieces})


def _chains(graph: Graph, flow: Flow, k: int) -> list[_Chain]:
    """The chains of a stretch, of ops as they are."""
    own = [Piece(n, k, n.reads, n.writes, (i,)) for i, n in enumerate(flow.nodes) if flow.stretch[i] == k]
    return _fused(graph, flow, own)


def _fused(graph: Graph, flow: Flow, found: Sequence[Piece]) -> list[_Chain]:
    users = flow.users()
    together = groups(found, flow.values, _follows(graph, flow, users))
    out = [_Chain(g, tuple(found[m] for m in g.members)) for g in together if g.nodes[0].fuses]
    out = [c for c in out if len(c.ops) > 1 or any(len(p.inside) > 1 for p in c.pieces)]
    return [c for c in out if _sound(graph, flow, c)]


def _follows(graph: Graph, flow: Flow, users: dict[int, list[int]]) -> Callable[[Group, Piece], bool]:
    """Whether an op goes on with what a chain made: in its module or one beside it, before others have used it."""

    def may(group: Group, piece: Piece) -> bool:
        op, last = graph.ops[piece.node.op], graph.ops[group.nodes[-1].op]
        if not group.writes & set(piece.reads) or not _near(op, last):
            return False
        members = {n.op for n in group.nodes}
        early = [n for v in group.writes for n in users.get(v, ()) if flow.nodes[n].op < piece.node.op]
        return all(flow.nodes[n].op in members for n in early)

    return may


def _near(a: Op, b: Op) -> bool:
    """Whether two ops belong to one module, or to parts of one; casts and copies stay with their own."""
    if a.module == b.module:
        return True
    if "copy_" in a.name or "copy_" in b.name:
        return False
    over = [m.rpartition(".")[0] for m in (a.module, b.module)]
    return over[0] == over[1] or a.module == over[1] or b.module == over[0]


def _sound(graph: Graph, flow: Flow, chain: _Chain) -> bool:
    """Whether the chain can run where its last op ran: what it reads is still there, what it writes is the last."""
    first, last = chain.ops[0], chain.ops[-1]
    mine = set(chain.ops)
    held = {flow.values[v].storage for p in chain.pieces for v in p.reads}
    made = [v for p in chain.pieces for v in p.writes]
    for i in range(first, last):
        if i not in mine and held & {graph.tensors[t].storage for t in graph.ops[i].writes}:
            return False
    storages = [flow.values[v].storage for v in made]
    return len(storages) == len(set(storages)) or all(v not in _read_beyond(flow, chain) for v in made[:-1])


def _read_beyond(flow: Flow, chain: _Chain) -> set[int]:
    """Values of a chain that something outside it reads."""
    inside = {n for p in chain.pieces for n in p.inside}
    return {v for i, node in enumerate(flow.nodes) if i not in inside for v in node.reads}


def _inner(flow: Flow, chains: Sequence[_Chain]) -> set[int]:
    """Elementwise values that only chains read: a backward chain makes them again from what the forward one read."""
    at = {n: (c, flow.stretch[n]) for c, chain in enumerate(chains) for p in chain.pieces for n in p.inside}
    users, out = flow.users(), set[int]()
    for n, (c, k) in at.items():
        node = flow.nodes[n]
        for v in node.writes:
            readers = users.get(v, [])
            chained = all(flow.nodes[r].fuses and (flow.stretch[r] != k or at.get(r, (-1, 0))[0] == c) for r in readers)
            if node.kind == "pointwise" and not node.fixed and readers and chained:
                out.add(v)
    return out


def _again(flow: Flow, stretch: Sequence[int], graph: Graph, inner: set[int]) -> Flow:
    order = [k for k in dict.fromkeys(stretch) if k != OUTSIDE]
    thread = {k: op.thread for k, op in zip(stretch, graph.ops, strict=True)}
    forward = [k for k in order if thread[k] == "main"]
    for k in order:
        if thread[k] == "autograd":
            flow = recomputed(flow, forward, k, lambda v: v not in inner)
    return flow


def _replaced(graph: Graph, flow: Flow, found: Sequence[Piece], made: Sequence[_Chain]) -> Graph:
    """The graph with an op for each chain, where its last op was."""
    places, changes = Places(graph, flow), dict[int, list[Op]]()
    freed = {e.storage for e in graph.events if not e.allocates}
    lasting = {v for v, value in enumerate(flow.values) if value.storage >= 0 and value.storage not in freed}
    readers: dict[int, set[int]] = {}
    for p in found:
        for v in p.reads:
            readers.setdefault(v, set()).add(id(p))
    for chain in made:
        mine = set(map(id, chain.pieces))
        wanted = {v for v in chain.group.writes if v in lasting or readers.get(v, set()) - mine}
        local = Group([*range(len(chain.pieces))], chain.group.nodes, chain.group.reads, chain.group.writes)
        like = graph.ops[chain.ops[-1]]
        kind = "pointwise" if local.loops is None else "reduction"
        changes.update((i, []) for i in chain.ops)
        changes[chain.ops[-1]] = [_named(fused_op(places, local, chain.pieces, wanted, like, f"fused::{kind}"))]
    changes |= {i: [] for i in _idle(graph, changes)}
    ops = tuple(new for i, op in enumerate(graph.ops) for new in changes.get(i, [op]))
    whole = replace(graph, ops=ops, tensors=tuple(places.tensors), storages=tuple(places.storages), events=())
    events = _events(graph, whole, changes)
    gone = {e.storage for e in graph.events if e.allocates} - {e.storage for e in events if e.allocates}
    return replace_ops(replace(whole, events=events), {}, dropped=gone)


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


def _events(old: Graph, new: Graph, changes: Mapping[int, Sequence[Op]]) -> tuple[Event, ...]:
    """Memory is there as before; what came just before its first use or went just after its last does so again."""
    at = list(accumulate((len(changes.get(i, (op,))) for i, op in enumerate(old.ops)), initial=0))
    (first, last), (begun, ended) = spans(new), spans(old)
    out = []
    for e in old.events:
        s = e.storage
        used = s in first or s not in begun
        prompt = e.op == (begun.get(s) if e.allocates else ended.get(s, -2) + 1)
        place = at[e.op] if not (prompt and s in first) else first[s] if e.allocates else last[s] + 1
        if used and (s in begun or not e.allocates or changes.get(e.op, True)):
            out.append(replace(e, op=place))
    for storage in new.storages[len(old.storages) :]:
        if storage.id in first:
            out += [Event(first[storage.id], storage.id, True), Event(last[storage.id] + 1, storage.id, False)]
    lives = {e.storage for e in out if e.allocates} | {s.id for s in old.storages} - {
        e.storage for e in old.events if e.allocates
    }
    return tuple(sorted((e for e in out if e.storage in lives), key=lambda e: e.op))


EDITS = (
    plain(
        "fused_chains",
        "Chains of elementwise ops of one module (a norm of small ops, an activation and its gate, bias, dropout and "
        "residual) run as one kernel forward and one backward, as hand-written kernels do; what lies between is "
        "neither written nor kept.",
        fused_chains,
    ),
)
