"""A Draft: a graph while a strategy changes it. Ops come before and after others, tensors change, lifetimes follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.edit import spans, stretched
from presage.graph.graph import DTYPE_BYTES, Event, Graph, Op, Phase, Ref, Role, Storage, Tensor, Thread

__all__ = ["Draft", "Life", "hook", "op", "read_elsewhere", "retarget"]

# How long memory lives: from its first use in the step to its last, from its first use on, or all the time.
Life: TypeAlias = Literal["while used", "kept", "always"]


class Draft:
    """A graph that is being changed. Places of ops are those of the graph it began with, until `graph()` is asked."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.ops = list(graph.ops)
        self.tensors = list(graph.tensors)
        self.storages = list(graph.storages)
        self.notes = list(graph.notes)
        self.life: dict[int, Life] = {}  # of storages whose lifetime is told anew
        self._before: dict[int, list[Op]] = {}
        self._after: dict[int, list[Op]] = {}

    def storage(self, nbytes: int, role: Role, name: str = "", module: str = "", life: Life = "while used") -> int:
        """New memory."""
        number = len(self.storages)
        self.storages.append(Storage(number, nbytes, role, name, module))
        self.life[number] = life
        return number

    def tensor(self, storage: int, shape: Sequence[int], dtype: str, offset: int = 0) -> int:
        """A new contiguous tensor in some memory."""
        number = len(self.tensors)
        self.tensors.append(Tensor(number, storage, tuple(shape), _strides(shape), dtype, offset))
        return number

    def buffer(self, elements: int, dtype: str, role: Role, name: str = "", life: Life = "while used") -> int:
        """A new flat tensor in new memory."""
        return self.tensor(self.storage(elements * DTYPE_BYTES[dtype], role, name, life=life), (elements,), dtype)

    def alike(self, tensor: int, storage: int) -> int:
        """The same tensor in other memory."""
        number = len(self.tensors)
        self.tensors.append(replace(self.tensors[tensor], id=number, storage=storage))
        return number

    def resize(self, storage: int, nbytes: int) -> None:
        self.storages[storage] = replace(self.storages[storage], nbytes=nbytes)

    def before(self, place: int, *ops: Op) -> None:
        """Ops to run before one of the graph's, after those that were put there sooner."""
        self._before.setdefault(place, []).extend(ops)

    def after(self, place: int, *ops: Op) -> None:
        self._after.setdefault(place, []).extend(ops)

    def graph(self) -> Graph:
        """The graph as it now is."""
        runs = [[*self._before.get(i, ()), op, *self._after.get(i, ())] for i, op in enumerate(self.ops)]
        starts = list(accumulate(map(len, runs), initial=0))
        old = [replace(e, op=starts[e.op]) for e in self.source.events if e.storage not in self.life]
        changed = replace(
            self.source,
            ops=tuple(op for run in runs for op in run),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            notes=tuple(self.notes),
            events=(),
        )
        return replace(changed, events=_events(changed, old, self.life))


def op(
    name: str,
    inputs: Sequence[Any],  # as Op.inputs
    *,
    writes: Iterable[int] = (),
    outputs: Iterable[int] = (),
    like: Op | None = None,
    phase: Phase = "other",
    thread: Thread = "main",
    stream: str = "",
    group: str = "",
    overload: str = "",
    kernels: bool = True,
    within: str = "",
) -> Op:
    """An op that a strategy adds; `like` is one whose phase, thread and module it shares."""
    return Op(
        name=name,
        overload=overload,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        phase=like.phase if like else phase,
        thread=like.thread if like else thread,
        module=like.module if like else "",
        writes=tuple(writes),
        stream=stream,
        group=group,
        kernels=kernels,
        within=(within,) if within else (),
    )


def hook(name: str, tensors: Iterable[int], like: Op) -> Op:
    """Work of a framework's own on the host, about these tensors."""
    return op(name, [[Ref(t) for t in tensors]], like=like, kernels=False)


def retarget(one: Op, new: Mapping[int, int]) -> Op:
    """The op on other tensors: `new` by old id."""
    if not any(i in new for i in (*references(one.inputs), *one.outputs)):
        return one

    def mapped(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new.get(value.id, value.id))
        return [mapped(v) for v in value] if isinstance(value, list) else value

    return replace(
        one,
        inputs=tuple(mapped(v) for v in one.inputs),
        outputs=tuple(new.get(i, i) for i in one.outputs),
        writes=tuple(new.get(i, i) for i in one.writes),
    )


def read_elsewhere(draft: Draft, where: Mapping[int, int], after: int) -> None:
    """Ops past one place find what was in some memory at another: tensors by the storages they take the place of."""
    for i in range(after + 1, len(draft.ops)):
        ids = {t.id: where[t.storage] for t in draft.source.inputs_of(draft.source.ops[i]) if t.storage in where}
        if ids:
            draft.ops[i] = retarget(draft.ops[i], ids)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _events(graph: Graph, old: Sequence[Event], life: Mapping[int, Life]) -> tuple[Event, ...]:
    """Lifetimes that fit the ops: of old memory stretched where a new op needs it, of new memory as told."""
    first, last = spans(graph)
    events = [stretched(e, first, last) for e in old]
    for s, kind in life.items():
        if s in first and kind != "always":
            events.append(Event(first[s], s, True))
            if kind == "while used":
                events.append(Event(last[s] + 1, s, False))
    return tuple(sorted(events, key=lambda e: e.op))  # a stable sort: events at one place keep their order
