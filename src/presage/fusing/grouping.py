"""Which pieces share a kernel: those that read the same values, or what the other wrote, over the same loops.

As Inductor's scheduler: the best partner first, by the bytes that need not be moved twice; never across something that
runs as it is, never so that two kernels would wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from presage.fusing.dataflow import SMS, Flow, Node, Piece, Value
from presage.fusing.lower import RANDOM
from presage.graph.graph import Graph, Op

MOST, FAR = 64, 64  # pieces in a kernel; pieces between two that only read the same

CROSSED, ROWS, LONGEST = 5 << 20, 4096, 16384  # elements, rows and columns for sums both ways in one kernel


@dataclass
class KernelGroup:
    """The pieces that are fused into one kernel."""

    members: list[int]
    nodes: list[Node]
    reads: set[int]
    writes: set[int]
    above: int = 0  # the groups it waits for, as bits
    slices: set[tuple[int, int]] = field(default_factory=set)
    scattered: set[int] = field(default_factory=set)  # what cannot be read before the kernel ends

    @property
    def crossed(self) -> dict[int, tuple[int, int]]:
        """Parts of sums down columns that are made with sums along rows: how many parts, of how many results."""
        along = self.loops
        if along is None or along.partial:
            return {}
        each = min(128, max(16, 1 << max(0, (along.rows // (8 * SMS)).bit_length() - 1)))
        return {v: (-(-along.rows // each), n.results) for n in self.nodes if n.partial for v in n.writes}

    @property
    def loops(self) -> Node | None:
        """The reduction whose loops it runs in."""
        found = [n for n in self.nodes if n.kind == "reduction"]
        return next((n for n in found if not n.partial), found[0]) if found else None


def group_pieces(found: Sequence[Piece], values: Sequence[Value]) -> list[KernelGroup]:
    """The pieces of one region in groups."""
    out: list[KernelGroup] = []
    producer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for place, piece in enumerate(found):
        needs = {producer[v] for v in piece.reads if v in producer}
        chosen = _partner(out, place, piece, needs, readers, values)
        if chosen is None:
            chosen = len(out)
            out.append(KernelGroup([], [], set(), set()))
        _join(out, chosen, place, piece, needs)
        for v in piece.reads:
            readers.setdefault(v, set()).add(chosen)
        for v in piece.writes:
            producer[v] = chosen
        for d in needs - {chosen}:
            _absorb(out, chosen, d, found, readers, producer)
    return [group for group in out if group.members]


def _absorb(
    out: Sequence[KernelGroup],
    chosen: int,
    source: int,
    found: Sequence[Piece],
    readers: Mapping[int, set[int]],
    producer: dict[int, int],
) -> None:
    """A kernel that reads nothing (random numbers, constants) becomes part of the only one that has read from it."""
    group, into = out[source], out[chosen]
    used = set[int]().union(*(readers.get(v, ()) for v in group.writes))
    if group.reads or used != {chosen} or len(into.members) + len(group.members) > MOST:
        return
    if not all(fits(into, found[m]) for m in group.members):
        return
    into.members = sorted(into.members + group.members)
    into.nodes = [found[m].node for m in into.members]
    into.writes |= group.writes
    producer.update(dict.fromkeys(group.writes, chosen))
    out[source].members, out[source].nodes, out[source].writes = [], [], set()


def _partner(
    out: Sequence[KernelGroup],
    place: int,
    piece: Piece,
    needs: set[int],
    readers: dict[int, set[int]],
    values: Sequence[Value],
) -> int | None:
    if not piece.node.fuses:
        return None
    candidates = needs.union(*(readers.get(v, ()) for v in piece.reads))
    best, most = None, 0
    for g in sorted(candidates):
        group = out[g]
        if not fits(group, piece) or (g not in needs and place - group.members[-1] > FAR):
            continue
        if any(out[d].above >> g & 1 for d in needs if d != g):
            continue
        score = sum(_touched(piece, values[v]) for v in piece.reads if _shared(group, piece, v))
        if score >= most and score > 0:
            best, most = g, score
    return best


def _shared(group: KernelGroup, piece: Piece, v: int) -> bool:
    """Whether both work on the same of a value, and not on different parts of it."""
    own, theirs = ({start for w, start in s if w == v} for s in (piece.slices, group.slices))
    return v in group.writes or (v in group.reads and (not own or not theirs or bool(own & theirs)))


def _touched(piece: Piece, value: Value) -> int:
    """Bytes of a value that a piece works on."""
    return min(value.nbytes, piece.node.elements * value.width)


def fits(group: KernelGroup, piece: Piece) -> bool:
    """Whether a piece can run in a group's loops."""
    node = piece.node
    if (
        node.alone
        or not all(n.fuses and not n.alone for n in group.nodes)
        or len(group.members) >= MOST
        or group.scattered & set(piece.reads)
    ):
        return False
    loops = group.loops
    if node.kind == "reduction":
        if loops is not None and _crossed(group, loops, piece):
            return True
        if loops is not None:
            return (loops.rows, loops.columns, loops.down) == (node.rows, node.columns, node.down)
        return all(_inside(node, n) for n in group.nodes)
    if loops is not None:
        return _inside(loops, node)
    return group.nodes[0].elements == node.elements


