"""Flow: a graph in SSA form, values that are written once and nodes that produce them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Literal, TypeAlias

import numpy as np

Kind: TypeAlias = Literal["pointwise", "reduction", "scatter", "extern", "outside"]
Function: TypeAlias = Literal["", "random", "erf", "exp"]


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of a storage from one write to the next, or an intermediate without a tensor (row statistics)."""

    elements: int
    width: int  # bytes an element
    tensor: int = -1  # place in Graph.tensors of the tensor that was written; -1 where there is none
    storage: int = -1

    @property
    def nbytes(self) -> int:
        return self.elements * self.width


@dataclass(frozen=True, slots=True)
class Node:
    """Work on `rows` x `columns` elements: a reduction gives one result a row, other kinds one an element.

    Kinds: extern nodes are library kernels (GEMMs, convolutions); those outside are not part of a compiled region.
    """

    kind: Kind
    op: int  # place of the op it comes from
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    rows: int = 1
    columns: int = 1
    partial: bool = False  # the first kernel of a split reduction
    down: bool = False  # reduces over the slow dimension: neighbours in memory belong to different results
    fixed: bool = False  # never computed a second time
    function: Function = ""  # the costly function it evaluates for each element
    alone: bool = False  # is not fused with others
    turned: bool = False  # writes in another order than it reads
    slices: frozenset[tuple[int, int]] = frozenset()  # of values it reads a part of: which, and from where on
    also: tuple[int, ...] = ()  # places of further ops whose work it does
    results: int = 0  # of the first half of a reduction, how many results the whole has

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def fuses(self) -> bool:
        return self.kind in ("pointwise", "reduction", "scatter")


@dataclass
class Flow:
    """Nodes in program order. `region` gives the compiled region of each node: ops that are compiled as one graph."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)  # values that are written, whoever reads them
    into: dict[int, int] = field(default_factory=dict)  # values that become others in place

    def value(self, elements: int, width: int, tensor: int = -1, storage: int = -1) -> int:
        self.values.append(Value(elements, width, tensor, storage))
        return len(self.values) - 1

    def add(self, node: Node, region: int) -> None:
        self.nodes.append(node)
        self.region.append(region)

    def producers(self) -> dict[int, int]:
        """The node that produces each value."""
        return {v: i for i, node in enumerate(self.nodes) for v in node.writes}

    def users(self) -> dict[int, list[int]]:
        """The nodes that read each value, in order."""
        out: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys(node.reads):
                out.setdefault(v, []).append(i)
        return out

    def copy(self, node: Node, writes: Iterable[int], reads: Iterable[int], region: int) -> None:
        """The node once more, with other values, in another region."""
        self.add(replace(node, writes=tuple(writes), reads=tuple(reads)), region)


# ---- Which values a compiler writes to memory; elementwise ones in between are inlined into what reads them.

SHARED, MANY = 4, 8  # values read, by something that is read more than once and by anything, above which it is written


@dataclass(frozen=True, slots=True)
class Piece:
    """A node whose results are written to memory, with all that it reads from memory, inlined nodes included."""

    node: Node
    region: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: tuple[int, ...]  # places of the nodes it computes
    slices: frozenset[tuple[int, int]] = frozenset()  # of values that are only read in part: which, from where on


def inlined_pieces(
    flow: Flow, live_out: Collection[int], passing: Callable[[int], bool] = lambda _: True
) -> list[Piece]:
    """The pieces in order. `live_out`: values that are there after the step; `passing`: nodes that need not write."""
    users = flow.users()
    alive = _alive(flow, live_out)
    leaves: dict[int, tuple[int, ...]] = {}  # of values that are not written, what they are computed from,
    nodes: dict[int, tuple[int, ...]] = {}  # and by which nodes
    out = []
    for i, (node, region) in enumerate(zip(flow.nodes, flow.region, strict=True)):
        if i not in alive:
            continue
        reads = tuple(dict.fromkeys(r for v in node.reads for r in leaves.get(v, (v,))))
        inside = (i, *dict.fromkeys(n for v in node.reads for n in nodes.get(v, ())))
        writes = node.writes
        if node.kind == "pointwise" and passing(i):
            writes = tuple(v for v in writes if _written(flow, v, region, users.get(v, []), len(reads), live_out))
            leaves.update((v, reads) for v in node.writes if v not in writes)
            nodes.update((v, inside) for v in node.writes if v not in writes)
        if writes or not node.fuses:
            slices = frozenset[tuple[int, int]]().union(*(flow.nodes[n].slices for n in inside))
            out.append(Piece(node, region, reads, writes, inside, slices))
    return out


def _written(flow: Flow, v: int, region: int, users: list[int], reads: int, live_out: Collection[int]) -> bool:
    if v in live_out or v in flow.stored or any(not flow.nodes[n].fuses or flow.region[n] != region for n in users):
        return True
    return (len(users) > 1 and reads > SHARED) or reads > MANY


def _alive(flow: Flow, live_out: Collection[int]) -> set[int]:
    """Nodes whose results are used."""
    wanted, out = set(live_out), set[int]()
    for i in range(len(flow.nodes) - 1, -1, -1):
        node = flow.nodes[i]
        if not node.fuses or any(v in wanted for v in node.writes):
            out.add(i)
            wanted.update(node.reads)
    return out


# ---- When a reduction takes two kernels: too few results to keep a GPU busy, each of many elements.

SMS, THREADS = 132, 2048
LEAST, MOST = 32, 512  # elements a thread
ACROSS, DOWN = 256, 4  # threads that share a result: along a row, down a column
SHORT = 8192  # a row so long is one block's work


def reduction_splits(rows: int, columns: int, down: bool) -> int:
    """Into how many parts each result's elements are cut; 1: one kernel does it all."""
    if columns <= LEAST or rows >= SMS * 2 * 32:
        return 1
    if not down and (rows >= 2 * SMS or columns <= SHORT):
        return 1
    return max(1, ceil(columns / ((DOWN if down else ACROSS) * _each(rows, columns, down))))


