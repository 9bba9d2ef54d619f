"""Fused attention in a retyping: another type may call for another kernel."""

from __future__ import annotations

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Op, Tensor
from presage.whatif.edits.rewriting import sdpa
from presage.whatif.edits.rewriting.backprop import Backprop
from presage.whatif.edits.rewriting.retype import Cast, Group, Place
from presage.whatif.edits.rewriting.runs import Run, accumulates

__all__ = ["MATH", "Attending"]

INNER = "aten::_scaled_dot_product_"
MATH = "aten::_scaled_dot_product_attention_math"


class Attending(Backprop):
    """Adds attention that is fused already."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.fused: dict[int, sdpa.Fused] = {}  # by the old storage of its result
        self._learnt = {  # numbers of those whose bias has a gradient
            op.sequence for op in self.old.ops if op.name.endswith("_attention_backward") and len(op.outputs) > 3
        }

    def attends(self, run: Run) -> bool:
        """Whether a run of the forward pass is a fused kernel's."""
        return any(self.old.ops[i].name in sdpa.PLACES for i in run.ops)

    def attend(self, run: Run, group: Group | None, around: tuple[str, ...]) -> None:
        """The same attention, by the kernel that takes what it is given now."""
        subs = group.subs if group else {}
        for i in run.ops:
            self.draft.begin(i)
            op = self.old.ops[i]
            if op.name in sdpa.PLACES:
                self._attend(op, subs, around)
            elif not self._turns(op):
                self.forward_op(i, subs)

    def forward_op(self, i: int, subs: dict[int, Tensor]) -> None:
        self.translate(i, subs)

    def attend_plainly(self, run: Run, group: Group | None, within: dict[int, tuple[str, ...]]) -> None:
        """Attention that no kernel takes: in float32, its inputs cast up first and its result cast down."""
        group = group or Group()
        first, math = self.old.ops[run.first], (*within[run.first][: run.depth + 2], MATH)
        read = dict.fromkeys(t for i in run.ops for t in self.floats(references(self.old.ops[i].inputs)))
        before = len(group.casts)
        for t in read:
            if not self._lowered(t, group):
                continue
            old, now = self.old.tensors[t], self.get(t, group.subs)
            sequence = self.number(first.sequence) - len(group.casts) - 1
            new = self.cast(first, now, old.dtype, math, sequence)
            group.casts.append(Cast(old, now.dtype, new, sequence))
            group.subs[t] = new
        for i in run.ops:
            self.draft.begin(i)
            self.translate(i, group.subs, within=within[i])
        self.join(run, group)
        if len(group.casts) > before:
            self._lower(run, group, math, group.casts[-1].source)

    def _lowered(self, t: int, group: Group) -> bool:
        """Whether an input of a run is of less precision than it was."""
        old = self.old.tensors[t]
        relative = self._relative(old, group.subs) if t not in group.subs else group.subs[t]
        return old.storage in self.known and relative is None and old.dtype == "float32" != self.dtype(t)

    def _lower(self, run: Run, group: Group, within: tuple[str, ...], dtype: str) -> None:
        last = next(op for op in (self.old.ops[i] for i in reversed(run.ops)) if op.outputs)
        out = self.old.tensors[last.outputs[0]]
        for i in run.ops:
            for t in self.old.ops[i].outputs:
                if self.old.tensors[t].storage == out.storage:
                    group.subs[t] = self.get(t, group.subs)
        sequence = self.number(last.sequence) + 1
        self._move(out, self.cast(last, self.get(out.id, group.subs), dtype, within, sequence))

    def _turns(self, op: Op) -> bool:
        return op.name == "aten::as_strided" and len(op.within) > 1 and op.within[-2].startswith(INNER)

    def _attend(self, op: Op, subs: dict[int, Tensor], around: tuple[str, ...]) -> None:
        tensors = [self.get(t, subs) for t in references(op.inputs)]
        given = sdpa.given(op, tensors, self.draft, op.sequence in self._learnt)
        out = self.old.tensors[op.outputs[0]]
        like = replace(op, sequence=self.number(op.sequence))
        was: sdpa.Backend = "cudnn" if "cudnn" in op.name else "flash" if "flash" in op.name else "efficient"
        made = sdpa.forward(self.draft, like, around, given, out.storage, was)
        self.place[out.storage] = Place(out.storage, made.out.dtype, out, made.out)
        self.known |= {self.old.tensors[t].storage for t in op.outputs}
        self.fused[out.storage] = made

    def _node(self, run: Run, group: Group | None) -> None:
        made = self._read(run)
        if made is None or run.kind != "backward":
            super()._node(run, group)
            return
        subs = dict(group.subs) if group else {}
        self._meet(run, made.out.dtype, subs)
        for i in run.ops:
            self.draft.begin(i)
            op = self.old.ops[i]
            if op.name.endswith("_attention_backward"):
                self._attend_back(op, made, subs)
            elif accumulates(op):
                self._accumulate(i, group, subs)
            if group is not None and group is self._open:
                self._made |= self._made_by(i)

    def _read(self, run: Run) -> sdpa.Fused | None:
        """The attention whose backward node a run is: the one whose result its kernel reads."""
        for i in run.ops:
            op = self.old.ops[i]
            read = references(op.inputs) if op.name.endswith("_attention_backward") else ()
            found = next((s for s in (self.old.tensors[t].storage for t in read) if s in self.fused), None)
            if found is not None:
                return self.fused[found]
        return None

    def _attend_back(self, op: Op, made: sdpa.Fused, subs: dict[int, Tensor]) -> None:
        grad = self.get(sdpa.incoming(op), subs)
        grad = grad if "cudnn" in op.name else sdpa.turned(self.draft, grad)
        outs = [self.old.tensors[t] for t in op.outputs[:3]]
        storages = [o.storage for o in outs] + [None] * (3 - len(outs))
        like = replace(op, sequence=self.number(op.sequence))
        self.default = grad.dtype
        self.settle(replace(op, inputs=(), outputs=op.outputs[3:]))
        more = [self.get(t) for t in op.outputs[3:]]
        for old, new in zip(outs, sdpa.backward(self.draft, like, made, grad, storages, more), strict=False):
            self.known.add(old.storage)
            self.place[old.storage] = Place(old.storage, new.dtype, old, new)
