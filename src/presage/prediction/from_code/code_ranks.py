"""How code spreads a transformer over ranks, from the collectives and messages of its process groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from presage.graph.graph import Graph
from presage.graph.work import collective, collective_bytes
from presage.prediction.from_code.step_layers import Layer, not_described

NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
REDUCES = ("all_reduce", "reduce_scatter")
LEAST = 1 << 12  # numbers: less is a loss, a norm or a count


class Transfer(NamedTuple):
    """A collective or a message among a step's ops."""

    place: int
    kind: str
    group: str
    ranks: int
    numbers: int
    itemsize: int
    phase: str


@dataclass
class CodeRanks:
    """Degrees of parallelism, what is sharded, in which widths it is sent, and what of it no job file says."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    pp: int = 1
    virtual: int = 1
    schedule: str = ""
    layers_as: tuple[int, ...] = ()
    zero: int = 0
    fsdp: bool = False
    shard: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0
    buckets: int = 0  # reductions of gradients in a step
    reduces_beside: bool = True  # gradients are sent while others are computed
    head_split: bool = False
    ulysses: bool = False
    notes: list[str] = field(default_factory=list)


def transfers(graph: Graph) -> list[Transfer]:
    """The collectives and messages of a step in groups of several ranks."""
    out = []
    for place, op in enumerate(graph.ops):
        kind, ranks = collective(op), len(graph.groups.get(op.group, ()))
        if kind is None or ranks < 2:
            continue
        width = next((t.itemsize for t in graph.inputs_of(op)), 1)
        out.append(Transfer(place, kind, op.group, ranks, collective_bytes(graph, op) // width, width, op.phase))
    return out


def code_ranks(graph: Graph, layers: Sequence[Layer]) -> CodeRanks:
    """How one rank's step is spread, stages aside."""
    found, out = [t for t in transfers(graph) if t.numbers >= LEAST], CodeRanks()
    rest = _tensor(graph, layers, found, out)
    rest = _context(layers, rest, out)
    rest = _sharded(rest, out)
    _reduced(graph, rest, out)
    return out


def _tensor(graph: Graph, layers: Sequence[Layer], found: list[Transfer], out: CodeRanks) -> list[Transfer]:
    """Activations that are added up in the forward pass: tensor parallelism."""
    whole = layers[0].proj.rows * layers[0].hidden
    sums = [t for t in found if t.phase == "forward" and t.kind in REDUCES and t.numbers == whole]
    if len(sums) < len(layers):
        return found
    name = sums[0].group
    out.tp, out.sequence_parallel = sums[0].ranks, any(t.kind == "reduce_scatter" for t in sums)
    heads = [p.place for x in layers for p in x.after]
    later = [t for t in transfers(graph) if t.group == name and t.phase == "forward"]
    out.head_split = bool(heads) and any(t.place > heads[-1] for t in later)
    return [t for t in found if t.group != name]


def _context(layers: Sequence[Layer], found: list[Transfer], out: CodeRanks) -> list[Transfer]:
    """Keys gathered over ranks, or heads exchanged for rows; tokens exchanged between experts."""
    a = layers[0].attention
    swaps = [t for t in found if t.kind == "all_to_all" and t.phase == "forward"]
    if swaps and any(x.experts for x in layers):
        out.ep = swaps[0].ranks
    elif swaps:
        out.cp, out.ulysses = swaps[0].ranks, True
        out.notes.append("ranks exchange heads for rows around attention (Ulysses): a job's cp ranks gather keys")
    if a.keys > a.queries and a.keys % a.queries == 0:
        out.cp = a.keys // a.queries
        keys = {a.batch * a.keys * n * layers[0].kv_heads * a.dim for n in (1, 2)}
        found = [t for t in found if not (t.kind == "all_gather" and t.numbers in keys)]
    return [t for t in found if t.kind != "all_to_all"]


def _sharded(found: list[Transfer], out: CodeRanks) -> list[Transfer]:
    """Parameters that are gathered: before each use (FSDP, ZeRO-3), or after the optimizer (ZeRO-1)."""
    gathers = [t for t in found if t.kind in ("all_gather", "broadcast")]
    ahead = [t for t in gathers if t.phase == "forward" and t.kind == "all_gather"]
    again = [t for t in gathers if t.phase == "backward" and t.kind == "all_gather"]
    late = [t for t in gathers if t.phase in ("optimizer", "other")]
    if ahead:
        out.fsdp, out.zero = True, 3 if len(again) > len(ahead) / 2 else 2
    elif late:
        out.zero = 1
    if used := ahead or late:
        most = max(used, key=lambda t: t.numbers)
        out.shard, out.gather_bytes = most.ranks, most.itemsize
    return [t for t in found if t not in gathers]


def _reduced(graph: Graph, found: list[Transfer], out: CodeRanks) -> None:
    """Gradients: all-reduced between replicas, or scattered over those that share them."""
    begun = next((i for i, op in enumerate(graph.ops) if op.phase == "backward"), len(graph.ops))
    sums = [t for t in found if t.kind in REDUCES and t.place > begun]
    if not sums:
        return
    most = max(sums, key=lambda t: t.numbers)
    out.reduce_bytes, out.buckets = most.itemsize, sum(t.group == most.group for t in sums)
    last = max((i for i, op in enumerate(graph.ops) if op.phase == "backward" and not op.group), default=0)
    out.reduces_beside = sums[0].place < last
    if out.zero == 1 and not any(t.kind == "reduce_scatter" for t in sums):
        out.notes.append("each rank gets all gradients, and updates its part (ZeRO-1): a job's ranks get their part")


# ---- stages of a pipeline


def add_stages(
    graphs: Sequence[Graph], stages: Sequence[Sequence[Layer]], counts: Sequence[int], out: CodeRanks
) -> int:
    """The stages that exchange messages, in their order; returns the layers of all."""
    if not any(t.kind == "send_recv" for t in transfers(graphs[0])):
        return counts[0]
    seen: dict[tuple[str, ...], int] = {}
    for graph, layers, count in zip(graphs, stages, counts, strict=True):
        seen.setdefault(tuple(dict.fromkeys(graph.ops[x.attention.place].module for x in layers)), count)
    out.pp = len(seen)
    first = graphs[0]
    runs = [_runs(modules) for modules in seen]
    if len(set(runs)) > 1:
        raise not_described(first, f"stages have {' and '.join(map(str, sorted(set(runs))))} chunks of layers")
    out.virtual = runs[0]
    if out.virtual == 1 and len(set(seen.values())) > 1:
        out.layers_as = tuple(seen.values())
    begun = next((i for i, op in enumerate(first.ops) if op.phase == "backward" and op.kernels), 0)
    gpipe = begun > max(x.attention.place for x in stages[0])
    out.schedule = "gpipe" if gpipe and out.virtual == 1 else "interleaved" if out.virtual > 1 else "1f1b"
    return sum(seen.values())


def _runs(modules: Sequence[str]) -> int:
    """Chunks of layers that follow each other, by the numbers in their names."""
    numbers = sorted(int(found[0]) for m in modules if (found := NUMBER.findall("." + m)))
    return 1 + sum(b > a + 1 for a, b in pairwise(numbers))
