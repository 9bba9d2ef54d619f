"""Runs: a step's ops in the stretches that an edit of types or layouts treats as one.

In the forward pass a run is one call of an op that the edit asks for by name (`aten::linear` with all inside it), or a
single op; in the backward pass it is what one node of autograd's does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op

__all__ = ["ACCUMULATE", "ENGINE", "Listing", "Run", "Story", "accumulates", "node_name", "outside", "runs"]

ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
Kind: TypeAlias = Literal["forward", "backward", "gradient", "other"]
# The depth at which an op's `within` (or the op itself, one deeper) has a name that matters, and the name; -1: none.
Listing: TypeAlias = Callable[[Op], tuple[int, str]]


@dataclass(frozen=True)
class Run:
    kind: Kind  # 'gradient': a parameter's gradient is handed over
    first: int
    last: int  # one past the last op
    depth: int = -1
    listed: str = ""

    @property
    def ops(self) -> range:
        return range(self.first, self.last)


def runs(graph: Graph, listing: Listing) -> list[Run]:
    found: list[Run] = []
    again = _recomputed(graph.ops)
    for i, op in enumerate(graph.ops):
        kind, (depth, listed) = _kind(op, again[i]), listing(op)
        depth, listed = (depth, listed) if kind == "forward" else (-1, "")
        last = found[-1] if found else None
        if last is not None and last.kind == kind and _goes_on(graph.ops, last, i, depth, listed):
            found[-1] = Run(kind, last.first, i + 1, last.depth, last.listed)
        else:
            found.append(Run(kind, i, i + 1, depth, listed))
    return found


def _kind(op: Op, again: bool) -> Kind:
    if op.thread == "autograd" and not again:
        return "gradient" if op.within and op.within[outside(op)].endswith(ACCUMULATE) else "backward"
    return "forward" if op.phase != "optimizer" else "other"


def outside(op: Op) -> int:
    """How many ops are around the backward node that an op is of: none, or those of a node that runs a pass itself."""
    return max((d for d, name in enumerate(op.within) if name.startswith(ENGINE)), default=0)


def _recomputed(ops: Sequence[Op]) -> list[bool]:
    """Forward ops that run within the backward pass: numbered higher than all of the forward before it."""
    newest, out = -1, []
    for op in ops:
        newest = max(newest, op.sequence) if op.thread == "main" else newest
        nested = any(name.startswith(ENGINE) for name in op.within[1:])
        out.append(op.thread == "autograd" and 0 <= newest < op.sequence and not nested)
    return out


def _goes_on(ops: Sequence[Op], run: Run, i: int, depth: int, listed: str) -> bool:
    first, op = ops[run.first], ops[i]
    if run.kind == "backward":
        depth = outside(op) + 1
        return op.within[:depth] == first.within[:depth] and op.sequence == first.sequence
    if run.kind != "forward" or not listed or (depth, listed) != (run.depth, run.listed) or depth >= len(op.within):
        return False
    if (op.module, op.line, op.within[: depth + 1]) != (first.module, first.line, first.within[: depth + 1]):
        return False
    if op.within[-1] == "aten::_to_copy" or listed == "aten::scaled_dot_product_attention":
        return True
    start, now = (first.within[depth:], first.name), (op.within[depth:], op.name)
    worked = any(ops[j].kernels and ops[j].name != "aten::copy_" for j in run.ops)
    return now != start or not worked  # what begins as the run began, after its work is done, is another call


def accumulates(op: Op) -> bool:
    """Whether the engine adds up two gradients of one tensor here."""
    return op.name in ("aten::add", "aten::add_") and op.within[-1:] != () and op.within[-1].startswith(ENGINE)


def node_name(op: Op) -> str:
    """The backward node of a forward op, as autograd most often names it."""
    words = op.name.removeprefix("aten::").strip("_").split("_")
    return "".join(w[:1].upper() + w[1:] for w in words) + "Backward0"


class Story:
    """Who makes and who reads what, in a graph as it is."""

    def __init__(self, graph: Graph, found: Sequence[Run]) -> None:
        self.graph, self.runs = graph, found
        self.run_of = [n for n, run in enumerate(found) for _ in run.ops]
        self.readers: dict[int, list[int]] = {}  # ops that read a storage, in order
        self.made: dict[int, int] = {}  # storage: the op that first names it, of those made in the step
        self.outputs: dict[int, list[int]] = {}  # of forward ops, by autograd's number
        self.nodes: set[int] = set()  # numbers of backward nodes that run an op
        taken = {e.storage for e in graph.events if e.allocates}
        for i, op in enumerate(graph.ops):
            kind = found[self.run_of[i]].kind
            for t in references(op.inputs):
                self.readers.setdefault(graph.tensors[t].storage, []).append(i)
            for t in (*references(op.inputs), *op.outputs):
                if (s := graph.tensors[t].storage) in taken:
                    self.made.setdefault(s, i)
            if kind == "forward" and op.sequence >= 0 and op.outputs:
                self.outputs.setdefault(op.sequence, []).extend(op.outputs)
            if kind == "backward":
                self.nodes.add(op.sequence)

    def is_gradient(self, storage: int) -> bool:
        """Whether the backward pass made it."""
        return storage in self.made and self.runs[self.run_of[self.made[storage]]].kind in ("backward", "gradient")

    def readers_after(self, storage: int, op: int) -> Iterator[int]:
        found = self.readers.get(storage, [])
        yield from found[bisect_left(found, op) :]

    def goal(self, storage: int, after: int) -> Run | None:
        """The run that takes a gradient which is complete, seen from an op after which it lies in this storage."""
        for i in self.readers_after(storage, after):
            op = self.graph.ops[i]
            if not accumulates(op):
                return self.runs[self.run_of[i]]
            storage, after = self.graph.tensors[op.outputs[0]].storage, i + 1
            return self.goal(storage, after)
        return None
