"""Retyping: a step run again on paper, with other types of numbers.

Each op's results get the type that its inputs now ask for. Where a run of the forward pass asks for another type than
it is given, a cast comes before it and, in the backward pass, a cast of the gradient after it (`ToCopyBackward0`);
where a gradient meets a node of another type, the engine casts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import DTYPE_BYTES, Graph, Op, Ref, Tensor
from presage.whatif.edits.memory_layout import dense, moved
from presage.whatif.edits.rewriting.batch_norm import fitting, semaphores
from presage.whatif.edits.rewriting.draft import Draft, mapped
from presage.whatif.edits.rewriting.runs import Listing, Run, Story, runs
from presage.whatif.edits.rewriting.strides import laid_out
from presage.whatif.edits.rewriting.types import FLOATS, FOLLOWED, KEPT, promoted

__all__ = ["SPREAD", "Cast", "Group", "Place", "Retyped"]

SPREAD = 64  # autograd's numbers are set this far apart, so that casts find room between them
COPY = ("self", "src", "non_blocking")


@dataclass(frozen=True)
class Place:
    """Where an old storage's content is now; with two tensors that show how it lay and lies, where that differs."""

    storage: int
    dtype: str
    old: Tensor | None = None
    new: Tensor | None = None


@dataclass
class Cast:
    """A cast before a run of the forward pass."""

    old: Tensor  # what is cast, as the old graph has it
    source: str  # its type
    new: Tensor
    sequence: int
    shared: bool = False  # used by several runs: their gradients are added before they are cast back
    wanted: bool = True  # has a gradient


@dataclass
class Group:
    """A run of the forward pass with the casts before it, and what its tensors are called in the new graph."""

    subs: dict[int, Tensor] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)  # made for this run
    used: list[Cast] = field(default_factory=list)  # made for an earlier one


