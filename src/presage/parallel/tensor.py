"""Tensor parallelism: what one rank of a group runs that shares out pairs of linear layers, as Megatron does.

The first layer of a pair is cut along the features it gives, the second along those it takes; what lies between them
(heads of an attention, an activation) is cut alike. The pairs are found in the graph itself: a cut of one weight is
followed over every op, forward, backward and optimizer, to products that sum over it. There an all-reduce is due: after
the second layer, and, on the way back, after the first. Where the cut meets an op that needs its dimension whole, the
layer stays whole and the graph's notes say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import Graph, Op, Ref, Storage, Tensor, references
from presage.parallel.cuts import cut_bytes, cut_tensor, find_cut
from presage.parallel.tensor_regions import (
    SplitGraph,
    SplitRegion,
    SplitSeed,
    find_reduces,
    grow_region,
    vocabulary_seeds,
    weight_seeds,
)


def tensor_parallel(graph: Graph, ranks: int, *, group: str = "tp", vocabulary: bool = False) -> Graph:
    """What one of `ranks` ranks runs. `vocabulary` shares out the classes too: embedding, head and loss.

    A bias of a second layer stays in its product, as if one rank added it.
    """
    if ranks < 1:
        raise PresageError(f"tensor parallelism needs at least 1 rank, not {ranks}")
    if ranks == 1:
        return graph
    found = _regions(SplitGraph(graph, ranks, vocabulary))
    if not found.regions:
        reasons = "; ".join(found.notes()) or "it has no products with a parameter"
        raise PresageError(f"tensor parallelism finds no pair of linear layers to share out: {reasons}")
    builder = GraphBuilder(graph)
    _cut(builder, found.regions, ranks)
    _communicate(builder, found.regions, group)
    builder.notes += [f"tensor parallel: {note}" for note in (*found.notes(), *_spare_copies(builder))]
    return builder.build()


@dataclass(slots=True)
class _Found:
    """What is cut together, and the modules left whole by the reason."""

    regions: list[SplitRegion] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # periods of the memory cut so far, 0 where it is only repeated
    left: dict[str, list[str]] = field(default_factory=dict)

    def notes(self) -> list[str]:
        return [f"{_listed(modules)} left whole: {why}" for why, modules in self.left.items()]


def _regions(graph: SplitGraph) -> _Found:
    """What each weight's cut reaches, in the order of the forward pass; those that an earlier one reached are done."""
    result = _Found()
    for seed in weight_seeds(graph):
        _try(graph, seed, result)
    if graph.vocabulary:
        for seed in vocabulary_seeds(graph, result.regions):
            _try(graph, seed, result)
    return result


def _try(graph: SplitGraph, seed: SplitSeed, found: _Found) -> None:
    weight = graph.weights[graph.graph.tensors[seed.weight].storage]
    if weight in found.taken:
        return
    region, why = grow_region(graph, seed, found.taken)
    if region is not None:
        found.regions.append(region)
        found.taken.update(region.periods)
        found.taken.update({graph.graph.tensors[i].storage: 0 for i in region.repeats})
    else:
        name = graph.graph.storages[weight].name.removesuffix(".weight")
        found.left.setdefault(why, []).append(graph.graph.ops[seed.op].module or name or "a weight")


def _listed(modules: Sequence[str]) -> str:
    unique = list(dict.fromkeys(modules))
    return ", ".join(unique) if len(unique) <= 4 else f"{', '.join(unique[:3])} and {len(unique) - 3} more"


# ---- tensors, memory and sizes


