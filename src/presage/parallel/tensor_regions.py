"""How far a cut reaches: from one weight over all that must be cut with it, to where sums over the ranks are due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from presage.graph.graph import Graph, Op, Tensor, references
from presage.parallel.cuts import CannotSplit, Cut, UnevenSplit, cut_bytes, find_cut, period_of
from presage.parallel.tensor_rules import Place, SplitRule, matrices, split_rules

_CASTS = ("aten::copy_", "aten::_to_copy")


@dataclass(frozen=True, slots=True)
class SplitSeed:
    """A weight of the forward pass that might be cut along the features it gives."""

    op: int
    weight: int  # the tensor, as the product has it
    dim: int
    output: int  # the tensor the product gives


@dataclass(slots=True)
class SplitRegion:
    """All that is cut together: memory by its period, tensors of whole memory that only repeat it, and the sums due."""

    periods: dict[int, int] = field(default_factory=dict)  # by storage, bytes
    repeats: dict[int, Cut] = field(default_factory=dict)  # by tensor
    sums: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # outputs by op
    norms: set[int] = field(default_factory=set)  # ops that sum squares of gradients
    softmaxes: set[int] = field(default_factory=set)
    ops: set[int] = field(default_factory=set)


class SplitGraph:
    """A graph, by who touches what."""

    def __init__(self, graph: Graph, ranks: int, vocabulary: bool) -> None:
        self.graph, self.ranks, self.vocabulary = graph, ranks, vocabulary
        self.tensors: dict[int, list[int]] = defaultdict(list)  # of a storage
        self.ops: dict[int, list[int]] = defaultdict(list)  # that launch kernels, of a tensor
        self._tables: dict[int, Mapping[Place, SplitRule] | None] = {}
        for t in graph.tensors:
            if t.elements:
                self.tensors[t.storage].append(t.id)
        for place, op in enumerate(graph.ops):
            if op.kernels:
                for i in dict.fromkeys([*references(op.inputs), *op.outputs]):
                    self.ops[i].append(place)
        self.weights = _weights(graph)

    def table(self, place: int) -> Mapping[Place, SplitRule] | None:
        if place not in self._tables:
            self._tables[place] = split_rules(self.graph, self.graph.ops[place], self.vocabulary)
        return self._tables[place]

    def scratch(self, place: int) -> int | None:
        """The scratch tensor of an attention's backward, which has a share for each head."""
        ops = self.graph.ops
        if not ops[place].name.endswith("_attention_backward"):
            return None
        for op in ops[place + 1 : place + 12]:
            if op.name == "aten::empty" and op.outputs and ops[place].name in op.within:
                return op.outputs[0]
        return None


def _weights(graph: Graph) -> dict[int, int]:
    """Storages that hold parameters, or casts of them, and the parameter's own."""
    trained = {graph.tensors[i].storage for op in graph.ops if op.phase == "optimizer" for i in op.writes}
    result = {s.id: s.id for s in graph.storages if s.role == "parameter" or (s.role == "input" and s.id in trained)}
    for op in graph.ops:
        if op.name in _CASTS and op.kernels and len(op.outputs) == 1 and op.phase != "optimizer":
            out = graph.tensors[op.outputs[0]]
            sources = [t for t in graph.inputs_of(op) if t.id != out.id]
            if len(sources) == 1 and sources[0].storage in result and sources[0].shape == out.shape:
                result[out.storage] = result[sources[0].storage]
    return result


def grow_region(graph: SplitGraph, seed: SplitSeed, taken: Mapping[int, int]) -> tuple[SplitRegion | None, str]:
    """The region that a seed's cut reaches, or None and why it cannot be cut.

    The cut may repeat within the weight's features (a query, a key and a value, each cut by heads): how often, the
    views of the output tell. What divides evenly is tried, the longest first.
    """
    features = graph.graph.tensors[seed.weight].shape[seed.dim]
    tried: dict[int, CannotSplit] = {}
    waiting = [features]
    while waiting:
        waiting.sort()
        period = waiting.pop()
        walk = _Walk(graph, taken)
        why = walk.run(seed, period)
        if why is None:
            return walk.region, ""
        tried[period] = why
        new = _periods(graph, seed, walk.region, features)
        waiting += [p for p in new if p not in tried and p not in waiting and p >= graph.ranks]
    uneven = [str(why) for why in tried.values() if isinstance(why, UnevenSplit)]
    return None, uneven[-1] if uneven else str(tried[features])


def _periods(graph: SplitGraph, seed: SplitSeed, region: SplitRegion, features: int) -> set[int]:
    """Lengths that views of the output, or of copies of it, cut its features into."""
    output = graph.graph.tensors[seed.output]
    found = set()
    for storage in region.periods:
        for i in graph.tensors[storage]:
            t = graph.graph.tensors[i]
            if t.elements <= output.elements:
                found |= {n * s for n, s in zip(t.shape, t.strides, strict=True)}
    return {p for p in found if 1 < p < features and features % p == 0}