def _each(rows: int, columns: int, down: bool) -> int:
    """Elements that one thread takes."""
    if rows * columns < LEAST * SMS * THREADS:
        return LEAST
    if rows * columns >= MOST * SMS * THREADS:
        return MOST
    blocks = SMS * THREADS // ACROSS
    if down:
        return max(LEAST, ceil(columns / (DOWN * ceil(blocks / ceil(rows / 128)))))
    return max(LEAST, ceil(columns / (ACROSS * ceil(blocks / 2 / rows))))


# ---- What the forward pass keeps for the backward pass: as few bytes as will do, the rest is computed again.

NEARER = 1.1  # a value one step further from the backward pass counts so much more
FARTHEST = 100
SHRINKS = 4  # a sum of so many is kept
ROOM = 2**28


@dataclass
class _Passes:
    """A flow with its forward regions and the backward region that follows them."""

    flow: Flow
    forward: Collection[int]
    backward: int

    def __post_init__(self) -> None:
        region = self.flow.region
        self.begins = next((n for n, k in enumerate(region) if k == self.backward), len(region))
        self.producers = {v: n for v, n in self.flow.producers().items() if region[n] in self.forward}
        self.uses: dict[int, list[int]] = {}  # in the forward pass
        self.later: dict[int, list[int]] = {}  # in the backward pass
        for v, found in self.flow.users().items():
            self.uses[v] = [n for n in found if region[n] in self.forward]
            self.later[v] = [n for n in found if region[n] == self.backward]

    def fuses(self, v: int, user: int) -> bool:
        """Whether a value and a node that reads it may share a kernel."""
        producer = self.producers.get(v)
        return self.flow.nodes[user].fuses and (producer is None or self.flow.nodes[producer].fuses)


def saved_values(flow: Flow, forward: Collection[int], backward: int) -> set[int]:
    """The values of the forward regions that the backward region reads from memory."""
    both = _Passes(flow, forward, backward)
    wanted = [v for v in both.producers if both.later.get(v)]
    if not wanted:
        return set()
    banned = {v for v in both.producers if _once_only(both, v)}
    far = _far_apart(both)
    banned |= {v for v, producer in both.producers.items() if producer in far}
    order = sorted(both.producers, key=lambda v: (both.producers[v], v))
    weights = _weights(both, order)
    return _cut(both, order, weights, banned, set(wanted))


def _once_only(both: _Passes, v: int) -> bool:
    node = both.flow.nodes[both.producers[v]]
    if node.kind not in ("pointwise", "reduction") or node.fixed or node.partial:
        return True
    if any(not both.flow.nodes[n].fuses for n in both.later.get(v, ())):
        return True  # the backward pass needs it in memory anyway
    values = both.flow.values
    return node.kind == "reduction" and SHRINKS * values[v].nbytes < sum(values[r].nbytes for r in node.reads)