def _cut(builder: GraphBuilder, regions: Sequence[SplitRegion], ranks: int) -> None:
    """Tensors, memory and the sizes among arguments, as one rank has them."""
    periods = {s: p for r in regions for s, p in r.periods.items()}
    graph = builder.source
    for t in graph.tensors:
        if t.storage in periods and t.elements:
            period = periods[t.storage]
            builder.tensors[t.id] = cut_tensor(t, find_cut(t, period, ranks), ranks, period)
    for r in regions:
        for i, cut in r.repeats.items():
            builder.tensors[i] = cut_tensor(graph.tensors[i], cut, ranks)
    for s in _unseen(graph, periods):
        builder.storages[s] = replace(graph.storages[s], nbytes=graph.storages[s].nbytes // ranks)
    for s, period in periods.items():
        builder.storages[s] = replace(graph.storages[s], nbytes=cut_bytes(graph.storages[s].nbytes, period, ranks))
    changed = {t.id for t in graph.tensors if builder.tensors[t.id] is not t}
    for place, one in enumerate(graph.ops):
        if any(i in changed for i in (*references(one.inputs), *one.outputs)):
            builder.ops[place] = _resized(one, graph.tensors, builder.tensors, changed)


def _unseen(graph: Graph, periods: Mapping[int, int]) -> list[int]:
    """Memory that no tensor is seen in: gradients of the step before, of parameters that are cut."""
    seen = {t.storage for t in graph.tensors}

    def key(s: Storage) -> tuple[str, int]:
        return s.name, s.nbytes

    cut = {key(graph.storages[s]) for s in periods if graph.storages[s].role in ("parameter", "gradient", "input")}
    return [s.id for s in graph.storages if s.role == "gradient" and s.id not in seen and key(s) in cut]


def _resized(one: Op, old: Sequence[Tensor], new: Sequence[Tensor], changed: set[int]) -> Op:
    """The op with other sizes in its arguments, where they are those of a tensor that changed."""
    ids = [i for i in (*one.outputs, *references(one.inputs)) if i in changed]

    def sized(value: Any) -> Any:
        if not isinstance(value, list) or not value or not all(isinstance(v, int) for v in value):
            return value
        for i in ids:
            if len(old[i].shape) == len(value) and all(v in (-1, n) for v, n in zip(value, old[i].shape, strict=True)):
                return [v if v == -1 else n for v, n in zip(value, new[i].shape, strict=True)]
        return value

    inputs = tuple(sized(v) for v in one.inputs)
    if one.name == "aten::embedding_dense_backward":
        inputs = (*inputs[:2], new[one.outputs[0]].shape[0], *inputs[3:])
    return one if inputs == one.inputs else replace(one, inputs=inputs)


def _spare_copies(builder: GraphBuilder) -> list[str]:
    """A reshape copies what it cannot view; a dimension that shrinks to one may be no hindrance any more."""
    old, new = builder.source.tensors, builder.tensors
    shrunk = {
        t.id
        for t in old
        if 1 in new[t.id].shape and new[t.id].shape != t.shape and t.shape.count(1) < new[t.id].shape.count(1)
    }
    copies = sum(
        one.name == "aten::copy_" and "aten::reshape" in one.within and any(i in shrunk for i in references(one.inputs))
        for one in builder.ops
    )
    return [f"{copies} copies in reshapes are kept, though one head a rank may not need them"] if copies else []


# ---- communication


def _communicate(builder: GraphBuilder, regions: Sequence[SplitRegion], group: str) -> None:
    """All-reduces: of shares of sums, of what a softmax over shared classes needs, of a gradient norm."""
    for place, i in find_reduces(builder.source, [r.sums for r in regions]):
        builder.after(place, _all_reduce(i, builder.source.ops[place], group))
    for place in sorted(p for r in regions for p in r.softmaxes):
        _share_classes(builder, place, group)
    if any(r.norms for r in regions):
        _share_norm(builder, max(p for r in regions for p in r.norms), group)


def _all_reduce(i: int, like: Op, group: str) -> Op:
    return new_op("c10d::allreduce_", [[Ref(i)]], writes=(i,), like=like, stream=group, group=group)


def _share_classes(builder: GraphBuilder, place: int, group: str) -> None:
    """A softmax needs the highest and the sum of each row over all ranks, a loss the score of the right class."""
    like = builder.ops[place]
    x = builder.tensors[next(i for i in references(like.inputs) if len(builder.tensors[i].shape) > 1)]
    rows = x.elements // x.shape[-1]
    for _ in range(2 if like.name == "aten::_log_softmax" else 1):
        buffer = builder.add_buffer(rows, "float32", "activation")
        builder.after(place, _all_reduce(buffer, like, group))


def _share_norm(builder: GraphBuilder, place: int, group: str) -> None:
    """The norm of all gradients, once the ranks' own are known."""
    totals = (p for p in range(place + 1, len(builder.ops)) if builder.ops[p].name == "aten::linalg_vector_norm")
    where = next(totals, place)
    builder.after(where, _all_reduce(builder.ops[where].outputs[0], builder.ops[where], group))