class _Walk:
    """One attempt: every tensor of the memory that is cut, every op that touches one, every other tensor of that op."""

    def __init__(self, graph: SplitGraph, taken: Mapping[int, int]) -> None:
        self.map, self.taken = graph, taken
        self.region = SplitRegion()
        self._waiting: list[tuple[int, int, Cut]] = []

    def run(self, seed: SplitSeed, period: int) -> CannotSplit | None:
        """Why it fails; None if it does not."""
        try:
            self._demand(seed.weight, Cut(seed.dim, period))
            while self._waiting:
                _, i, cut = heappop(self._waiting)
                for place in self.map.ops[i]:
                    self._visit(place, i, cut)
            self._settled(seed)
        except CannotSplit as why:
            return why
        return None

    def _demand(self, i: int, cut: Cut) -> None:
        t = self.map.graph.tensors[i]
        size, stride = t.shape[cut.dim], t.strides[cut.dim]
        if size == 1 or not t.elements:
            return
        if cut.period % self.map.ranks:
            raise UnevenSplit(f"{cut.period} features", self.map.ranks)
        if size % cut.period:
            raise CannotSplit(f"{size} features do not repeat a cut of {cut.period}")
        if stride == 0:
            if i not in self.region.repeats:
                self.region.repeats[i] = cut
                self._wait(i, cut)
            elif self.region.repeats[i] != cut:
                raise CannotSplit("a tensor would be cut in two ways")
            return
        self._cut_memory(t, period_of(t, cut))
        if find_cut(t, self.region.periods[t.storage], self.map.ranks) != cut:
            raise CannotSplit("a tensor would be cut in two ways")

    def _cut_memory(self, t: Tensor, period: int) -> None:
        if t.storage in self.taken:
            raise CannotSplit("it would cut again what is cut with another layer")
        if t.storage not in self.region.periods:
            self.region.periods[t.storage] = period
            cut_bytes(self.map.graph.storages[t.storage].nbytes, period, self.map.ranks)
            for i in self.map.tensors[t.storage]:
                self._wait(i, find_cut(self.map.graph.tensors[i], period, self.map.ranks))
        elif self.region.periods[t.storage] != period:
            raise CannotSplit("a tensor would be cut in two ways")

    def _wait(self, i: int, cut: Cut) -> None:
        """Tensors that the step uses sooner come first, so that what bars a cut is told where it is met first."""
        if self.map.ops[i]:
            heappush(self._waiting, (self.map.ops[i][0], i, cut))

    def _visit(self, place: int, i: int, cut: Cut) -> None:
        op = self.map.graph.ops[place]
        table = self.map.table(place)
        if table is None:
            raise CannotSplit(f"no rule says how to share out {_name(op)}")
        link = table.get((i, cut.dim))
        if link is None or link.whole:
            raise CannotSplit(f"{_name(op)} needs it whole")
        self.region.ops.add(place)
        self._note(place, op, link)
        size = self.map.graph.tensors[i].shape[cut.dim]
        for j, dim in link.places:
            if (j, dim) != (i, cut.dim):
                other = self.map.graph.tensors[j].shape[dim]
                period = cut.period * other // size if link.scaled else cut.period
                self._demand(j, Cut(dim, period))
        scratch = self.map.scratch(place) if link.scaled else None
        if scratch is not None:
            self._demand(scratch, Cut(0, self.map.graph.tensors[scratch].elements))

    def _note(self, place: int, op: Op, link: SplitRule) -> None:
        if link.softmax:
            self.region.softmaxes.add(place)
        if link.norms:
            self.region.norms.add(place)
        elif link.sums:
            if not self._may_sum(op):
                raise CannotSplit(f"{_name(op)} sums over it")
            self.region.sums[place].update(link.sums)

    def _may_sum(self, op: Op) -> bool:
        """A product with a weight gives a share of a sum; so do, on the way back, gradients of what all ranks have."""
        factors = matrices(self.map.graph, op)
        if factors:
            return any(t.storage in self.map.weights for t in factors[:2])
        return op.phase != "forward" or bool(self.region.softmaxes) or op.name == "aten::gather"

    def _settled(self, seed: SplitSeed) -> None:
        graph, region = self.map.graph, self.region
        for place, outputs in region.sums.items():
            if any(graph.tensors[i].storage in region.periods for i in outputs):
                raise CannotSplit(f"{_name(graph.ops[place])} would be cut and summed at once")
        cut = region.periods.keys() | {s for s, period in self.taken.items() if period}
        if any(graph.tensors[i].storage in cut for i in region.repeats):
            raise CannotSplit("a tensor would be cut in two ways")
        lookup = graph.ops[seed.op].name == "aten::gather"
        ends = [p for p in region.sums if graph.ops[p].phase == "forward" and (lookup or p != seed.op)]
        if not ends and not region.softmaxes:
            raise CannotSplit("no second linear layer follows")


