"""Which kernels of one GPU stream wait for another's: those that need what the other makes, or write what it reads.

Frameworks record and await events; what they guard is memory, and that is in the graph. Two kernels of different
streams that touch a storage run one after the other if one of them writes it. Of several to wait for on a stream the
last is enough: a stream keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from presage.graph.graph import Graph, Op, uses
from presage.graph.work import collective

Pair = tuple[int, int]


@dataclass(frozen=True)
class Crossings:
    """Pairs of ops, the second of which waits for the first on another stream; and the collectives, in order."""

    within: tuple[Pair, ...]  # both in one step
    carried: tuple[Pair, ...]  # the first is in the step before
    collectives: tuple[int, ...]


@dataclass
class _Use:
    """Who wrote a storage last, and who has read it since, by stream: numbers of ops."""

    writer: tuple[str, int] | None = None
    readers: dict[str, int] = field(default_factory=dict)

    def before(self, writes: bool) -> Iterator[tuple[str, int]]:
        """The ops that one which now reads, or writes, has to come after."""
        if self.writer is not None:
            yield self.writer
        if writes:
            yield from self.readers.items()

    def note(self, stream: str, op: int, writes: bool) -> None:
        if writes:
            self.writer, self.readers = (stream, op), {}
        else:
            self.readers[stream] = op


def stream_names(graph: Graph) -> tuple[str, ...]:
    """The streams of a graph's ops, the usual one first."""
    return tuple(dict.fromkeys(["", *(op.stream for op in graph.ops)]))


def crossings(graph: Graph) -> Crossings:
    """All waits between streams in a step, and from a step to the next."""
    touched = [(i, op, touches(graph, op)) for i, op in enumerate(graph.ops) if op.kernels]
    shared = _shared(touched)
    uses_of: dict[int, _Use] = {s: _Use() for s in shared}
    anew = shared & {e.storage for e in graph.events if e.allocates}  # other memory in the next step
    count, pairs = len(graph.ops), []
    for step in (0, count):
        uses_of |= {s: _Use() for s in anew}
        for i, op, storages in touched:
            pairs += [(a, step + i) for a in _waits(op, storages, uses_of)]
            for s, writes in storages.items():
                if s in shared:
                    uses_of[s].note(op.stream, step + i, writes)
    return Crossings(
        within=tuple((a, b) for a, b in pairs if b < count),
        carried=tuple((a, b - count) for a, b in pairs if a < count <= b),
        collectives=tuple(i for i, op in enumerate(graph.ops) if op.group and collective(op)),
    )


def touches(graph: Graph, op: Op) -> dict[int, bool]:
    """The storages an op touches, and whether it writes them."""
    written = {graph.tensors[i].storage for i in (*op.writes, *op.outputs)}
    return {s: s in written for s in uses(graph, op)}


def _shared(touched: list[tuple[int, Op, dict[int, bool]]]) -> set[int]:
    """Storages that more than one stream touches."""
    by: dict[int, set[str]] = {}
    for _, op, storages in touched:
        for s in storages:
            by.setdefault(s, set()).add(op.stream)
    return {s for s, streams in by.items() if len(streams) > 1}


def _waits(op: Op, storages: dict[int, bool], uses_of: dict[int, _Use]) -> list[int]:
    """The last op on each other stream that this one has to come after."""
    latest: dict[str, int] = {}
    for s, writes in storages.items():
        if s in uses_of:
            for stream, other in uses_of[s].before(writes):
                if stream != op.stream:
                    latest[stream] = max(latest.get(stream, -1), other)
    return list(latest.values())
