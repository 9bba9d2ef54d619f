"""Which kernels of one GPU stream wait for another's: those that need what the other makes, or write what it reads.

Frameworks record and await events; what they guard is memory, and that is in the graph. Two kernels of different
streams that touch a storage run one after the other if one of them writes it. Of several to wait for on a stream the
last is enough: a stream keeps its order.

Collectives that code calls wait for all kernels before them on the stream that calls them, whatever these touch; and
where the code waits for one (Work.wait, or a call that is not asynchronous), so does all that its stream runs next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from presage.graph.graph import Graph, Op, uses
from presage.graph.work import WAIT, collective

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


@dataclass
class _Lane:
    """A stream's last kernel, and what its next one waits for: the last op by stream."""

    last: int = -1
    awaits: dict[str, int] = field(default_factory=dict)


def stream_names(graph: Graph) -> tuple[str, ...]:
    """The streams of a graph's ops, the usual one first."""
    return tuple(dict.fromkeys(["", *(op.stream for op in graph.ops)]))


def crossings(graph: Graph) -> Crossings:
    """All waits between streams in a step, and from a step to the next."""
    touched = [(i, op, touches(graph, op)) for i, op in enumerate(graph.ops) if op.kernels or op.name == WAIT]
    shared = _shared(touched)
    uses_of: dict[int, _Use] = {s: _Use() for s in shared}
    anew = shared & {e.storage for e in graph.events if e.allocates}  # other memory in the next step
    lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
    count, pairs = len(graph.ops), []
    for step in (0, count):
        uses_of |= {s: _Use() for s in anew}
        for i, op, storages in touched:
            if op.name == WAIT:
                found = _waits(op, dict.fromkeys(storages, True), uses_of)
                lanes[op.stream].awaits = _latest(lanes[op.stream].awaits, {op.group: found.get(op.group, -1)})
                continue
            latest = _latest(lanes[op.stream].awaits, _waits(op, storages, uses_of))
            if op.issued is not None and op.issued != op.stream:
                latest = _latest(latest, lanes[op.issued].awaits, {op.issued: lanes[op.issued].last})
            pairs += [(a, step + i) for stream, a in latest.items() if a >= 0 and stream != op.stream]
            lanes[op.stream] = _Lane(step + i)
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


def _waits(op: Op, storages: dict[int, bool], uses_of: dict[int, _Use]) -> dict[str, int]:
    """The last op on each other stream that this one has to come after."""
    before = (b for s, writes in storages.items() if s in uses_of for b in uses_of[s].before(writes))
    return _latest(*({stream: other} for stream, other in before if stream != op.stream))


def _latest(*found: dict[str, int]) -> dict[str, int]:
    """The last op of each stream."""
    out: dict[str, int] = {}
    for some in found:
        for stream, op in some.items():
            out[stream] = max(out.get(stream, -1), op)
    return out