def _name(op: Op) -> str:
    where = f" in {op.module}" if op.module else ""
    return f"{op.name.removeprefix('aten::')}{where}"


def vocabulary_seeds(graph: SplitGraph, regions: Iterable[SplitRegion]) -> list[SplitSeed]:
    """Embeddings with a row for each class that a softmax shares out, to be cut along their rows."""
    ops = graph.graph.ops
    classes = {
        graph.graph.inputs_of(ops[p])[0].shape[-1] for r in regions for p in r.softmaxes if "softmax" in ops[p].name
    }
    result = []
    for place, op in enumerate(ops):
        if op.name == "aten::gather" and op.kernels and op.phase == "forward":
            table = graph.graph.inputs_of(op)[0]
            if table.storage in graph.weights and table.shape[0] in classes:
                result.append(SplitSeed(place, table.id, 0, op.outputs[0]))
    return result


def weight_seeds(graph: SplitGraph) -> list[SplitSeed]:
    """Weights of the forward pass in the order they are used, each once."""
    found: dict[int, SplitSeed] = {}
    for place, op in enumerate(graph.graph.ops):
        factors = matrices(graph.graph, op) if op.phase == "forward" else None
        if factors:
            a, b, out = factors
            for t, dim in ((b, len(b.shape) - 1), (a, len(a.shape) - 2)):
                if t.storage in graph.weights:
                    found.setdefault(graph.weights[t.storage], SplitSeed(place, t.id, dim, out.id))
                    break
    return list(found.values())


# ---- Where the ranks of a group sum what each has a share of: one all-reduce for what is added up before it is used

_COPIES = frozenset(("aten::copy_", "aten::_to_copy", "aten::clone"))
_ADDS = frozenset(("aten::add", "aten::add_"))


@dataclass(slots=True)
class _Share:
    """A share of a sum that is not reduced yet: whose it is, and the op after which it is complete."""

    owner: tuple[int, str]
    place: int
    tensor: int


def find_reduces(graph: Graph, sums: Sequence[Mapping[int, set[int]]]) -> list[tuple[int, int]]:
    """(place of an op, tensor) to all-reduce after it, for the shares that each region's ops leave.

    Forward, each is reduced at once. On the way back, shares of one owner, a region within a module (the gradients by
    way of query, key and value), are added up first, whatever else is added in between: that, one of the ranks adds.
    """
    shares = {(p, i): region for region, found in enumerate(sums) for p, ids in found.items() for i in ids}
    by_op: dict[int, list[int]] = {}
    for p, i in shares:
        by_op.setdefault(p, []).append(i)
    line = _Line(graph)
    for place, op in enumerate(graph.ops):
        if op.kernels:
            line.read(place, op)
        for i in sorted(by_op.get(place, ())):
            owner = shares[place, i], op.module.rpartition(".")[0]
            line.add(_Share(owner, place, i), op.phase == "forward")
    line.end()
    return sorted(set(line.done))


class _Line:
    """A walk over the ops with the shares that wait to be reduced, by the memory they are in."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: list[tuple[int, int]] = []
        self._open: dict[int, _Share] = {}

    def add(self, share: _Share, at_once: bool) -> None:
        if at_once:
            self.done.append((share.place, share.tensor))
        else:
            self._open[self.graph.tensors[share.tensor].storage] = share

    def read(self, place: int, op: Op) -> None:
        """An op meets shares that wait: it carries them on, adds them up, or needs them reduced."""
        if not self._open:
            return
        used = dict.fromkeys(self.graph.tensors[i].storage for i in references(op.inputs))
        met = list({id(s): s for u in used if (s := self._open.get(u))}.values())
        if not met:
            return
        if op.name in _COPIES and self.graph.tensors[op.outputs[0]].storage not in self._open:
            self._open[self.graph.tensors[op.outputs[0]].storage] = met[0]
        elif op.name in _ADDS:
            self._add(place, op, met)
        else:
            for share in met:
                self._reduce(share)

    def _add(self, place: int, op: Op, met: Sequence[_Share]) -> None:
        out = op.outputs[0]
        latest = max(met, key=lambda s: s.place)
        for share in met:
            if share.owner != latest.owner:
                self._reduce(share)
        same = [s for s in met if s.owner == latest.owner]
        if len(same) > 1:
            self._forget(same)
            latest = _Share(latest.owner, place, out)
        self._open[self.graph.tensors[out].storage] = latest

    def _reduce(self, share: _Share) -> None:
        self.done.append((share.place, share.tensor))
        self._forget([share])

    def _forget(self, shares: Sequence[_Share]) -> None:
        gone = {id(s) for s in shares}
        self._open = {k: s for k, s in self._open.items() if id(s) not in gone}

    def end(self) -> None:
        for share in {id(s): s for s in self._open.values()}.values():
            self.done.append((share.place, share.tensor))
