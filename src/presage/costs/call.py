"""A Call: one op with its inputs, as a kernel model sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from presage.graph.graph import DTYPE_BYTES, Graph, Op, Ref, Tensor, references


@dataclass(frozen=True)
class Shape:
    """Sizes, strides and dtype of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @cached_property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.width

    @cached_property
    def distinct(self) -> int:
        """Bytes in memory: an element that a stride of zero repeats counts once."""
        if len(self.strides) != len(self.sizes):
            return self.nbytes
        return prod(n for n, s in zip(self.sizes, self.strides, strict=True) if s or not n) * self.width

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of the dimensions that matter, the fastest first, neighbours joined where memory allows."""
        if len(self.strides) != len(self.sizes):
            return ((self.elements, 1),)
        dims = sorted((s, n) for n, s in zip(self.sizes, self.strides, strict=True) if n > 1)
        joined: list[tuple[int, int]] = []
        for stride, size in dims:
            if joined and joined[-1][0] * joined[-1][1] == stride:
                joined[-1] = (joined[-1][0] * size, joined[-1][1])
            else:
                joined.append((size, stride))
        return tuple(joined)

    @property
    def is_dense(self) -> bool:
        """No holes and no repeats, in whatever order."""
        return not self.order or (len(self.order) == 1 and self.order[0][1] == 1)

    @cached_property
    def is_contiguous(self) -> bool:
        expected = 1
        if len(self.strides) != len(self.sizes):
            return True
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


Single: TypeAlias = Shape | bool | int | float | str | None
Value: TypeAlias = Single | tuple[Any, ...]  # a list of shapes or of numbers


@dataclass(frozen=True)
class Call:
    """An op and its inputs. `facts` hold what shapes cannot: the number of distinct rows looked up (`distinct`) and the
    uses of the most frequent one (`most`); `settled`: a comparing scatter's results are there already, as where the
    sweep repeats one."""

    name: str
    inputs: tuple[Value, ...]
    tf32: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[Shape, ...]:
        """All tensors among the inputs, lists flattened."""
        return tuple(_shapes(self.inputs))

    @cached_property
    def sized(self) -> tuple[Shape, ...]:
        """The tensors that have dimensions: a single number is as good as a constant, wherever it is."""
        return tuple(t for t in self.tensors if t.sizes)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that cost the same."""
        return self.name, self.inputs, self.tf32, tuple(sorted(self.facts.items()))

    def shape(self, place: int) -> Shape | None:
        value = self.inputs[place] if place < len(self.inputs) else None
        return value if isinstance(value, Shape) else None

    def number(self, place: int, default: float = 0.0) -> float:
        value = self.inputs[place] if place < len(self.inputs) else None
        return float(value) if isinstance(value, (bool, int, float)) else default

    def numbers(self, place: int) -> tuple[float, ...]:
        value = self.inputs[place] if place < len(self.inputs) else None
        items = value if isinstance(value, tuple) else (value,)
        return tuple(float(v) for v in items if isinstance(v, (bool, int, float)))


def _shapes(values: tuple[Value, ...]) -> Iterator[Shape]:
    for value in values:
        if isinstance(value, Shape):
            yield value
        elif isinstance(value, tuple):
            yield from _shapes(value)


def from_graph(graph: Graph, op: Op, facts: Mapping[str, float] | None = None) -> Call:
    inputs = tuple(_value(graph, a) for a in op.inputs)
    flag = "cudnn.allow_tf32" if "conv" in op.name or "rnn" in op.name else "allow_tf32"
    return Call(op.name, inputs, bool(graph.flags.get(flag, False)), facts or _known(graph, op))


def _known(graph: Graph, op: Op) -> Mapping[str, float]:
    """Facts of the op's index, where the graph has any."""
    known = next((graph.facts[i] for i in references(op.inputs) if i in graph.facts), None) if graph.facts else None
    return {} if known is None else {"distinct": float(known[0]), "most": float(known[1])}


def _value(graph: Graph, argument: Any) -> Value:
    if isinstance(argument, Ref):
        return shape_of(graph.tensors[argument.id])
    if isinstance(argument, list):
        return tuple(_value(graph, a) for a in argument)
    return argument  # type: ignore[no-any-return]


def shape_of(tensor: Tensor) -> Shape:
    return Shape(tensor.shape, tensor.strides, tensor.dtype)