def _far_apart(both: _Passes) -> set[int]:
    """Nodes that read a value after something has come between that does not fuse: they are not run a second time."""
    out: set[int] = set()
    for v, found in both.uses.items():
        users = [n for n in found if n < both.begins]  # later ones could as well be in the backward pass
        if len(users) > 1:
            border = _first_apart(both, users)
            out |= {n for n in users if n > border and both.fuses(v, n)}
    return out


def _first_apart(both: _Passes, start: list[int]) -> float:
    """The first node, no later than the last of these, that cannot be in a kernel with what leads from them to it."""
    last, queue, seen = max(start), [(n, True) for n in start], set(start)
    heapify(queue)
    while queue:
        n, fused = heappop(queue)
        if not fused:
            return n
        for v in both.flow.nodes[n].writes:
            for user in both.uses.get(v, ()):
                together = both.fuses(v, user)
                if user <= last and (user not in seen or not together):
                    seen.add(user)
                    heappush(queue, (user, together))
    return float("inf")


def _weights(both: _Passes, order: list[int]) -> list[float]:
    """What it costs to keep each value."""
    values, distance = both.flow.values, dict[int, int]()
    for v in reversed(order):
        after = [distance[w] for n in both.uses.get(v, ()) for w in both.flow.nodes[n].writes if w in distance]
        distance[v] = 1 if both.later.get(v) else 1 + min(after, default=FARTHEST)
    out = []
    for v in order:
        users = [*both.uses.get(v, ()), *both.later.get(v, ())]
        written = any(not both.fuses(v, n) for n in users)
        out.append(values[v].nbytes * NEARER ** min(distance[v], FARTHEST) * (1 if written else 2))
    return out


def _cut(both: _Passes, order: list[int], weights: list[float], banned: set[int], wanted: set[int]) -> set[int]:
    from scipy.sparse import coo_array  # loads slowly
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    place = {v: k for k, v in enumerate(order)}
    source, sink = 2 * len(order), 2 * len(order) + 1
    scale = ROOM / max(1.0, sum(weights))
    edges = [(2 * k, 2 * k + 1, max(1, round(w * scale))) for k, w in enumerate(weights)]
    for v in order:
        k = place[v]
        if v in banned:
            edges.append((source, 2 * k, 2 * ROOM))
        else:
            reads = both.flow.nodes[both.producers[v]].reads
            edges += [(2 * place[r] + 1, 2 * k, 2 * ROOM) for r in reads if r in place]
        if v in wanted:
            edges.append((2 * k + 1, sink, 2 * ROOM))
    start, end, capacity = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    network = coo_array((capacity, (start, end)), shape=(sink + 1, sink + 1), dtype=np.int32).tocsr()
    left = (network - maximum_flow(network, source, sink).flow).tocsr()
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {v for v in order if 2 * place[v] in reached and 2 * place[v] + 1 not in reached}


def with_recompute(flow: Flow, forward: Collection[int], backward: int, saved: Callable[[int], bool]) -> Flow:
    """The flow in which the backward region computes again what is not saved, next to where it is first needed."""
    made = {v: n for v, n in flow.producers().items() if flow.region[n] in forward}
    out = Flow(list(flow.values), stored=set(flow.stored), into=dict(flow.into))
    again: dict[int, int] = {}
    for node, region in zip(flow.nodes, flow.region, strict=True):
        if region != backward:
            out.add(node, region)
            continue
        for n in sorted(_missing(flow, node.reads, made, saved, again)):
            old = flow.nodes[n]
            again.update((w, _like(out, w)) for w in old.writes)
            out.copy(old, [again[w] for w in old.writes], [again.get(r, r) for r in old.reads], backward)
        out.copy(node, node.writes, dict.fromkeys(again.get(r, r) for r in node.reads), region)
    return out


def _missing(
    flow: Flow, reads: Iterable[int], made: Mapping[int, int], saved: Callable[[int], bool], again: Mapping[int, int]
) -> set[int]:
    """The nodes to run once more for these values."""
    result: set[int] = set()
    queue = list(reads)
    while queue:
        v = queue.pop()
        if v in made and v not in again and not saved(v) and made[v] not in result:
            result.add(made[v])
            queue += flow.nodes[made[v]].reads
    return result


def _like(flow: Flow, v: int) -> int:
    of = flow.values[v]
    return flow.value(of.elements, of.width, of.tensor)
