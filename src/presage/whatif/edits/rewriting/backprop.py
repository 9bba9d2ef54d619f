"""The backward pass of a retyping: nodes take and give gradients in the types of the forward pass."""

from __future__ import annotations

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Op, Tensor
from presage.whatif.edits.rewriting.retype import Cast, Group, Place
from presage.whatif.edits.rewriting.runs import ENGINE, Run, accumulates, node_name, outside
from presage.whatif.edits.rewriting.types import FLOATS
from presage.whatif.edits.rewriting.viewing import Viewing

__all__ = ["Backprop"]

TO_COPY = "ToCopyBackward0"


class Backprop(Viewing):
    """Adds what happens in the backward pass; `parameter` is the type that parameters get, where it changes."""

    parameter = ""
    _open: Group | None = None  # the group whose gradients are still to be cast back
    _made: set[int]  # storages that the open group's nodes made
    _waiting: list[tuple[int, int]]  # a storage, and an op that waits for its cast

    def backward(self, run: Run) -> None:
        first = self.old.ops[run.first]
        group = self.groups.get(first.sequence)
        if run.kind == "gradient" and self._waits(run):
            return
        if self._open is not None and group is not self._open:
            self.flush(run.first)
        if group is not None and group.casts + group.used and self._open is None:
            self.open(group)
        start = len(self.draft.ops)
        self._node(run, group)
        self.draft.nodes.append((start, len(self.draft.ops)))

    def open(self, group: Group) -> None:
        """From here on nodes make gradients that are to be cast back."""
        self._open, self._made, self._waiting = group, set(), []

    def _waits(self, run: Run) -> bool:
        """A parameter's gradient that the open group made is handed over when it has been cast."""
        if self._open is None:
            return False
        for i in run.ops:
            read = [self.old.tensors[t].storage for t in references(self.old.ops[i].inputs)]
            if hit := next((s for s in read if s in self._made), None):
                self._waiting.append((hit, i))
            else:
                return False
        return True

    def _node(self, run: Run, group: Group | None) -> None:
        subs = {**group.subs, **self.again} if group else {}
        wanted = self.parameter if run.kind == "gradient" else self.wanted(self.old.ops[run.first].sequence, subs)
        self._meet(run, wanted, subs)
        self.default = wanted
        for i in run.ops:
            self.draft.begin(i)
            op = self.old.ops[i]
            if accumulates(op):
                self._accumulate(i, group, subs)
            elif not self.dropped(i, subs):
                self.node_op(i, subs)
            if self._open is not None and group is self._open:
                self._made |= self._made_by(i)
        self.default = ""

    def _made_by(self, i: int) -> set[int]:
        """Storages that an op is the first to name."""
        op = self.old.ops[i]
        named = {self.old.tensors[t].storage for t in (*op.outputs, *references(op.inputs))}
        return {s for s in named if self.story.made.get(s) == i}

    def node_op(self, i: int, subs: dict[int, Tensor]) -> None:
        """One op of a node; those with their type in an argument are told the new one."""
        op = self.translate(i, subs)
        if op.name.endswith("softmax_backward_data") and isinstance(op.inputs[-1], str):
            dtype = self.draft.tensors[op.outputs[0]].dtype
            self.draft.ops[-1] = replace(op, inputs=(*op.inputs[:-1], dtype))

    def dropped(self, i: int, subs: dict[int, Tensor]) -> bool:
        """Whether an op is not needed any more; an edit that takes casts away says so."""
        del i, subs
        return False

    def wanted(self, sequence: int, subs: dict[int, Tensor]) -> str:
        """The type of the gradients that a node takes: that of what its forward op made."""
        for t in self.floats(self.story.outputs.get(sequence, ())):
            return self.dtype(t, subs)
        return ""

    def _meet(self, run: Run, wanted: str, subs: dict[int, Tensor]) -> None:
        """Cast the gradients that come to a node in another type than it takes."""
        shown = set[int]()  # views that the node makes itself
        for i in run.ops if wanted else ():
            op = self.old.ops[i]
            for t in self.floats(references(op.inputs)) if not accumulates(op) else ():
                s = self.old.tensors[t].storage
                outside = t not in shown and self.story.is_gradient(s) and self.story.made[s] < run.first
                if outside and t not in subs and (now := self.get(t, subs)).dtype != wanted:
                    subs[t] = self._engine_cast(t, now, wanted, self.old.ops[run.first])
            shown |= set(op.outputs)

    def _engine_cast(self, old: int, now: Tensor, dtype: str, taker: Op) -> Tensor:
        like = self._passing(old, taker)
        around = taker.within[: outside(taker)]
        name = like.within[outside(like)] if like.thread == "autograd" else ENGINE + node_name(like)
        at = replace(like, thread="autograd", phase="backward")
        return self.cast(at, now, dtype, (*around, name), self.number(like.sequence))

    def _passing(self, old: int, taker: Op) -> Op:
        """The op whose node hands a gradient to the taker: one that has no ops of its own, or the one that made it."""
        outputs = {self.old.tensors[t].storage for t in self.story.outputs.get(taker.sequence, ())}
        for s in outputs:
            for i in self.story.readers.get(s, ()):
                op = self.old.ops[i]
                if op.thread == "main" and op.sequence > taker.sequence and op.sequence not in self.story.nodes:
                    return op if op.kernels else taker
        return self.old.ops[self.story.made[self.old.tensors[old].storage]]

    # ---- adding up

    def _accumulate(self, i: int, group: Group | None, subs: dict[int, Tensor]) -> None:
        op = self.old.ops[i]
        if group is not None and group is self._open and (arrived := self._arrived(op)) is not None:
            cast = self._match(self.old.tensors[arrived], [*group.casts, *group.used])
            if cast is not None and not cast.shared:
                self._waiting.append((self.old.tensors[arrived].storage, i))
                return
            if cast is not None:
                self.translate(i, subs)
                return
        self._add(i, subs)

    def _arrived(self, op: Op) -> int | None:
        """The one of two gradients that the open group has just made."""
        ids = [t for t in references(op.inputs) if self.old.tensors[t].storage in self._made]
        return ids[-1] if ids else None

    def _add(self, i: int, subs: dict[int, Tensor], **changes: object) -> None:
        """Two gradients in the type of what they are gradients of."""
        op = self.old.ops[i]
        wanted = self._added(i)
        local = dict(subs)
        for t in references(op.inputs):
            now = self.get(t, local)
            if wanted and now.dtype != wanted and now.dtype in FLOATS:
                local[t] = self.cast(op, now, wanted, op.within, self.number(op.sequence))
        if op.writes and op.writes[0] in local:  # what is added to in place has moved
            self._move(self.old.tensors[op.writes[0]], local[op.writes[0]])
        self._add_fresh(i, local, changes)

    def _add_fresh(self, i: int, local: dict[int, Tensor], changes: dict[str, object]) -> None:
        """A gradient that nothing else reads is added to in place."""
        op = self.old.ops[i]
        first = next(references(op.inputs))
        now, out = self.get(first, local), self.old.tensors[op.outputs[0]]
        fresh = now.storage >= len(self.old.storages) and now.shape == out.shape
        if op.name == "aten::add" and fresh and out.storage not in self.known:
            self.known.add(out.storage)
            self.place[out.storage] = Place(now.storage, now.dtype, out, now)
            self.draft.inherit(now.storage, out.storage)
            changes = {**changes, "name": "aten::add_", "writes": (now.id,)}
        self.translate(i, local, **changes)

    def _added(self, i: int) -> str:
        """The type in which two gradients are added: that of what the forward pass used twice."""
        op = self.old.ops[i]
        taker = self.story.goal(self.old.tensors[op.outputs[0]].storage, i + 1)
        wanted = self._taken(taker)
        seen = {self.dtype(t) for t in references(op.inputs)}
        if taker is None or taker.kind == "gradient" or len(seen) > 1:
            return wanted
        made = {t for n in (self.old.ops[taker.first].sequence,) for t in self.story.outputs.get(n, ())}
        storages = {self.old.tensors[t].storage for t in made}
        direct = any(self.old.ops[j].sequence == op.sequence for s in storages for j in self.story.readers.get(s, ()))
        return wanted if direct else ""  # else a node without ops lies between, and its own output is meant

    def _taken(self, taker: Run | None) -> str:
        if taker is None:
            return ""
        if taker.kind == "gradient":
            return self.parameter
        sequence = self.old.ops[taker.first].sequence
        group = self.groups.get(sequence)
        return self.wanted(sequence, group.subs if group else {})

    def _move(self, old: Tensor, new: Tensor) -> None:
        """From here on an old tensor's content is in a new one."""
        before = self.place.get(old.storage)
        self.views = {t: v for t, v in self.views.items() if self.old.tensors[t].storage != old.storage}
        self.place[old.storage] = Place(new.storage, new.dtype, old, new)
        self.draft.inherit(new.storage, before.storage if before else old.storage)

    # ---- casting back

    def flush(self, now: int) -> None:
        """The open group's nodes are done: cast its gradients back, and let those go on that waited."""
        group, self._open = self._open, None
        if group is None:
            return
        self.draft.close()
        left = self._outgoing(now)
        for cast in sorted(group.casts, key=lambda c: -c.sequence):
            found = self._found(cast, left)
            if found is not None and cast.wanted:
                left.remove(found)
                self._cast_back(found, cast)
        for _, i in list(self._waiting):
            self._go_on(i, ())

    def _outgoing(self, now: int) -> list[int]:
        """Gradients that the group made and others read."""
        waiting = {i for _, i in self._waiting}
        found: dict[int, int] = {}
        for s in sorted(self._made, key=lambda s: (self.story.made.get(s, 0), s)):
            readers = [i for i in self.story.readers.get(s, ()) if i >= now or i in waiting]
            for i in readers[:1]:
                found[s] = next(t for t in references(self.old.ops[i].inputs) if self.old.tensors[t].storage == s)
        return list(found.values())

    def _found(self, cast: Cast, left: list[int]) -> int | None:
        """The gradient of what was cast: of its shape, or at least its size."""
        same = [t for t in left if self.old.tensors[t].shape == cast.old.shape]
        flat = [t for t in left if self.old.tensors[t].elements == cast.old.elements]
        flat = [t for t in flat if len(self.old.tensors[t].shape) != len(cast.old.shape)]
        return next(iter(same or flat), None)

    @staticmethod
    def _match(t: Tensor, casts: list[Cast]) -> Cast | None:
        return next((c for c in casts if c.old.shape == t.shape), None)

    def _cast_back(self, found: int, cast: Cast) -> None:
        old = self.old.tensors[found]
        made = self.old.ops[self.story.made[old.storage]]
        now = self.get(found)
        if now.dtype != cast.source:
            within = (*made.within[: outside(made)], ENGINE + TO_COPY, TO_COPY)
            new = self.cast(replace(made, sync=False), now, cast.source, within, cast.sequence)
            self._move(old, new)
        for s, i in list(self._waiting):
            if s == old.storage:
                self._go_on(i, (*made.within[: outside(made)], ENGINE + TO_COPY), cast.sequence)

    def _go_on(self, i: int, within: tuple[str, ...], sequence: int = -1) -> None:
        """An op that waited for a cast runs, in the cast's node if it adds gradients up."""
        self._waiting = [w for w in self._waiting if w[1] != i]
        op = self.old.ops[i]
        if accumulates(op):
            changes: dict[str, object] = {"within": within, "sequence": sequence} if within else {}
            self._add(i, {}, **changes)
        else:
            subs: dict[int, Tensor] = {}
            self._meet(self.runs[self.story.run_of[i]], self.parameter, subs)
            self.node_op(i, subs)