def _inside(loops: Node, node: Node) -> bool:
    """Whether elementwise work has the loops of a reduction, or those of its results."""
    if loops.partial and loops.down:
        return False
    return node.elements in (loops.elements, loops.rows)


def _crossed(group: KernelGroup, along: Node, piece: Piece) -> bool:
    """Whether a sum down the columns can be made with one along the rows: of what both read, not of its results."""
    node = piece.node
    rows, columns = along.rows, along.columns
    if along.partial or along.down or not (node.partial and node.down) or group.writes & set(piece.reads):
        return False
    if (columns, rows * columns) != (node.results, node.elements):
        return False
    return rows * columns >= CROSSED and rows >= max(2 * columns, ROWS) and columns <= LONGEST


def _join(out: list[KernelGroup], chosen: int, place: int, piece: Piece, needs: set[int]) -> None:
    group = out[chosen]
    group.members.append(place)
    group.nodes.append(piece.node)
    group.reads |= set(piece.reads)
    group.writes |= set(piece.writes)
    group.slices |= piece.slices
    if piece.node.kind == "scatter":
        group.scattered |= set(piece.writes)
    new = 0
    for d in needs - {chosen}:
        new |= out[d].above | 1 << d
    if new & ~group.above:
        group.above |= new
        for other in out:
            if other.above >> chosen & 1:
                other.above |= group.above


# ---- Which ops a hand-written kernel fuses: a norm with its reductions, an activation, dropout and residual.


@dataclass(frozen=True)
class Chain:
    """Pieces that are fused into one op."""

    pieces: tuple[Piece, ...]

    @property
    def ops(self) -> list[int]:
        return sorted({i for p in self.pieces for i in (p.node.op, *p.node.also)})

    def group(self, members: list[int]) -> KernelGroup:
        """The chain as a kernel, its pieces being at these places."""
        reads = {v for p in self.pieces for v in p.reads}
        return KernelGroup(members, [p.node for p in self.pieces], reads, {v for p in self.pieces for v in p.writes})


def residuals(graph: Graph, flow: Flow) -> set[int]:
    """The ops that add up two whole tensors with unlike numbers of products behind them."""
    behind: dict[int, int] = {}
    out = set[int]()
    for node in flow.nodes:
        found = [(behind.get(v, 0), flow.values[v].elements) for v in node.reads]
        whole = {n for n, elements in found if elements >= node.elements}
        if node.kind == "pointwise" and graph.ops[node.op].name in ("aten::add", "aten::add_") and len(whole) > 1:
            out.add(node.op)
        deepest = max((n for n, _ in found), default=0) + (not node.fuses)
        behind.update((v, deepest) for v in node.writes)
    return out


