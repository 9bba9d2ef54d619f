"""Which values a compiler writes to memory: those that something needs there; elementwise ones in between are computed
where they are read, as Inductor does (`realize_reads_threshold`, `realize_acc_reads_threshold`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from presage.whatif.edits.fusing.flow import Flow, Node

__all__ = ["Piece", "pieces"]

SHARED, MANY = 4, 8  # values read, by something that is read more than once and by anything, above which it is written


@dataclass(frozen=True, slots=True)
class Piece:
    """A node whose results are written, with all it reads from memory for them."""

    node: Node
    stretch: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: tuple[int, ...]  # places of the nodes it computes
    slices: frozenset[tuple[int, int]] = frozenset()  # of values that are only read in part: which, from where on


def pieces(flow: Flow, lasting: Collection[int], passing: Callable[[int], bool] = lambda _: True) -> list[Piece]:
    """The pieces in order. `lasting`: values that are there after the step; `passing`: nodes that need not write."""
    users = flow.users()
    alive = _alive(flow, lasting)
    leaves: dict[int, tuple[int, ...]] = {}  # of values that are not written, what they are computed from,
    nodes: dict[int, tuple[int, ...]] = {}  # and by which nodes
    out = []
    for i, (node, stretch) in enumerate(zip(flow.nodes, flow.stretch, strict=True)):
        if i not in alive:
            continue
        reads = tuple(dict.fromkeys(r for v in node.reads for r in leaves.get(v, (v,))))
        inside = (i, *dict.fromkeys(n for v in node.reads for n in nodes.get(v, ())))
        writes = node.writes
        if node.kind == "pointwise" and passing(i):
            writes = tuple(v for v in writes if _written(flow, v, stretch, users.get(v, []), len(reads), lasting))
            leaves.update((v, reads) for v in node.writes if v not in writes)
            nodes.update((v, inside) for v in node.writes if v not in writes)
        if writes or not node.fuses:
            slices = frozenset[tuple[int, int]]().union(*(flow.nodes[n].slices for n in inside))
            out.append(Piece(node, stretch, reads, writes, inside, slices))
    return out


def _written(flow: Flow, v: int, stretch: int, users: list[int], reads: int, lasting: Collection[int]) -> bool:
    if v in lasting or v in flow.stored or any(not flow.nodes[n].fuses or flow.stretch[n] != stretch for n in users):
        return True
    return (len(users) > 1 and reads > SHARED) or reads > MANY


def _alive(flow: Flow, lasting: Collection[int]) -> set[int]:
    """Nodes whose results are used."""
    wanted, out = set(lasting), set[int]()
    for i in range(len(flow.nodes) - 1, -1, -1):
        node = flow.nodes[i]
        if not node.fuses or any(v in wanted for v in node.writes):
            out.add(i)
            wanted.update(node.reads)
    return out
