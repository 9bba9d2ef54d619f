"""Edits of when ops run and how fast: CUDA graphs, waits taken out, faster kernels, transfers on their own stream."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from msgspec.structs import replace

from presage.capture.variants import NotApplicable, Variant
from presage.errors import PresageError, compile_pattern
from presage.graph.builder import map_ops, reorder, replace_ops
from presage.graph.graph import ON_HOST, PINNED_MEMORY, Graph, Op, uses
from presage.graph.work import collective
from presage.whatif.edits.edit import Change, plain, valued

# ---- CUDA graphs

LEAST = 2  # kernels that a graph is worth making for


def cuda_graph(graph: Graph) -> Graph:
    """The step as CUDA graphs: one, or one for each stretch between the places where the host waits for the GPU.

    Optimizers must be capturable for it: a step that is captured for this edit has them so.
    """
    stretches = [s for s in _stretches(graph.ops) if sum(graph.ops[i].kernels for i in s) >= LEAST]
    if not stretches:
        raise NotApplicable("no stretch of the step launches two kernels without waiting for the GPU between them")
    names = {i: f"graph {k}" for k, stretch in enumerate(stretches, 1) for i in stretch}
    return map_ops(graph, names, lambda i, op: replace(op, replayed=names[i]))


def _stretches(ops: tuple[Op, ...]) -> list[list[int]]:
    """Ops between those that cannot be in a graph: those that wait, and those of an unknown kind."""
    result: list[list[int]] = [[]]
    for i, op in enumerate(ops):
        if op.sync or op.opaque:
            result.append([])
        else:
            result[-1].append(i)
    return result


# ---- waits of the host for the GPU

# Ops that do nothing else than to wait, or to bring over one number for the host to look at.
ONLY_WAITS = ("cuda::synchronize", "aten::_local_scalar_dense")


def no_sync(pattern: str = "") -> Change:
    """No more waits in the ops whose name or line matches; in all where nothing is said."""
    wanted = compile_pattern(pattern)

    def change(graph: Graph) -> Graph:
        waits = [i for i, op in enumerate(graph.ops) if op.sync]
        found = [i for i in waits if wanted.search(graph.ops[i].name) or wanted.search(graph.ops[i].line)]
        if not found:
            others = ", ".join(dict.fromkeys(_place_of(graph.ops[i]) for i in waits[:3]))
            raise NotApplicable(
                f"no wait for the GPU at {pattern}: choose from {others}" if waits else "no wait for the GPU"
            )
        return replace_ops(graph, {i: _free(graph.ops[i]) for i in found})

    return change


def _place_of(op: Op) -> str:
    return f"{op.name} ({op.line})" if op.line else op.name


def _free(op: Op) -> list[Op]:
    return [] if op.name in ONLY_WAITS else [replace(op, sync=False)]


# ---- faster or slower kernels


def faster(pattern: str, factor: float) -> Change:
    """Kernels `factor` times as fast, of the ops whose name, or the name of a module around them, matches."""
    if not 0 < factor < float("inf"):
        raise PresageError(
            f"kernels cannot be {factor:g} times as fast: give a factor above 0, as in faster=aten::mm:2"
        )
    wanted = compile_pattern(pattern)

    def change(graph: Graph) -> Graph:
        found = [i for i, op in enumerate(graph.ops) if op.kernels and any(map(wanted.fullmatch, _names(op)))]
        if not found:
            raise NotApplicable(_close(graph, pattern))
        return map_ops(graph, found, lambda _, op: replace(op, speed=op.speed * factor))

    return change


def _names(op: Op) -> list[str]:
    """The op's name, and those of the modules around it."""
    parts = op.module.split(".") if op.module else []
    return [op.name, op.name.removeprefix("aten::"), *(".".join(parts[: k + 1]) for k in range(len(parts)))]


def _close(graph: Graph, pattern: str) -> str:
    known = list(dict.fromkeys(name for op in graph.ops if op.kernels for name in _names(op)))
    close = get_close_matches(pattern, known, 3, 0.5) or known[:3]
    return f"no op or module called {pattern}" + (f": choose from {', '.join(close)}" if close else "")


def _read(value: str) -> Change:
    pattern, _, factor = value.rpartition(":")
    try:
        return faster(pattern or value, float(factor))
    except ValueError as e:
        raise PresageError(f"faster={value} has no factor: write faster=OP:FACTOR, as in faster=aten::mm:2") from e


# ---- transfers beside other work

STREAM = "beside"


def overlap(pattern: str = "") -> Change:
    """Ops whose name matches run beside others; transfers, where nothing is said."""
    wanted = compile_pattern(pattern)

    def change(graph: Graph) -> Graph:
        host = {s.id for s in graph.storages if s.name in ON_HOST}
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

    def change(_: int, op: Op) -> Op:
        return replace(op, stream=op.stream or STREAM, sync=op.sync and not _from_host(graph, op, host))

    changed = map_ops(graph, found, change)
    if not any(_from_host(graph, graph.ops[i], host) for i in found):
        return changed
    pinned = (replace(s, name=PINNED_MEMORY) if s.id in host else s for s in changed.storages)
    return replace(changed, storages=tuple(pinned))


def _reordered(graph: Graph, found: list[int], host: set[int]) -> Graph:
    order, done = list(range(len(graph.ops))), set[int]()
    for i in found:
        if i not in done:
            group = _group(graph, i)
            done |= set(group)
            _move(graph, order, group, host)
    return reorder(graph, order)


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
        own = _touched(graph, range(order[at - 1], order[at - 1] + 1), host)
        if before.thread != thread or before.stream or own[1] & (read | written) or own[0] & written:
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


EDITS = (
    plain(
        "cuda_graph",
        "Each stretch of the step without a wait for the GPU becomes one CUDA graph: the host makes one call for it, "
        "and its kernels follow each other with a shorter gap. Optimizers become capturable. Code that runs otherwise "
        "while a graph is captured (attention masks of transformers) is captured that way. Shapes must not change.",
        cuda_graph,
        caution="shapes and addresses must stay as they are, and the host must not look at results in between",
        variant=Variant(traced=True, capturable=True),
    ),
    valued(
        "no_sync",
        "The host no longer waits for the GPU at .item(), .cpu(), nonzero or synchronize (all, or where the op or the "
        "line matches): copies go on without it, a number is not read at all. The host must not need the result.",
        "REGEX",
        no_sync,
        tried=("",),
        needed=False,
        caution="the host must not need the value it waited for",
    ),
    valued(
        "faster",
        "The kernels of the ops whose name, or the name of a module around them, matches are so many times as fast "
        "(below 1: slower). The host's time for them stays.",
        "OP:FACTOR",
        _read,
    ),
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
