"""Lowering: a graph to SSA form. Views disappear, every write makes a new value, composite ops are decomposed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from presage.fusing.dataflow import Flow, Function, Node, reduction_splits
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Ref, Tensor

OUTSIDE = -1
STATISTIC = 4  # bytes of a number that sums up a row

_EXTERN = re.compile(
    r"_foreach_|fft|linalg|cholesky|solve|histc|bincount|cdist|multinomial|ctc|median|kthvalue|cum(sum|prod|max|min)|logcumsum|"
    r"sort|topk|nonzero|unique|masked_select|coalesce|embedding_bag|_to_sparse|sparse|repeat_interleave|"
    r"max_pool\w*_backward"  # generated, but it looks at every window an element is in, as PyTorch's own does
)
_SCATTER = re.compile(r"index_put|scatter|index_add|index_copy|index_fill|masked_scatter|put_$")
RANDOM = re.compile(r"bernoulli|rand|normal_|uniform_|exponential_|dropout$|rrelu")
_EXTERN_FAMILIES = (
    "matrix multiply", "convolution", "attention", "recurrent", "communication", "optimizer", "normalisation", "fused",
    "other",
)  # fmt: skip
_OVERWRITES = re.compile(r"^aten::(fill_|zero_|copy_|normal_|uniform_|random_|exponential_|bernoulli_)$")


def sort_of(op: Op) -> str:
    """What kind of node an op without a rule of its own becomes."""
    kind = family(op.name)
    if op.sync or op.opaque or kind in _EXTERN_FAMILIES or _EXTERN.search(op.name):
        return "extern"
    if _SCATTER.search(op.name):
        return "scatter"
    if kind == "reduction":
        return "reduction"
    return "pointwise"


class Lowering:
    """Goes through a graph's ops and keeps what each storage holds."""

    def __init__(self, graph: Graph, region: Sequence[int]) -> None:
        self.graph = graph
        self.region = region  # of each op
        self.flow = Flow()
        self.now: dict[int, int] = {}  # by storage the value it holds
        self.at = 0  # the op at hand
        self.made: dict[int, int] = {}  # by value the region that makes it
        self.producers: dict[int, int] = {}  # and the op
        self.copies: dict[Any, int] = {}  # of parts of values, for ops that take no parts
        self.normed: dict[int, int] = {}  # by the statistics of rows, the rows made even by them
        self.seen: dict[Any, list[int]] = {}  # ops of this region: what they wrote, by what they are
        self.held: dict[int, dict[int, int]] = {}  # of ops that run as they are: by tensor the value that it had,
        self.left: dict[int, dict[int, int]] = {}  # by storage the value it was left with

    # ---- what rules are written with

    def read(self, t: Tensor) -> int:
        """The value that a tensor is a view of."""
        if t.storage not in self.now:
            self.now[t.storage] = self._of(t)
        return self.now[t.storage]

    def reads(self, op: Op) -> list[int]:
        """The values an op reads; what it overwrites whole is not among them."""
        return [self.read(t) for t in self.inputs(op)]

    def inputs(self, op: Op) -> list[Tensor]:
        gone = {t.id for t in self._overwritten(op)}
        return [t for t in self.graph.inputs_of(op) if t.id not in gone]

    def write(self, t: Tensor) -> int:
        """A new value for a tensor's storage."""
        self.now[t.storage] = self._of(t)
        return self.now[t.storage]

    def written(self, op: Op) -> list[Tensor]:
        """The tensors an op makes or changes, each storage once."""
        found = [*self.graph.outputs_of(op), *(self.graph.tensors[i] for i in op.writes)]
        return list({t.storage: t for t in reversed(found)}.values())[::-1]

    def hidden(self, elements: int) -> int:
        """A value that the graph has no tensor of."""
        return self.flow.value(elements, STATISTIC)

    def pointwise(
        self,
        reads: Sequence[int],
        writes: Sequence[int],
        elements: int,
        function: Function = "",
        region: int | None = None,
        turned: bool = False,
        slices: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        node = Node("pointwise", self.at, _once(reads), tuple(writes), elements, function=function, turned=turned)
        self._add(replace(node, fixed=function == "random", slices=slices), region)

    def slices(self, op: Op) -> frozenset[tuple[int, int]]:
        """The parts of values that an op reads."""
        parts = [t for t in self.inputs(op) if 2 * t.nbytes <= self.graph.storages[t.storage].nbytes and t.strides]
        return frozenset((self.read(t), t.offset) for t in parts if 0 not in t.strides)

    def reduction(
        self,
        reads: Sequence[int],
        writes: Sequence[int],
        rows: int,
        columns: int,
        down: bool,
        function: Function = "",
        whole: bool = False,
    ) -> None:
        """One kernel, or (unless `whole`) two: parts first, then the results from the parts."""
        parts = 1 if whole else reduction_splits(rows, columns, down)
        first = Node("reduction", self.at, _once(reads), tuple(writes), rows, columns, down=down, function=function)
        if parts == 1:
            self._add(first)
            return
        between = self.hidden(rows * parts * max(1, len(writes)))
        across = -(-columns // parts)
        self._add(replace(first, writes=(between,), rows=rows * parts, columns=across, partial=True, results=rows))
        self._add(Node("reduction", self.at, (between,), tuple(writes), rows, parts))

    def scatter(self, target: int | None, reads: Sequence[int], write: int, elements: int, stored: bool = True) -> None:
        """Part of a value is written, or added to, in place."""
        if target is not None:
            self.flow.into[target] = write
            self.flow.stored |= {target} if stored else set()
        node = Node("scatter", self.at, _once([*reads, *([] if target is None else [target])]), (write,), elements)
        self._add(replace(node, fixed=True))

    def extern(self, op: Op) -> None:
        """An op that runs as it is."""
        whole = family(op.name) == "attention"
        held = {t.id: self._copied(t) if whole else self.read(t) for t in self.inputs(op)}
        self.held[self.at] = held
        self.left[self.at] = {t.storage: self.write(t) for t in self.written(op)}
        self._add(Node("extern", self.at, _once([*held.values()]), tuple(self.left[self.at].values())))

    def _copied(self, t: Tensor) -> int:
        """A part of a value by itself: attention takes no parts."""
        value, source = self.read(t), self.graph.storages[t.storage]
        if len(t.shape) < 3 or t.nbytes >= source.nbytes // 2 or "float" not in t.dtype:
            return value
        key = (value, *self._shape(t))
        if key not in self.copies:
            self.copies[key] = self.flow.value(t.elements, t.itemsize)
            self._add(Node("pointwise", self.at, (value,), (self.copies[key],), t.elements, alone=True))
            self.flow.stored |= {value, self.copies[key]}
        return self.copies[key]

    # ---- one op after another

    def key(self, op: Op) -> Any:
        """What the op computes from which values: equal for common subexpressions; None for random numbers."""
        if RANDOM.search(op.name):
            return None
        return op.name, op.overload, self._key(op), tuple(self._shape(t) for t in self.written(op))

    def reuse(self, op: Op, key: Any) -> bool:
        """Take the values of an equal op before it in this region, if there is one."""
        if key is None or key not in self.seen:
            return False
        for t, value in zip(self.written(op), self.seen[key], strict=True):
            self.now[t.storage] = value
        return True

    def remember(self, op: Op, key: Any) -> None:
        """Note what an op has written, for equal ones after it."""
        if key is not None:
            self.seen[key] = [self.read(t) for t in self.written(op)]

    def outside(self, op: Op) -> None:
        reads = self.reads(op)
        writes = tuple(self.write(t) for t in self.written(op)) if op.kernels else ()
        self._add(Node("outside", self.at, _once(reads), writes))

    # ----

    def _add(self, node: Node, region: int | None = None) -> None:
        here = self.region[self.at] if region is None else region
        self.flow.add(node, here)
        self.made.update((v, here) for v in node.writes)
        self.producers.update((v, node.op) for v in node.writes)

    def _of(self, t: Tensor) -> int:
        whole = self.graph.storages[t.storage].nbytes // max(1, t.itemsize)
        return self.flow.value(max(whole, 1), t.itemsize, t.id, t.storage)

    def _overwritten(self, op: Op) -> list[Tensor]:
        out = "out" in op.overload or bool(_OVERWRITES.match(op.name))
        found = [self.graph.tensors[i] for i in {*op.writes, *op.outputs}] if out else []
        return [t for t in found if t.nbytes >= self.graph.storages[t.storage].nbytes]

    def _key(self, op: Op) -> Any:
        gone = {t.id for t in self._overwritten(op)}

        def of(value: Any) -> Any:
            if isinstance(value, Ref):
                t = self.graph.tensors[value.id]
                return ("-" if t.id in gone else self.read(t), *self._shape(t))
            return tuple(of(v) for v in value) if isinstance(value, list) else (type(value).__name__, value)

        return tuple(of(v) for v in op.inputs)

    def _shape(self, t: Tensor) -> tuple[Any, ...]:
        return t.shape, t.strides, t.offset, t.dtype


def _once(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