class Retyped:
    """The parts of a retyping that both passes share."""

    def __init__(self, graph: Graph, listing: Listing) -> None:
        self.old = graph
        self.draft = Draft(graph)
        self.runs = runs(graph, listing)
        self.story = Story(graph, self.runs)
        self.place: dict[int, Place] = {}
        taken = {e.storage for e in graph.events if e.allocates}
        self.known = {s.id for s in graph.storages} - taken
        self.groups: dict[int, Group] = {}  # by autograd's number, as the old graph has it
        self.views: dict[int, Tensor] = {}  # old views of gradients that were cast on their way
        self.again: dict[int, Tensor] = {}  # what was cast while a checkpoint's ops ran again
        self.default = ""  # the type of what is made out of nothing

    # ---- tensors

    def start(self, storage: int, dtype: str) -> None:
        """A storage from before the step has another type."""
        was = next((t.dtype for t in self.old.tensors if t.storage == storage), "float32")
        self._placed(storage, was, dtype)

    def _placed(self, storage: int, was: str, dtype: str) -> None:
        if was != dtype:
            nbytes = self.old.storages[storage].nbytes
            self.place[storage] = Place(storage, dtype)
            self.draft.resize(storage, nbytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[was])

    def get(self, old: int, subs: dict[int, Tensor] | None = None) -> Tensor:
        """An old tensor as it is now."""
        t = self.old.tensors[old]
        if subs:
            if old in subs:
                return subs[old]
            if (relative := self._relative(t, subs)) is not None:
                return relative
        if old in self.views:
            return self.views[old]
        place = self.place.get(t.storage)
        if place is None:
            return t
        if place.old is None or place.new is None:
            return self.draft.tensor(place.storage, t.shape, t.strides, place.dtype, t.offset)
        return self._view(t, place.old, place.new)

    def _view(self, t: Tensor, old: Tensor, new: Tensor) -> Tensor:
        if (t.shape, t.strides, t.offset) == (old.shape, old.strides, old.offset):
            return self.draft.tensor(new.storage, new.shape, new.strides, new.dtype, new.offset)
        found = moved(t, old, new)
        strides, offset = found if found is not None else (dense(t), 0)  # what no view can show is told as a copy
        return self.draft.tensor(new.storage, t.shape, strides, new.dtype, offset)

    def _relative(self, t: Tensor, subs: dict[int, Tensor]) -> Tensor | None:
        """A view of something that was replaced."""
        for old, new in subs.items():
            o = self.old.tensors[old]
            if o.storage == t.storage and o.offset == t.offset and o.elements == t.elements:
                subs[t.id] = self._view(t, o, new)
                return subs[t.id]
        return None

    def dtype(self, old: int, subs: dict[int, Tensor] | None = None) -> str:
        return self.get(old, subs).dtype

    def join(self, run: Run, group: Group) -> None:
        """The backward nodes of a run's ops belong to a group, beside what is there of the same node."""
        if self.old.ops[run.first].thread == "autograd":
            self.again |= group.subs
        for sequence in {self.old.ops[i].sequence for i in run.ops} - {-1}:
            there = self.groups.setdefault(sequence, group)
            if there is not group:
                there.subs.update(group.subs)
                there.casts += [c for c in group.casts if c not in there.casts]
                there.used += [c for c in group.used if c not in there.used]

    # ---- ops

    def translate(self, i: int, subs: dict[int, Tensor] | None = None, **changes: object) -> Op:
        """An op of the old graph, with its tensors as they are now; what it makes gets the type that follows."""
        op = self.old.ops[i]
        self.settle(op, subs, model=self._model(i))
        self.follow(op, subs)
        new = replace(
            op,
            inputs=tuple(mapped(a, lambda t: self.get(t, subs).id) for a in op.inputs),
            outputs=tuple(self.get(t, subs).id for t in op.outputs),
            writes=tuple(self.get(t, subs).id for t in op.writes),
            sequence=self.number(op.sequence),
        )
        new = replace(new, **changes) if changes else new
        for one in fitting(new, self.draft.tensors):
            self.draft.add(one)
        made = self.draft.ops[-1]
        semaphores(self.draft, made, op)
        return made

    def follow(self, op: Op, subs: dict[int, Tensor] | None) -> None:
        """Views of what was replaced are views of what replaced it."""
        inputs = list(references(op.inputs))
        for t in op.outputs:
            out = self.old.tensors[t]
            source = next((x for x in inputs if self.old.tensors[x].storage == out.storage), None)
            if source is None or source == t:
                continue
            self.views.pop(t, None)
            replaced = (subs or {}).get(source) or self.views.get(source)
            if replaced is not None:
                view = self._view(out, self.old.tensors[source], replaced)
                if self.story.is_gradient(out.storage):
                    self.views[t] = view
                if subs is not None:
                    subs[t] = view

    @staticmethod
    def number(sequence: int) -> int:
        return sequence * SPREAD if sequence >= 0 else sequence

    def _model(self, i: int) -> list[int]:
        """What the op before made room like (`empty_like`), for this one to fill."""
        op, before = self.old.ops[i], self.old.ops[max(i - 1, 0)]
        fills = op.name in ("aten::fill_", "aten::zero_") and before.name.endswith("_like")
        return self.floats(references(before.inputs))[:1] if fills and before.within[:1] == op.within[:1] else []

    def settle(
        self, op: Op, subs: dict[int, Tensor] | None = None, forced: str = "", model: Sequence[int] = ()
    ) -> None:
        """Types and layouts of the storages that an op is the first to name."""
        inputs = list(references(op.inputs))
        given = [t for t in inputs if self.old.tensors[t].storage in self.known] or list(model)
        for index, t in [*enumerate(op.outputs), *((-1, t) for t in inputs)]:
            tensor = self.old.tensors[t]
            if tensor.storage in self.known:
                continue
            if tensor.dtype in FLOATS:
                dtype = forced or self._result(op, index, tensor, given, subs)
                self._placed(tensor.storage, tensor.dtype, dtype)
            if given:
                self._laid(op, tensor, given, subs)
            self.known.add(tensor.storage)

    def _laid(self, op: Op, t: Tensor, given: list[int], subs: dict[int, Tensor] | None) -> None:
        before, now = [self.old.tensors[g] for g in given], [self.get(g, subs) for g in given]
        strides = laid_out(op, t, before, now)
        if strides != t.strides:
            dtype = self.dtype(t.id)
            self.place[t.storage] = Place(t.storage, dtype, t, self.draft.tensor(t.storage, t.shape, strides, dtype))

    def _result(self, op: Op, index: int, t: Tensor, given: list[int], subs: dict[int, Tensor] | None) -> str:
        if index in KEPT.get(op.name, ()):
            return t.dtype
        followed = FOLLOWED.get(op.name, {}).get(index)
        if followed is not None and isinstance(ref := op.inputs[followed], Ref):
            return self.dtype(ref.id, subs)
        before = promoted([(x.dtype, not x.shape) for x in (self.old.tensors[g] for g in given)])
        if not before:
            return self.default or t.dtype
        if before != t.dtype or any(isinstance(a, str) and a in DTYPE_BYTES for a in op.inputs[1:-1]):
            return t.dtype  # somebody asked for this type
        given = [g for g in given if self.old.tensors[g].elements] or given
        return promoted([(x.dtype, not x.shape) for x in (self.get(g, subs) for g in given)])

    def cast(self, like: Op, source: Tensor, dtype: str, within: tuple[str, ...], sequence: int) -> Tensor:
        """Ops that write a tensor out in another type."""
        new = self.draft.new(source.shape, dtype, dense(source), like.module)
        made = replace(
            like, name="aten::empty_strided", overload="", inputs=(), outputs=(), names=(), writes=(), kernels=False,
            sync=False, opaque=False, within=(*within, "aten::to", "aten::_to_copy"), sequence=sequence,
        )  # fmt: skip
        self.draft.add(made)
        self.draft.add(
            replace(
                made,
                name="aten::copy_",
                inputs=(Ref(new.id), Ref(source.id), False),
                outputs=(new.id,),
                names=COPY,
                writes=(new.id,),
                kernels=True,
            )
        )
        return new

    def floats(self, ids: Iterable[int]) -> list[int]:
        return [t for t in ids if self.old.tensors[t].dtype in FLOATS]
