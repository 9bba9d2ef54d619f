"""Which pieces share a kernel: those that read the same, or what the other wrote, over the same loops.

As Inductor's scheduler: the best partner first, by the bytes that need not be moved twice; never across something that
runs as it is, never so that two kernels would wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from presage.whatif.edits.fusing.flow import Node, Value
from presage.whatif.edits.fusing.inline import Piece
from presage.whatif.edits.fusing.split import SMS

__all__ = ["Group", "groups"]

MOST, FAR = 64, 64  # pieces in a kernel; pieces between two that only read the same

CROSSED, ROWS, LONGEST = 5 << 20, 4096, 16384  # elements, rows and columns for sums both ways in one kernel


@dataclass
class Group:
    """Pieces of one kernel, by their places."""

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


def groups(found: Sequence[Piece], values: Sequence[Value]) -> list[Group]:
    """The pieces of one stretch in groups."""
    out: list[Group] = []
    maker: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for place, piece in enumerate(found):
        needs = {maker[v] for v in piece.reads if v in maker}
        chosen = _partner(out, place, piece, needs, readers, values)
        if chosen is None:
            chosen = len(out)
            out.append(Group([], [], set(), set()))
        _join(out, chosen, place, piece, needs)
        for v in piece.reads:
            readers.setdefault(v, set()).add(chosen)
        for v in piece.writes:
            maker[v] = chosen
        for d in needs - {chosen}:
            _absorb(out, chosen, d, found, readers, maker)
    return [group for group in out if group.members]


def _absorb(
    out: Sequence[Group],
    chosen: int,
    source: int,
    found: Sequence[Piece],
    readers: Mapping[int, set[int]],
    maker: dict[int, int],
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
    maker.update(dict.fromkeys(group.writes, chosen))
    out[source].members, out[source].nodes, out[source].writes = [], [], set()


def _partner(
    out: Sequence[Group],
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


def _shared(group: Group, piece: Piece, v: int) -> bool:
    """Whether both work on the same of a value, and not on different parts of it."""
    mine, theirs = ({start for w, start in s if w == v} for s in (piece.slices, group.slices))
    return v in group.writes or (v in group.reads and (not mine or not theirs or bool(mine & theirs)))


def _touched(piece: Piece, value: Value) -> int:
    """Bytes of a value that a piece works on."""
    return min(value.nbytes, piece.node.elements * value.width)


def fits(group: Group, piece: Piece) -> bool:
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


def _crossed(group: Group, along: Node, piece: Piece) -> bool:
    """Whether a sum down the columns can be made with one along the rows: of what both read, not of its results."""
    node = piece.node
    rows, columns = along.rows, along.columns
    if along.partial or along.down or not (node.partial and node.down) or group.writes & set(piece.reads):
        return False
    if (columns, rows * columns) != (node.results, node.elements):
        return False
    return rows * columns >= CROSSED and rows >= max(2 * columns, ROWS) and columns <= LONGEST


def _join(out: list[Group], chosen: int, place: int, piece: Piece, needs: set[int]) -> None:
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
