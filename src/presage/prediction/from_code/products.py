"""Matrix products and attention of a captured step, in the sizes that a description of a transformer has."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from presage.graph.families import family
from presage.graph.graph import Graph, Op, Tensor, argument, flag, optional_tensor, references

FIRST = {"mm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "bmm": 0} | dict.fromkeys(
    ("addmm", "_addmm_activation", "baddbmm"), 1
)  # where the left operand is among the inputs
STYLES = {"cudnn": "flash3", "efficient": "flash1"}  # the law of a fused attention by its kernel; others: flash2
GRADIENT = re.compile("mmBackward|CompiledFunctionBackward")  # around products of a backward pass
PADDED = 0.005
FAR = 400  # ops that a value is followed back over


class Product(NamedTuple):
    """y[rows, outputs] = x[rows, inputs] w, or one for each of several groups."""

    place: int  # in the graph's ops
    rows: int  # of all groups together
    outputs: int
    inputs: int
    groups: int
    weight: int  # a tensor
    bias: bool
    batched: bool  # each group has rows of its own in a dimension of its own (bmm)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.outputs * self.inputs


class Attention(NamedTuple):
    """One attention forward; of scores held in memory, heads are those of the whole batch until it is known."""

    place: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value: int
    causal: bool | None  # None: a mask, or scores in memory, do not say
    window: int
    style: str  # flash1, flash2, flash3 or unfused
    inputs: tuple[int, ...]  # tensors: queries, keys, values
    dropout: bool
    last: int  # place of its last op


class StepProducts:
    """The products and the attention of a graph, and which op wrote what."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def products(self) -> list[Product]:
        """Products with a weight, in order; those of attention's scores are left out."""
        scored = {place for a in self.attention for place in (a.place, a.last)}
        return [p for p in self._every if p.place not in scored]

    @cached_property
    def _every(self) -> list[Product]:
        return [p for i, op in enumerate(self.graph.ops) if (p := _product(self.graph, i, op)) is not None]

    @cached_property
    def attention(self) -> list[Attention]:
        """Attention in order; scores in memory count where no attention is fused."""
        fused = [a for i, op in enumerate(self.graph.ops) if (a := _fused(self.graph, i, op)) is not None]
        return fused or list(self._unfused())

    def _unfused(self) -> Iterator[Attention]:
        """Two batched products, of which the second takes scores as the first gave them."""
        graph = self.graph
        before: Product | None = None
        batched = (p for p in self._every if p.batched and p.rows > p.groups and p.inputs > 1)
        for p in (p for p in batched if not GRADIENT.search(" ".join(graph.ops[p.place].within))):
            if before is None or (before.groups, before.rows, before.outputs) != (p.groups, p.rows, p.inputs):
                before = p
                continue
            left = graph.ops[before.place]
            ids = next(references([left.inputs[FIRST[_short(left)]]])), before.weight, p.weight
            sizes = before.groups, before.groups, before.rows // before.groups, before.outputs, before.inputs, p.outputs
            dropped = any("dropout" in op.name for op in graph.ops[before.place : p.place])
            yield Attention(before.place, 0, *sizes, None, 0, "unfused", ids, dropped, p.place)
            before = None

    # ---- where values come from

    @cached_property
    def _writers(self) -> dict[int, list[int]]:
        out: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.graph.ops):
            for storage in {self.graph.tensors[t].storage for t in (*op.outputs, *op.writes)} if op.kernels else ():
                out[storage].append(i)
        return out

    def writer(self, tensor: int, before: int) -> int | None:
        """The last op ahead of a place that wrote what a tensor looks at."""
        places = self._writers.get(self.graph.tensors[tensor].storage, [])
        at = bisect_left(places, before)
        return places[at - 1] if at else None

    def back(self, tensor: int, place: int, after: int = -1, stop: frozenset[int] = frozenset()) -> list[int]:
        """Ops that a tensor's value passed through, nearest first, back to those in `stop` or ahead of `after`."""
        found: list[int] = []
        left = [(tensor, place)]
        while left and len(found) < FAR:
            one, before = left.pop(0)
            at = self.writer(one, before)
            if at is None or at <= after or at in found:
                continue
            found.append(at)
            if at not in stop:
                left += [(t, at) for t in references(self.graph.ops[at].inputs)]
        return found

    def storages_behind(self, tensor: int, place: int) -> set[int]:
        """Storages that a weight is a copy of, its own first: casts and views of a parameter lead to it."""
        out, one, before = {self.graph.tensors[tensor].storage}, tensor, place
        while (at := self.writer(one, before)) is not None and len(out) < FAR:
            same = [t for t in references(self.graph.ops[at].inputs) if _alike(self.graph, t, tensor)]
            fresh = [t for t in same if self.graph.tensors[t].storage not in out]
            if len(fresh) != 1 or self.graph.ops[at].name.startswith("aten::_foreach"):  # shards of several parameters
                break
            one, before = fresh[0], at
            out.add(self.graph.tensors[one].storage)
        return out