def sum_residuals_first(graph: Graph, flow: Flow, apart: set[int]) -> tuple[Flow, set[int]]:
    """The flow in which what is added to a residual one by one is added up first, by what makes the last of it: a
    gradient that comes back in several parts from one norm. Then only the last sum is a residual: the set of these."""
    users, producers = flow.users(), flow.producers()
    nodes: list[Node | None] = list(flow.nodes)
    for n, node in enumerate(flow.nodes):
        if node.op not in apart or graph.ops[node.op].name != "aten::add_" or nodes[n] is not node:
            continue
        run = _run(graph, flow, n, users)
        before, parts = node.reads[0], [flow.nodes[m].reads[1] for m in run]
        producer = producers.get(parts[-1], -1)
        if len(run) < 2 or not _last(flow, parts, producers, users):
            continue
        ops = tuple(flow.nodes[m].op for m in run[:-1])
        of, end = flow.nodes[producer], flow.nodes[run[-1]]
        nodes[producer] = replace(of, reads=(*of.reads, *parts[:-1]), also=ops)
        nodes[run[-1]] = replace(end, reads=(before, parts[-1]))
        apart = apart - {*ops} | {end.op}
        for m in run[:-1]:
            nodes[m] = None
    out = Flow(flow.values, stored=flow.stored, into=flow.into)
    for some, k in zip(nodes, flow.region, strict=True):
        if some is not None:
            out.add(some, k)
    return out, apart


def _run(graph: Graph, flow: Flow, n: int, users: Mapping[int, list[int]]) -> list[int]:
    """The sums in place that follow a sum, each the only one to read what the one before has made."""
    run = [n]
    while len(flow.nodes[run[-1]].reads) == 2:
        node = flow.nodes[run[-1]]
        after = users.get(node.writes[0], [])
        if len(after) != 1 or graph.ops[flow.nodes[after[0]].op].name != "aten::add_":
            return run
        if flow.nodes[after[0]].reads[0] != node.writes[0] or flow.region[after[0]] != flow.region[n]:
            return run
        if len(flow.nodes[after[0]].reads) != 2 or flow.nodes[after[0]].elements != node.elements:
            return run
        run.append(after[0])
    return [n]


def _last(flow: Flow, parts: Sequence[int], producers: Mapping[int, int], users: Mapping[int, list[int]]) -> bool:
    """Whether the last part is elementwise work, made after the others and for nothing else."""
    if any(v not in producers for v in parts) or len(set(parts)) < len(parts):
        return False
    node = flow.nodes[producers[parts[-1]]]
    same = all(flow.values[v].elements == node.elements for v in parts)
    return (
        node.kind == "pointwise"
        and same
        and len(users[parts[-1]]) == 1
        and producers[parts[-1]] == max(producers[v] for v in parts)
    )


def find_chains(graph: Graph, flow: Flow, found: Sequence[Piece], apart: set[int]) -> list[Chain]:
    """The chains among the pieces of a region, of one piece or more, in order. `apart`: ops that are residuals."""
    return _Joining(graph, flow, found, apart).chains()


