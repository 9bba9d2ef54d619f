"""What the forward pass keeps for the backward pass: as few bytes as will do, the rest is computed again.

As AOTAutograd's partitioner does: a minimum cut between what the forward pass must compute (products, convolutions,
sums, random numbers) and what the backward pass reads. Elementwise values may be computed a second time, unless the
backward pass hands them to a product, or far from where they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from presage.whatif.edits.fusing.flow import Flow

__all__ = ["kept", "recomputed"]

NEARER = 1.1  # a value one step further from the backward pass counts so much more
FARTHEST = 100
SHRINKS = 4  # a sum of so many is kept
ROOM = 2**28


@dataclass
class _Passes:
    """A flow with its forward stretches and the backward stretch that follows them."""

    flow: Flow
    forward: Collection[int]
    backward: int

    def __post_init__(self) -> None:
        stretch = self.flow.stretch
        self.begins = next((n for n, k in enumerate(stretch) if k == self.backward), len(stretch))
        self.makers = {v: n for v, n in self.flow.makers().items() if stretch[n] in self.forward}
        self.uses: dict[int, list[int]] = {}  # in the forward pass
        self.later: dict[int, list[int]] = {}  # in the backward pass
        for v, found in self.flow.users().items():
            self.uses[v] = [n for n in found if stretch[n] in self.forward]
            self.later[v] = [n for n in found if stretch[n] == self.backward]

    def fuses(self, v: int, user: int) -> bool:
        """Whether a value and a node that reads it may share a kernel."""
        maker = self.makers.get(v)
        return self.flow.nodes[user].fuses and (maker is None or self.flow.nodes[maker].fuses)


def kept(flow: Flow, forward: Collection[int], backward: int) -> set[int]:
    """The values of the forward stretches that the backward stretch reads from memory."""
    both = _Passes(flow, forward, backward)
    wanted = [v for v in both.makers if both.later.get(v)]
    if not wanted:
        return set()
    banned = {v for v in both.makers if _once_only(both, v)}
    far = _far_apart(both)
    banned |= {v for v, maker in both.makers.items() if maker in far}
    order = sorted(both.makers, key=lambda v: (both.makers[v], v))
    weights = _weights(both, order)
    return _cut(both, order, weights, banned, set(wanted))


def _once_only(both: _Passes, v: int) -> bool:
    node = both.flow.nodes[both.makers[v]]
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
    from scipy.sparse.csgraph import maximum_flow

    place = {v: k for k, v in enumerate(order)}
    source, sink = 2 * len(order), 2 * len(order) + 1
    scale = ROOM / max(1.0, sum(weights))
    edges = [(2 * k, 2 * k + 1, max(1, round(w * scale))) for k, w in enumerate(weights)]
    for v in order:
        k = place[v]
        if v in banned:
            edges.append((source, 2 * k, 2 * ROOM))
        else:
            reads = both.flow.nodes[both.makers[v]].reads
            edges += [(2 * place[r] + 1, 2 * k, 2 * ROOM) for r in reads if r in place]
        if v in wanted:
            edges.append((2 * k + 1, sink, 2 * ROOM))
    start, end, capacity = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    network = coo_array((capacity, (start, end)), shape=(sink + 1, sink + 1), dtype=np.int32).tocsr()
    left = (network - maximum_flow(network, source, sink).flow).tocsr()
    reached = _reached(left.indptr.tolist(), left.indices.tolist(), left.data.tolist(), source)
    return {v for v in order if 2 * place[v] in reached and 2 * place[v] + 1 not in reached}


def _reached(starts: Sequence[int], ends: Sequence[int], left: Sequence[int], source: int) -> set[int]:
    found, queue = {source}, [source]
    while queue:
        n = queue.pop()
        for k in range(starts[n], starts[n + 1]):
            if left[k] > 0 and ends[k] not in found:
                found.add(ends[k])
                queue.append(ends[k])
    return found


def recomputed(flow: Flow, forward: Collection[int], backward: int, saved: Callable[[int], bool]) -> Flow:
    """The flow in which the backward stretch computes again what is not saved, next to where it is first needed."""
    made = {v: n for v, n in flow.makers().items() if flow.stretch[n] in forward}
    out = Flow(list(flow.values), stored=set(flow.stored), into=dict(flow.into))
    again: dict[int, int] = {}
    for node, stretch in zip(flow.nodes, flow.stretch, strict=True):
        if stretch != backward:
            out.add(node, stretch)
            continue
        for n in sorted(_missing(flow, node.reads, made, saved, again)):
            old = flow.nodes[n]
            again.update((w, _like(out, w)) for w in old.writes)
            out.copy(old, [again[w] for w in old.writes], [again.get(r, r) for r in old.reads], backward)
        out.copy(node, node.writes, dict.fromkeys(again.get(r, r) for r in node.reads), stretch)
    return out


def _missing(
    flow: Flow, reads: Iterable[int], made: Mapping[int, int], saved: Callable[[int], bool], again: Mapping[int, int]
) -> set[int]:
    """The nodes to run once more for these values."""
    found: set[int] = set()
    queue = list(reads)
    while queue:
        v = queue.pop()
        if v in made and v not in again and not saved(v) and made[v] not in found:
            found.add(made[v])
            queue += flow.nodes[made[v]].reads
    return found


def _like(flow: Flow, v: int) -> int:
    of = flow.values[v]
    return flow.value(of.elements, of.width, of.tensor)