def _alike(graph: Graph, one: int, other: int) -> bool:
    """As many numbers; compiled code may pad a weight."""
    a, b = graph.tensors[one].elements, graph.tensors[other].elements
    return abs(a - b) <= PADDED * max(a, b)


def _short(op: Op) -> str:
    return op.name.removeprefix("aten::").removesuffix("_")


def _product(graph: Graph, place: int, op: Op) -> Product | None:
    at = FIRST.get(_short(op)) if op.name.startswith("aten::") else None
    if at is None:
        return None
    a, b = optional_tensor(graph, op, at), optional_tensor(graph, op, at + 1)
    if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2:
        return None
    groups, batched = (b.shape[0], len(a.shape) == 3) if len(b.shape) == 3 else (1, False)
    rows = a.shape[-2] * (a.shape[0] if batched else 1)
    first = optional_tensor(graph, op, 0)
    bias = at == 1 and first is not None and len(first.shape) == 1
    return Product(place, rows, b.shape[-1], a.shape[-1], groups, b.id, bias, batched)


def _fused(graph: Graph, place: int, op: Op) -> Attention | None:
    if family(op.name) != "attention" or not op.kernels or "backward" in op.name:
        return None
    q, k, v = (optional_tensor(graph, op, at) for at in range(3))
    if q is None or k is None or v is None or len(q.shape) not in (3, 4):
        return None
    causal = flag(op, "is_causal") or flag(op, "causal") or flag(op, "custom_mask_type")
    masked = "flash" not in op.name and optional_tensor(graph, op, 3) is not None
    window = argument(op, "window_size_left")
    style = next((s for name, s in STYLES.items() if name in op.name), "flash2")
    dropout = argument(op, "dropout_p")
    return Attention(
        place, *_sizes(op, q, k), q.shape[-1], v.shape[-1], causal or (None if masked else False),
        window + 1 if isinstance(window, int) and window > 0 else 0, style, (q.id, k.id, v.id),
        isinstance(dropout, float) and dropout > 0, place,
    )  # fmt: skip


def _sizes(op: Op, q: Tensor, k: Tensor) -> tuple[int, int, int, int, int]:
    """Batch, heads of queries and keys, rows of both; sequences laid end to end count as the longest."""
    if len(q.shape) == 4:
        heads_at = 1 if "cudnn" in op.name or "scaled_dot_product" in op.name else 2
        return q.shape[0], q.shape[heads_at], k.shape[heads_at], q.shape[3 - heads_at], k.shape[3 - heads_at]
    longest = argument(op, "max_q") or argument(op, "max_seqlen_q")
    rows = longest if isinstance(longest, int) and longest else q.shape[0]
    return max(1, q.shape[0] // rows), q.shape[1], k.shape[1], rows, rows
