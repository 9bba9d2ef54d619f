"""Where the ranks of a group sum what each has a share of: one all-reduce for what is added up before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op

__all__ = ["reduces"]

_COPIES = frozenset(("aten::copy_", "aten::_to_copy", "aten::clone"))
_ADDS = frozenset(("aten::add", "aten::add_"))


@dataclass(slots=True)
class _Share:
    """A share of a sum that is not reduced yet: whose it is, and the op after which it is complete."""

    owner: tuple[int, str]
    place: int
    tensor: int


def reduces(graph: Graph, sums: Sequence[Mapping[int, set[int]]]) -> list[tuple[int, int]]:
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
            line.made(_Share(owner, place, i), op.phase == "forward")
    line.end()
    return sorted(set(line.done))


class _Line:
    """A walk over the ops with the shares that wait to be reduced, by the memory they are in."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: list[tuple[int, int]] = []
        self._open: dict[int, _Share] = {}

    def made(self, share: _Share, at_once: bool) -> None:
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
