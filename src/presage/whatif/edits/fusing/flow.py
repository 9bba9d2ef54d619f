"""A Flow: what a graph computes, as values that are written once, and nodes that make values from values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

__all__ = ["Flow", "Function", "Kind", "Node", "Value"]

Kind: TypeAlias = Literal["pointwise", "reduction", "scatter", "extern", "outside"]
Function: TypeAlias = Literal["", "random", "erf", "exp"]


@dataclass(frozen=True, slots=True)
class Value:
    """What is in a storage from one write to the next; or something a graph has no tensor of (statistics of rows)."""

    elements: int
    width: int  # bytes an element
    tensor: int = -1  # place in Graph.tensors of the tensor that was written; -1 where there is none
    storage: int = -1

    @property
    def nbytes(self) -> int:
        return self.elements * self.width


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of work on `rows` x `columns` elements: a reduction makes one of each row, others one of each element.

    Kinds: extern ones run as they are (matrix products, convolutions); those outside are not part of what is fused.
    """

    kind: Kind
    op: int  # place of the op it comes from
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    rows: int = 1
    columns: int = 1
    partial: bool = False  # the first half of a reduction in two kernels
    down: bool = False  # reduces down columns: neighbours in memory are of different results
    fixed: bool = False  # never computed a second time
    function: Function = ""  # what takes long to compute, for each element
    alone: bool = False  # shares no kernel
    turned: bool = False  # writes in another order than it reads
    slices: frozenset[tuple[int, int]] = frozenset()  # of values it reads a part of: which, and from where on
    also: tuple[int, ...] = ()  # places of further ops whose work it does
    results: int = 0  # of the first half of a reduction, how many results the whole has

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def fuses(self) -> bool:
        return self.kind in ("pointwise", "reduction", "scatter")


@dataclass
class Flow:
    """Nodes in program order. `stretch` numbers the stretch of each node: ops that are compiled in one piece."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    stretch: list[int] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)  # values that are written, whoever reads them
    into: dict[int, int] = field(default_factory=dict)  # values that become others in place

    def value(self, elements: int, width: int, tensor: int = -1, storage: int = -1) -> int:
        self.values.append(Value(elements, width, tensor, storage))
        return len(self.values) - 1

    def add(self, node: Node, stretch: int) -> None:
        self.nodes.append(node)
        self.stretch.append(stretch)

    def makers(self) -> dict[int, int]:
        """The node that makes each value."""
        return {v: i for i, node in enumerate(self.nodes) for v in node.writes}

    def users(self) -> dict[int, list[int]]:
        """The nodes that read each value, in order."""
        out: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys(node.reads):
                out.setdefault(v, []).append(i)
        return out

    def copy(self, node: Node, writes: Iterable[int], reads: Iterable[int], stretch: int) -> None:
        """The node once more, with other values, in another stretch."""
        self.add(replace(node, writes=tuple(writes), reads=tuple(reads)), stretch)
