"""Activation checkpoints of a step, as the host has them: where they begin, and how often their hooks run.

torch.utils.checkpoint (use_reentrant=False) calls Python for every tensor that autograd keeps: when the forward pass
keeps it, when the recomputation does, and when a backward node asks for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from presage.graph.graph import Graph, Op, Thread

__all__ = ["Checkpoints", "checkpoints"]

Call: TypeAlias = tuple[str, str]  # of an op: its module, its name

KEPT = "detach"  # what a recomputation does with a tensor that it keeps
ENOUGH = 16  # ops that have to be the same for one stretch to repeat another


@dataclass(frozen=True)
class Checkpoints:
    """By place of an op: what begins with it, and for how many tensors hooks run with it."""

    begins: dict[int, str] = field(default_factory=dict)
    hooks: dict[int, float] = field(default_factory=dict)


def checkpoints(graph: Graph, recomputed: Sequence[bool]) -> Checkpoints:
    """Those of a graph; `recomputed`: which ops a backward node runs as forward ops."""
    found = Checkpoints()
    if not any(recomputed):
        return found
    main = [i for i, op in enumerate(graph.ops) if op.thread == "main"]
    calls = defaultdict[Call, list[int]](list)
    for k, i in enumerate(main):
        calls[_call(graph.ops[i])].append(k)
    nodes = [_first_of_number(graph, thread) for thread in ("main", "autograd")]
    for run in _runs(recomputed):
        found.begins[run.start] = "recomputation begins"
        first = _repeated(graph, run, main, calls)
        if first is not None:
            found.begins[first] = "checkpoint begins"
            _note_hooks(graph, run, first, nodes, found.hooks)
    return found


def _first_of_number(graph: Graph, thread: Thread) -> dict[int, int]:
    return {op.sequence: i for i, op in reversed([*enumerate(graph.ops)]) if op.thread == thread and op.sequence >= 0}


def _runs(recomputed: Sequence[bool]) -> Iterator[range]:
    start = 0
    for i, yes in enumerate([*recomputed, False]):
        if not yes:
            if start < i:
                yield range(start, i)
            start = i + 1


def _repeated(graph: Graph, run: range, main: Sequence[int], calls: Mapping[Call, list[int]]) -> int | None:
    """The op of the forward pass that a run begins with once more: the last that goes on as the run does, and that the
    backward pass, which has come to the run, has not gone past."""
    again = [_call(graph.ops[i]) for i in run if graph.ops[i].name != KEPT][:ENOUGH]
    reached = graph.ops[run.stop].sequence if run.stop < len(graph.ops) else -1
    for k in reversed(calls.get(again[0], []) if again else []):
        before = main[k] < run.start and graph.ops[main[k]].sequence <= reached
        if before and [_call(graph.ops[i]) for i in main[k : k + len(again)]] == again:
            return main[k]
    return None


def _call(op: Op) -> Call:
    return op.module, op.name


def _note_hooks(graph: Graph, run: range, first: int, nodes: Sequence[dict[int, int]], hooks: dict[int, float]) -> None:
    """The tensors that a run keeps, in the run itself and where the forward and the backward pass have them."""
    kept = Counter(graph.ops[i].sequence for i in run if graph.ops[i].name == KEPT)
    hooks |= {i: 1.0 for i in run if graph.ops[i].name == KEPT}
    numbers = [graph.ops[i].sequence for i in run if graph.ops[i].sequence >= 0]
    old = next((op.sequence for op in graph.ops[first:] if op.sequence >= 0), -1)
    for number, count in kept.items():
        for places in nodes:
            if (place := places.get(number - min(numbers) + old)) is not None:
                hooks[place] = float(count)
