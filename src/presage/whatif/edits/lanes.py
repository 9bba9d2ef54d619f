"""Lanes: ops over lists of tensors taken apart, and the chains of ops that work on the same memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from presage.graph.graph import Graph, Op, Ref, aten, references

FOREACH, FUSED = "aten::_foreach_", "aten::_fused_"
# What an optimizer's step does on the host alone: count its steps, and read the count.
HOST = set(aten("add_ empty_strided copy_ _local_scalar_dense empty to lift_fresh _foreach_add_"))
LISTED = (FOREACH, FUSED, "aten::_amp_foreach_")
Key: TypeAlias = tuple[int, int]  # a tensor's storage and where in it: flat memory holds many


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of an op."""

    place: int
    stem: str  # 'addcmul': without what says that it works on lists, or in place
    operands: tuple[int, ...]
    output: int | None  # where it is new
    scalar: float | None


def key(graph: Graph, tensor: int) -> Key:
    t = graph.tensors[tensor]
    return t.storage, t.offset


def lane_count(op: Op) -> int:
    """The number of tensors in the lists of an op that works on lists; 0 for any other."""
    if not op.name.startswith(LISTED):
        return 0
    lists = [a for a in op.inputs if isinstance(a, list)]
    return max((len(a) for a in lists if any(isinstance(x, Ref) for x in a)), default=0)


def parts(graph: Graph, place: int, op: Op) -> Iterator[Part]:
    """An op, a list's taken apart. A tensor that an op over lists has for all of them is no lane's."""
    stem = op.name.removeprefix(FOREACH).removeprefix("aten::").rstrip("_")
    count = lane_count(op)
    if not count:
        refs = tuple(references(op.inputs))
        old = {key(graph, r) for r in refs}
        new = [o for o in op.outputs if key(graph, o) not in old]
        yield Part(place, stem, refs, new[0] if new else None, _number(op.inputs))
    for lane in range(count):
        inputs = [a[lane] if isinstance(a, list) and lane < len(a) else a for a in op.inputs]
        mine = [x for a, x in zip(op.inputs, inputs, strict=True) if isinstance(a, list)]
        output = op.outputs[lane] if lane < len(op.outputs) else None
        yield Part(place, stem, tuple(references(mine)), output, _number(inputs))


def _number(inputs: Sequence[object]) -> float | None:
    """The scalar of an elementary op: the last of its numbers but for a factor 1."""
    numbers = [float(a) for a in inputs if isinstance(a, int | float) and not isinstance(a, bool)]
    return next((n for n in reversed(numbers) if n != 1 or len(numbers) == 1), 1.0) if numbers else None


def chains(graph: Graph, found: Sequence[Part]) -> list[list[Part]]:
    """Parts that share memory, each set in order."""
    root: dict[Key, Key] = {}

    def find(one: Key) -> Key:
        while root.setdefault(one, one) != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    for p in found:
        keys = [key(graph, t) for t in (*p.operands, *([p.output] if p.output is not None else []))]
        for other in keys[1:]:
            root[find(other)] = find(keys[0])
    out: dict[Key, list[Part]] = defaultdict(list)
    for p in found:
        if p.operands:
            out[find(key(graph, p.operands[0]))].append(p)
    return list(out.values())


def host_ops(graph: Graph) -> dict[int, list[int]]:
    """Ops of the host's alone that an optimizer runs before each op of the GPU's."""
    out: dict[int, list[int]] = {}
    before: list[int] = []
    for i, op in enumerate(graph.ops):
        if op.phase != "optimizer":
            before = []
        elif op.kernels:
            out[i], before = before, []
        elif op.name in HOST and not op.inputs and not op.sync:
            before.append(i)
    return out
