"""Views in a retyping: where a layout has changed, a reshape may need a copy that it did not, or need it no more."""

from __future__ import annotations

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Op, Ref, Tensor
from presage.whatif.edits.memory_layout import contiguous, moved, viewed
from presage.whatif.edits.rewriting.retype import COPY, Place, Retyped

__all__ = ["Viewing"]

CLONED = (("aten::reshape", "aten::clone"), ("aten::contiguous", "aten::clone"))


class Viewing(Retyped):
    def translate(self, i: int, subs: dict[int, Tensor] | None = None, **changes: object) -> Op:
        op = self.old.ops[i]
        if not op.kernels and op.outputs and (source := self._source(op)) is not None:
            self._cloned(op, source, subs, changes)
        elif op.name == "aten::copy_" and op.within[-2:] in CLONED and self._whole(i, op, subs):
            return self.draft.ops[-1]
        return super().translate(i, subs, **changes)

    def _source(self, op: Op) -> int | None:
        """What an op makes a view of."""
        out = self.old.tensors[op.outputs[0]]
        same = (t for t in references(op.inputs) if self.old.tensors[t].storage == out.storage and t != out.id)
        return next(same, None)

    def _cloned(self, op: Op, source: int, subs: dict[int, Tensor] | None, changes: dict[str, object]) -> None:
        """Write a tensor out first where the view that an op makes is none any more."""
        old, now, out = self.old.tensors[source], self.get(source, subs), self.old.tensors[op.outputs[0]]
        if now.strides == old.strides or now.shape != old.shape or moved(out, old, now) is not None:
            return
        within = changes.get("within", op.within)
        assert isinstance(within, tuple)
        whole = self.draft.new(now.shape, now.dtype, None, op.module)
        like = replace(op, within=(*within, "aten::clone"), names=(), outputs=(), sequence=self.number(op.sequence))
        self.draft.add(replace(like, name="aten::empty_like", overload="", inputs=(Ref(now.id),)))
        self.draft.add(
            replace(
                like,
                name="aten::copy_",
                overload="",
                inputs=(Ref(whole.id), Ref(now.id), False),
                names=COPY,
                outputs=(whole.id,),
                writes=(whole.id,),
                kernels=True,
            )
        )
        shown = viewed(whole, out.shape) or contiguous(out.shape)
        self.views[out.id] = self.draft.tensor(whole.storage, out.shape, shown, now.dtype)
        if subs is not None:
            subs[out.id] = self.views[out.id]

    def _whole(self, i: int, op: Op, subs: dict[int, Tensor] | None) -> bool:
        """Whether a copy is not needed any more, as its source can be seen the way the copy is."""
        target, source = references(op.inputs)
        old, now, copy = self.old.tensors[source], self.get(source, subs), self.old.tensors[target]
        if now.strides == old.strides or copy.storage in self.known:
            return False
        shown = self._shown(i, target)
        strides = viewed(now, shown.shape)
        if strides is None or (op.within[-2] == "aten::contiguous" and not now.is_contiguous):
            return False
        if self.draft.ops and self.draft.ops[-1].name == "aten::empty_like":
            self.draft.ops.pop()
        self.known.add(copy.storage)
        self._alias(shown, self.draft.tensor(now.storage, shown.shape, strides, now.dtype, now.offset))
        return True

    def _alias(self, old: Tensor, new: Tensor) -> None:
        """What was written out anew is what it was copied from."""

        self.place[old.storage] = Place(new.storage, new.dtype, old, new)

    def _shown(self, i: int, target: int) -> Tensor:
        """The copy as the op after it shows it."""
        after = self.old.ops[i + 1] if i + 1 < len(self.old.ops) else None
        if after is not None and not after.kernels and after.outputs and target in references(after.inputs):
            return self.old.tensors[after.outputs[0]]
        return self.old.tensors[target]
