"""Transfers beside other work: on a stream of their own, and issued as early as what they need allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.check import uses
from presage.graph.collective import collective
from presage.graph.edit import spans, stretched
from presage.graph.graph import HOST_MEMORY, Graph, Op
from presage.whatif.edits.copies import in_order
from presage.whatif.edits.edit import Change, NotApplicable, valued

__all__ = ["EDITS", "overlap"]

STREAM = "beside"


def overlap(pattern: str = "") -> Change:
    """Ops whose name matches run beside others; transfers, where nothing is said."""
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise PresageError(f"{pattern!r} is not a regular expression: {e}") from e

    def change(graph: Graph) -> Graph:
        host = {s.id for s in graph.storages if s.name == HOST_MEMORY}
        chosen: Callable[[Op], bool] = (
            (lambda op: wanted.fullmatch(op.name) is not None) if pattern else lambda op: _transfers(graph, op, host)
        )
        found = [i for i, op in enumerate(graph.ops) if op.kernels and chosen(op)]
        if not found:
            raise NotApplicable(
                f"no kernels of {pattern}" if pattern else "no copies from or to the host, no collectives"
            )
        changed = _reordered(_apart(graph, found, host), found, host)
        if changed.ops == graph.ops:
            raise NotApplicable("all of them are on a stream of their own, and as early as they can be")
        return changed

    return change


def _transfers(graph: Graph, op: Op, host: set[int]) -> bool:
    return collective(op) is not None or _from_host(graph, op, host) or _to_host(graph, op, host)


def _from_host(graph: Graph, op: Op, host: set[int]) -> bool:
    """Whether it copies from the host; what it makes is on the GPU."""
    return op.name == "aten::copy_" and bool(op.outputs) and _in(graph, op, host) and not _out(graph, op, host)


def _to_host(graph: Graph, op: Op, host: set[int]) -> bool:
    return op.name == "aten::copy_" and (_out(graph, op, host) or (not op.outputs and op.inputs[:1] == (None,)))


def _in(graph: Graph, op: Op, host: set[int]) -> bool:
    return any(t.storage in host for t in graph.inputs_of(op))


def _out(graph: Graph, op: Op, host: set[int]) -> bool:
    return any(t.storage in host for t in graph.outputs_of(op))


def _apart(graph: Graph, found: list[int], host: set[int]) -> Graph:
    """The ops on a stream of their own; a copy from the host, out of pinned memory, waits for nobody."""
    ops = list(graph.ops)
    for i in found:
        waits = ops[i].sync and not _from_host(graph, ops[i], host)
        ops[i] = replace(ops[i], stream=ops[i].stream or STREAM, sync=waits)
    return replace(graph, ops=tuple(ops))


def _reordered(graph: Graph, found: list[int], host: set[int]) -> Graph:
    order, done = list(range(len(graph.ops))), set[int]()
    for i in found:
        if i not in done:
            group = _group(graph, i)
            done |= set(group)
            _move(graph, order, group, host)
    return _in_this_order(graph, order)


def _group(graph: Graph, place: int) -> range:
    """The op with what the host does for it right before: all within one outermost op, if it launches nothing else."""
    op, start = graph.ops[place], place
    while start > 0 and _together(graph.ops[start - 1], op) and not graph.ops[start - 1].kernels:
        start -= 1
    return range(start, place + 1)


def _together(a: Op, b: Op) -> bool:
    return (
        bool(a.within)
        and a.within[:1] == b.within[:1]
        and (a.thread, a.line, a.sequence) == (b.thread, b.line, b.sequence)
    )


def _move(graph: Graph, order: list[int], group: range, host: set[int]) -> None:
    """Bring a group forward to behind the last op that it has to follow; never into the middle of another."""
    read, written = _touched(graph, group, host)
    at = best = order.index(group.start)
    thread = graph.ops[group.start].thread
    while at > 0:
        before = graph.ops[order[at - 1]]
        mine = _touched(graph, range(order[at - 1], order[at - 1] + 1), host)
        if before.thread != thread or before.stream or mine[1] & (read | written) or mine[0] & written:
            break
        at -= 1
        if at == 0 or not _together(graph.ops[order[at - 1]], before):
            best = at
    first = order.index(group.start)
    order[best : first + len(group)] = [*group, *order[best:first]]


def _touched(graph: Graph, group: range, host: set[int]) -> tuple[set[int], set[int]]:
    """The storages that some ops read, and those that they write; the host's memory is many."""
    written = {
        graph.tensors[t].storage for i in group for t in (*graph.ops[i].outputs, *graph.ops[i].writes)
    } - host  # fmt: skip
    return {s for i in group for s in uses(graph, graph.ops[i])} - written - host, written


def _in_this_order(graph: Graph, order: list[int]) -> Graph:
    """The ops in another order: memory is freed after all that came before its end, and sooner allocated if need be."""
    place = {old: new for new, old in enumerate(order)}
    behind = [0, *accumulate((place[i] + 1 for i in range(len(order))), max)]
    changed = replace(graph, ops=tuple(graph.ops[i] for i in order), events=())
    first, last = spans(changed)
    moved = (
        replace(e, op=place.get(e.op, len(order)) if e.allocates else max(behind[e.op], 0)) for e in graph.events
    )  # fmt: skip
    return replace(changed, events=in_order(stretched(e, first, last) for e in moved))


EDITS = (
    valued(
        "overlap",
        "Copies from and to the host, and collectives (or the ops whose name matches), run on a stream of their own, "
        "issued as soon as what they read is there and what they write is free. Copies from the host are taken to come "
        "from pinned memory. Kernels that fill the GPU gain nothing beside others.",
        "REGEX",
        overlap,
        tried=("",),
        needed=False,
    ),
)
