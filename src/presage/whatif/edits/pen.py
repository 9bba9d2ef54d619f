"""A Pen: writes stretches of new ops, with the memory they need, and puts them into a graph in place of old ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from math import prod

from msgspec.structs import replace

from presage.graph.edit import replace_ops
from presage.graph.graph import DTYPE_BYTES, Arg, Event, Graph, Op, Ref, Role, Storage, Tensor
from presage.whatif.edits.memory_layout import contiguous

__all__ = ["Pen"]


class Pen:
    """Ops are written at a place of the old graph (`at`); memory made there is given back where the stretch ends,
    unless it is told to be standing (there before the step and after it) or kept (to its last use)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.facts: dict[int, tuple[int, int]] = {}
        self._written: dict[int, list[Op]] = {}
        self._place, self._like = 0, Op("", "", (), (), "other", "main")
        self._ends: dict[int, int] = {}  # storage: the stretch it is given back after
        self._standing: set[int] = set()

    def at(self, place: int, like: Op) -> None:
        """What follows is written in place of this op, and is like that one but for its name and tensors."""
        self._place, self._like = place, like
        self._written.setdefault(place, [])

    def get(self, ref: Ref | int) -> Tensor:
        number = ref.id if isinstance(ref, Ref) else ref
        old = len(self.graph.tensors)
        return self.graph.tensors[number] if number < old else self.tensors[number - old]

    def op(
        self,
        name: str,
        inputs: Sequence[Arg] = (),
        outputs: Sequence[Ref] = (),
        *,
        overload: str = "",
        names: Sequence[str] = (),
        writes: Sequence[Ref] = (),
        within: Sequence[str] = (),
        kernels: bool = True,
    ) -> None:
        """One op. `name` without a colon is one of torch's own."""
        made = Op(
            name=name if ":" in name else f"aten::{name}",
            overload=overload,
            inputs=tuple(inputs),
            outputs=tuple(o.id for o in outputs),
            phase=self._like.phase,
            thread=self._like.thread,
            module=self._like.module,
            within=tuple(within),
            names=tuple(names) if len(names) == len(inputs) else (),
            writes=tuple(w.id for w in writes),
            kernels=kernels,
            sequence=self._like.sequence,
            line=self._like.line,
            stream=self._like.stream,
            replayed=self._like.replayed,
        )
        self._written[self._place].append(made)

    def put(self, place: int, op: Op) -> None:
        """This op in place of an old one."""
        self._written[place] = [op]

    def until(self, ref: Ref, place: int) -> None:
        """Keep memory made here until after what is written at this place."""
        self._ends[self.get(ref).storage] = place

    def host(self, name: str, within: Sequence[str] = (), overload: str = "") -> None:
        """An op of the host's alone."""
        self.op(name, within=within, overload=overload, kernels=False)

    def view(self, of: Ref | int, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> Ref:
        """Another tensor over the memory of one."""
        t = self.get(of)
        return self._tensor(t.storage, shape, contiguous(shape) if strides is None else strides, t.dtype, offset)

    def part(self, storage: int, like: Tensor, offset: int) -> Ref:
        """A tensor of the same shape over other memory."""
        return self._tensor(storage, like.shape, like.strides, like.dtype, offset)

    def new(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, *, kept: bool = False) -> Ref:
        """Memory of this stretch; `kept`: until its last use."""
        storage = self._storage(prod(shape) * DTYPE_BYTES[dtype], "activation", "")
        if not kept:
            self._ends[storage] = self._place
        return self._tensor(storage, shape, contiguous(shape) if strides is None else strides, dtype)

    def alike(self, ref: Ref | int, *, kept: bool = False) -> Ref:
        """New memory, as large and laid out as a tensor's."""
        t = self.get(ref)
        return self.new(t.shape, t.dtype, t.strides, kept=kept)

    def standing(self, shape: Sequence[int], dtype: str, role: Role, name: str = "") -> Ref:
        """Memory that was there before the step, and is after it."""
        storage = self._storage(prod(shape) * DTYPE_BYTES[dtype], role, name)
        self._standing.add(storage)
        return self._tensor(storage, shape, contiguous(shape), dtype)

    def done(self, removed: Collection[int] = (), dropped: Collection[int] = ()) -> Graph:
        """The graph with what was written in it, without the ops removed and the storages dropped."""
        changes: dict[int, Sequence[Op]] = {i: [] for i in removed} | dict(self._written)
        old = replace(self.graph, facts=self.graph.facts | self.facts)
        out = replace_ops(old, changes, self.tensors, self.storages, dropped)
        starts = list(accumulate((len(changes.get(i, (0,))) for i in range(len(old.ops))), initial=0))
        first = len(out.storages) - len(self.storages)  # new storages come last, in their order
        shift = first - len(old.storages)
        events = [e for e in out.events if e.storage < first or self._right(e.storage - shift, e.allocates)]
        events += [Event(starts[p + 1], s + shift, False) for s, p in self._ends.items()]
        return replace(out, events=tuple(sorted(events, key=lambda e: (e.op, e.allocates))))

    def _right(self, storage: int, allocates: bool) -> bool:
        """Whether a new storage's life begins or ends where its use does."""
        return storage not in self._standing and (allocates or storage not in self._ends)

    def _storage(self, nbytes: int, role: Role, name: str) -> int:
        number = len(self.graph.storages) + len(self.storages)
        self.storages.append(Storage(number, nbytes, role, name, self._like.module))
        return number

    def _tensor(self, storage: int, shape: Sequence[int], strides: Sequence[int], dtype: str, offset: int = 0) -> Ref:
        number = len(self.graph.tensors) + len(self.tensors)
        self.tensors.append(Tensor(number, storage, tuple(shape), tuple(strides), dtype, offset))
        return Ref(number)
