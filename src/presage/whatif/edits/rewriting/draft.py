"""A Draft: a graph that is being written anew from an old one, op by op, with the lifetimes that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.edit import spans
from presage.graph.graph import DTYPE_BYTES, Event, Graph, Op, Ref, Storage, Tensor
from presage.whatif.edits.memory_layout import contiguous

__all__ = ["Draft", "mapped"]


def mapped(value: Any, new: Any) -> Any:
    """An argument with its tensors replaced: `new` gives the id for an id."""
    if isinstance(value, Ref):
        return Ref(new(value.id))
    return [mapped(v, new) for v in value] if isinstance(value, list) else value


class Draft:
    """Tensors and storages of the old graph keep their ids until `done`; new ones come after them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: list[Op] = []
        self.tensors = list(graph.tensors)
        self.storages = list(graph.storages)
        self.starts: list[int] = []  # of each old op, where in the new ops its stretch begins
        self.ends: list[int] = []  # and ends
        self.nodes: list[tuple[int, int]] = []  # stretches of new ops that are one call or one backward node each
        self.facts = dict(graph.facts)
        self.heirs: dict[int, int] = {}  # storages that take the place of an old one: which
        self.replaced: set[int] = set()  # those whose place was taken
        self._known = {(t.storage, t.shape, t.strides, t.dtype, t.offset): t.id for t in graph.tensors}

    def begin(self, old: int) -> None:
        """What is added from here on stands for this op of the old graph."""
        while len(self.starts) <= old:
            self.close()
            self.starts.append(len(self.ops))

    def close(self) -> None:
        """What is added from here on stands for no op of the old graph."""
        if len(self.ends) < len(self.starts):
            self.ends.append(len(self.ops))

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def tensor(self, storage: int, shape: Sequence[int], strides: Sequence[int], dtype: str, offset: int = 0) -> Tensor:
        key = (storage, tuple(shape), tuple(strides), dtype, offset)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self.tensors.append(Tensor(len(self.tensors), *key[:4], offset=offset))
        return self.tensors[self._known[key]]

    def new(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, module: str = "") -> Tensor:
        """A tensor with memory of its own."""
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        self.storages.append(Storage(len(self.storages), nbytes, "activation", "", module))
        return self.tensor(len(self.storages) - 1, shape, contiguous(shape) if strides is None else strides, dtype)

    def resize(self, storage: int, nbytes: int) -> None:
        self.storages[storage] = replace(self.storages[storage], nbytes=nbytes)

    def inherit(self, heir: int, old: int) -> None:
        """The first storage is from now on what the second was: its name, its role, its end."""
        self.replaced.add(old)
        self.heirs[heir] = self.heirs.pop(old, old)

    def done(self) -> Graph:
        """The new graph, with only what its ops need and what was there before the step."""
        self.begin(len(self.graph.ops))
        self.close()
        for s in self.replaced:
            self.storages[s] = replace(self.storages[s], role="activation", name="")
        for heir, old in self.heirs.items():
            was = self.graph.storages[old]
            self.storages[heir] = replace(self.storages[heir], role=was.role, name=was.name, module=was.module)
        whole = replace(
            self.graph, ops=tuple(self.ops), tensors=tuple(self.tensors), storages=tuple(self.storages), events=(),
            facts=self.facts,
        )  # fmt: skip
        return _compact(replace(whole, events=_Lives(self, whole).events()))