class _Joining:
    """Pieces are joined one by one with what made what they read."""

    def __init__(self, graph: Graph, flow: Flow, found: Sequence[Piece], apart: set[int]) -> None:
        self.graph, self.values, self.found, self.apart = graph, flow.values, found, apart
        self.of = list(range(len(found)))  # the chain of each piece
        self.members = {i: [i] for i, p in enumerate(found) if p.node.fuses}
        self.producer = {v: i for i, p in enumerate(found) for v in p.writes}
        self.users: dict[int, list[int]] = {}
        for i, p in enumerate(found):
            for v in p.reads:
                self.users.setdefault(v, []).append(i)
        self.summed = [self._only_summed(p) for p in found]

    def chains(self) -> list[Chain]:
        for i in self.members.copy():
            for v in self.found[i].reads:
                if v in self.producer and self._follows(self.producer[v], i):
                    self._join(self.producer[v], i)
            self._join_siblings(i)
        return [Chain(tuple(self.found[i] for i in sorted(m))) for m in self.members.values()]

    def _only_summed(self, piece: Piece) -> bool:
        """Whether a piece is a sum down columns, or all that reads it is."""
        if piece.node.down:
            return True
        users = [self.found[i].node for v in piece.writes for i in self.users.get(v, ())]
        return bool(users) and all(n.down for n in users)

    def _follows(self, first: int, then: int) -> bool:
        """Whether one kernel may do both, as far as the two are concerned."""
        a, b = (self.found[i].node for i in (first, then))
        if not a.fuses or self.summed[first] != self.summed[then] or a.down:
            return False
        ops = self.graph.ops
        if b.op in self.apart and not RANDOM.search(ops[a.op].name):
            return False
        return a.op not in self.apart and near(ops[a.op], ops[b.op])

    def _join_siblings(self, i: int) -> None:
        """Sums down columns of one module that read the same."""
        piece, ops = self.found[i], self.graph.ops
        for v in self._reads(i) if piece.node.down else ():
            if self.values[v].elements != piece.node.elements:
                continue
            for other in [m for k in self.users[v] for m in self._downward(k) if m < i]:
                if ops[self.found[other].node.op].module == ops[piece.node.op].module:
                    self._join(other, i)

    def _downward(self, k: int) -> list[int]:
        """The sums down columns in the chain of a piece."""
        return [m for m in self.members.get(self.of[k], ()) if self.found[m].node.down]

    def _reads(self, i: int) -> set[int]:
        return {v for m in self.members[self.of[i]] for v in self.found[m].reads}

    def _join(self, first: int, then: int) -> None:
        a, b = self.of[first], self.of[then]
        both = self.members[a] + self.members[b] if a != b else []
        if not both or not _same_loops([self.found[i].node for i in both]) or not self._at_once(both):
            return
        self.members[a] = both
        del self.members[b]
        for i in both:
            self.of[i] = a

    def _at_once(self, members: Sequence[int]) -> bool:
        """Whether they can all run where the last of them runs: nothing else has used what they make by then."""
        own, last = set(members), max(self.found[i].node.op for i in members)
        made = {v for i in members for v in self.found[i].writes}
        users = {k for v in made for k in self.users.get(v, ())} - own
        if any(self.found[k].node.op <= last for k in users):
            return False
        return self._undisturbed(members, last)

    def _undisturbed(self, members: Sequence[int], last: int) -> bool:
        """Whether what they read is there until then, and of what they write in place only the last is read."""
        ops, tensors = self.graph.ops, self.graph.tensors
        own = {op for i in members for op in (self.found[i].node.op, *self.found[i].node.also)}
        held = {self.values[v].storage for i in members for v in self.found[i].reads}
        for i in range(min(own), last):
            if i not in own and ops[i].writes and held & {tensors[t].storage for t in ops[i].writes}:
                return False
        final: dict[int, int] = {}
        made = [v for i in sorted(members) for v in self.found[i].writes]
        for v in made:
            final[self.values[v].storage if self.values[v].storage >= 0 else -2 - v] = v
        passing = set(made) - set(final.values())
        return all(k in members for v in passing for k in self.users.get(v, ()))


def near(a: Op, b: Op) -> bool:
    """Whether two ops belong to one module, or to parts of one; casts and copies stay with their own."""
    if a.module == b.module:
        return True
    if "copy_" in a.name or "copy_" in b.name:
        return False
    over = [m.rpartition(".")[0] for m in (a.module, b.module)]
    return over[0] == over[1] or a.module == over[1] or b.module == over[0]


def _same_loops(nodes: Sequence[Node]) -> bool:
    """Whether all go over the same rows: element by element, or sums of them one way, or work on the sums."""
    sums = {(n.rows, n.columns, n.down) for n in nodes if n.kind == "reduction"}
    sizes = {n.elements for n in nodes if n.kind != "reduction"}
    if len(sums) > 1 or any(n.alone or n.kind == "scatter" for n in nodes):
        return False
    if not sums:
        return len(sizes) == 1
    rows, columns, down = sums.pop()
    return sizes <= ({rows * columns} if down else {rows * columns, rows})
