"""Lifetimes of memory in an execution trace. A trace names memory by its address, which is used again and again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from presage.graph.graph import DTYPE_BYTES
from presage.traces.execution_graph import ExecutionGraph, TensorRef, node_ends, tensors

WIDEST = 10_000  # calls inside an op that are looked at; none has as many


@dataclass(slots=True)
class MemoryLife:
    """One use of an address, from an allocation to the next one there."""

    begin: int  # position of the node that allocated it; -1: it was there before
    nbytes: int = 0
    device: str = ""


class TracedMemory:
    """Per node of a trace the lives of what it reads (`read`) and of what it returns (`returned`), by address."""

    def __init__(self, graph: ExecutionGraph) -> None:
        self.lives: list[MemoryLife] = []
        self.read: list[dict[int, int]] = []
        self.returned: list[dict[int, int]] = [{} for _ in graph.nodes]
        self._now: dict[int, int] = {}
        ends = node_ends(graph)
        for i, node in enumerate(graph.nodes):
            self.read.append({} if node.on_gpu else self._seen(tensors(node.inputs)))
            for j in ends[i]:
                self.returned[j] = self._returned(j, i, list(tensors(graph.nodes[j].outputs)))
        for node, read, returned in zip(graph.nodes, self.read, self.returned, strict=True):
            self._grow(read, tensors(node.inputs))
            self._grow(returned, tensors(node.outputs))

    def _seen(self, given: Iterable[TensorRef]) -> dict[int, int]:
        found = {}
        for t in given:
            if t.storage not in self._now:
                self._now[t.storage] = self._begin(-1, t)
            found[t.storage] = self._now[t.storage]
        return found

    def _returned(self, node: int, last: int, results: Iterable[TensorRef]) -> dict[int, int]:
        """Memory that a node returns is what it got, what a call inside it made, or new.

        `last` is the last call inside it. New memory may not have been made by a call; those inside then had it too.
        """
        found = {}
        for t in results:
            life = self._now.get(t.storage)
            if t.storage not in self.read[node] and (life is None or self.lives[life].begin < node):
                life = self._now[t.storage] = self._begin(node, t)
                for inner in range(node + 1, min(last, node + WIDEST) + 1):
                    for seen in (self.read[inner], self.returned[inner]):
                        if t.storage in seen:
                            seen[t.storage] = life
            found[t.storage] = self._now[t.storage]
        return found

    def _begin(self, node: int, t: TensorRef) -> int:
        self.lives.append(MemoryLife(node, 0, t.device))
        return len(self.lives) - 1

    def _grow(self, lives: dict[int, int], seen: Iterable[TensorRef]) -> None:
        """Memory is as large as what is seen of it."""
        for t in seen:
            if t.storage in lives:
                life = self.lives[lives[t.storage]]
                life.nbytes = max(life.nbytes, (t.offset + extent(t)) * itemsize(t))


def extent(t: TensorRef) -> int:
    """Elements from a tensor's first to its last."""
    if t.strides is None or not t.elements:
        return t.elements
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))


def itemsize(t: TensorRef) -> int:
    return DTYPE_BYTES.get(t.dtype, t.itemsize)