class _Lives:
    """When each storage is taken and given back."""

    def __init__(self, draft: Draft, whole: Graph) -> None:
        old = draft.graph
        self.draft, self.starts, self.whole = draft, draft.starts, whole
        self.count = len(old.storages)
        self.taken = {e.storage: e.op for e in old.events if e.allocates}
        self.given = {e.storage: e.op for e in old.events if not e.allocates}
        self.first, self.last = spans(whole)
        _, self.old_last = spans(old)
        self.nodes = [start for start, _ in draft.nodes]
        self.order = {e.storage: i for i, e in enumerate(old.events) if e.allocates}

    def events(self) -> tuple[Event, ...]:
        out: list[tuple[int, bool, int, Event]] = []
        for s in range(len(self.whole.storages)):
            start, end = self._start(s), self._end(s)
            if start is not None:
                out.append((start, True, self.order.get(s, s), Event(start, s, True)))
            if end is not None:
                out.append((end, False, s, Event(end, s, False)))
        return tuple(e for *_, e in sorted(out, key=lambda x: x[:3]))

    def _start(self, s: int) -> int | None:
        """Before its first use, or where it was taken before, if that is earlier. None: there before the step."""
        if s < self.count and s not in self.taken:
            return None
        if s not in self.first:
            return self.starts[self.taken[s]] if self._scratch(s) else None
        return min(self.first[s], self.starts[self.taken[s]]) if s in self.taken else self.first[s]

    def _scratch(self, s: int) -> bool:
        """Memory that no op names, and whose op is still there."""
        if s in self.old_last or s not in self.taken:
            return False
        at = self.taken[s]
        return at + 1 < len(self.starts) and self.starts[at] < self.starts[at + 1]

    def _end(self, s: int) -> int | None:
        if s not in self.draft.heirs and s in self.draft.replaced:
            return self.last[s] + 1 if s in self.last else None
        if s in self.draft.heirs:
            model = self.draft.heirs[s]
            known = s in self.last and model in self.given
            return (self._held(model, s) or self._released(s)) if known else None
        if s >= self.count:
            return self._released(s) if s in self.last else None
        if s not in self.given or (s not in self.last and s in self.taken and not self._scratch(s)):
            return None
        return self._held(s, s) or self._released(s)

    def _held(self, old: int, s: int) -> int:
        """Until when something held the old storage, if the op that was the last to use it still is the last of `s`."""
        end = self.draft.ends[self.given[old] - 1] if self.given[old] else 0
        if old not in self.old_last or s not in self.last:
            return end
        last = self.old_last[old]
        same = self.starts[last] <= self.last[s] < self.draft.ends[last] and end > self.last[s]
        return end if same else 0

    def _released(self, s: int) -> int:
        """After the call, or the backward node, that has its last use: whoever makes a call holds what it is given."""
        last = self.last.get(s, -1)
        place = bisect_right(self.nodes, last) - 1
        return max(last + 1, self.draft.nodes[place][1]) if place >= 0 else last + 1


def _compact(graph: Graph) -> Graph:
    """Only storages that have a part in the step, and the tensors that ops name or that were there before it."""
    named = {i for op in graph.ops for i in (*references(op.inputs), *op.outputs)}
    used = {graph.tensors[i].storage for i in named}
    timed = {e.storage for e in graph.events}
    made = {e.storage for e in graph.events if e.allocates}
    kept = sorted(s.id for s in graph.storages if s.id in used or s.id in timed or _was_there(s))
    place = {s: i for i, s in enumerate(kept)}
    told = {*made, *used}  # of others, those that were there before the step, what is known of them stays
    tensors = [t for t in graph.tensors if t.id in named or (t.storage not in told and t.storage in place)]
    new = {t.id: i for i, t in enumerate(tensors)}
    return replace(
        graph,
        ops=tuple(_renumbered(op, new) for op in graph.ops),
        tensors=tuple(replace(t, id=i, storage=place[t.storage]) for i, t in enumerate(tensors)),
        storages=tuple(replace(graph.storages[s], id=i) for s, i in place.items()),
        events=tuple(replace(e, storage=place[e.storage]) for e in graph.events if e.storage in place),
        facts={new[i]: known for i, known in graph.facts.items() if i in new},
    )


def _was_there(s: Storage) -> bool:
    return s.role in ("parameter", "gradient", "optimizer", "buffer", "input")


def _renumbered(op: Op, new: dict[int, int]) -> Op:
    return replace(
        op,
        inputs=tuple(mapped(v, new.__getitem__) for v in op.inputs),
        outputs=tuple(new[i] for i in op.outputs),
        writes=tuple(new[i] for i in op.writes),
    )
