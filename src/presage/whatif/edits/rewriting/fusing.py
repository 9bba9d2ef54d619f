"""Fusing: attention that is written out, run by one kernel instead, in both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op, Ref, Tensor
from presage.whatif.edits.memory_layout import contiguous, viewed
from presage.whatif.edits.rewriting import sdpa
from presage.whatif.edits.rewriting.attending import Attending
from presage.whatif.edits.rewriting.manual import Manual, Part
from presage.whatif.edits.rewriting.retype import Group, Place
from presage.whatif.edits.rewriting.runs import Listing, Run, accumulates
from presage.whatif.edits.rewriting.types import FLOATS

__all__ = ["Fusing"]

PASSED_ON = ("aten::mul", "aten::div", "aten::neg", "aten::sum")  # ops that a factor or a gradient goes through alone


class Fusing(Attending):
    def __init__(self, graph: Graph, listing: Listing) -> None:
        super().__init__(graph, listing)
        self._gone: set[int] = set()  # ops that the kernel does without
        self._last: dict[int, Manual] = {}  # by the place of its last op
        self._casting: dict[int, Manual] = {}  # casts of what a kernel is given, which stay
        self._numbered: dict[int, Manual] = {}
        self._ran: dict[int, sdpa.Fused] = {}  # by the place of the last op
        self._done: set[int] = set()  # those whose backward pass has run
        self._groups: dict[int, Group] = {}  # casts before it, by the place of the last op
        self._twins: dict[int, Manual] = {}  # where a checkpoint's ops run again: the same, by the place of the last op

    def plan(self, m: Manual, group: Group | None = None) -> None:
        """This attention is to be fused, with the casts before it that were made for it."""
        if group is not None:
            self._groups[m.last] = group
        self._gone |= set(m.forward)
        self._last[m.last] = m
        self._numbered |= dict.fromkeys(m.numbers, m)
        first = self.runs[self.story.run_of[min(i for i in m.forward if self.old.ops[i].kernels)]]
        ends = (first, self.runs[self.story.run_of[m.last]])
        self._casting |= {i: m for run in ends for i in run.ops if i not in self._gone}

    def pair(self, m: Manual, others: Sequence[Manual]) -> None:
        """Attention that a checkpoint runs again stands for that of the forward pass, whose backward nodes read it."""
        again = self.old.ops[m.last]
        for first in others if again.thread == "autograd" else ():
            there = self.old.ops[first.last]
            if there.thread == "main" and there.module == again.module and first.last not in self._twins:
                self._twins[first.last] = m
                return

    def takes(self, m: Manual) -> bool:
        """Whether a kernel takes it, and nothing else needs the scores or their gradient."""
        learnt = any(self.old.storages[self.old.tensors[t].storage].role == "parameter" for t in m.masks)
        if learnt or len(m.masks) > 1 or sdpa.backend(self._given(m, self.old.tensors.__getitem__)) == "math":
            return False
        return self._apart(m)

    def fits(self, m: Manual, dtype: str = "") -> bool:
        """Whether a kernel takes it as its tensors are now, or as they were cast."""
        a = self._given(m, lambda t: replace(self.get(t), dtype=dtype) if dtype else self.get(t))
        return sdpa.backend(a) != "math" and self._apart(m)

    def unfused(self, run: Run) -> Manual | None:
        """A call of attention that no kernel took, as it was written out then."""
        found: dict[tuple[int, int], Tensor] = {}
        masks: dict[int, None] = {}
        for op in (self.old.ops[i] for i in run.ops):
            for place, t in enumerate(self.old.tensors[x] for x in references(op.inputs)):
                outer = self.story.made.get(t.storage, -1) < run.first and t.dtype in FLOATS and len(t.shape) == 4
                if outer and place and op.name in ("aten::add", "aten::add_"):
                    masks[t.id] = None
                elif outer:
                    found.setdefault((t.storage, t.offset), t)
        outputs = [self.old.ops[i].outputs for i in run.ops if self.old.ops[i].outputs]
        if len(found) != 3 or not outputs:
            return None
        q, k, v = (Part(t) for t in found.values())
        names = {self.old.ops[i].name for i in run.ops}
        return Manual(
            q, k, v, self.old.tensors[outputs[-1][0]], [*run.ops], run.last - 1, q.tensor.shape[-1] ** -0.5,
            self._dropout(run), list(masks), {self.old.ops[i].sequence for i in run.ops} - {-1}, self._is_cast(run),
            "aten::tril" in names,
        )  # fmt: skip

    def _dropout(self, run: Run) -> float:
        rates = [self.old.ops[i].inputs[1] for i in run.ops if self.old.ops[i].name == "aten::native_dropout"]
        return float(rates[0]) if rates and isinstance(rates[0], int | float) else 0.0

    def _is_cast(self, run: Run) -> bool:
        """Whether autocast was around a call."""
        return any(self.old.ops[i].within[run.depth : run.depth + 2] == (run.listed,) * 2 for i in run.ops)

    def _apart(self, m: Manual) -> bool:
        """Whether each gradient that leaves its nodes is known to be of one factor."""
        roots = [self._root(m, s) for s in self._leaving(m)]
        return all(roots) and len(set(roots)) == len(roots)

    # ---- forward

    def ahead(self, i: int) -> bool:
        """Whether an op of the forward pass is a fused attention's; what it then stands for is written."""
        if i in self._casting:
            self._cast_ahead(i, self._casting[i])
        if i in self._last:
            self._attend_whole(self._last[i])
        return i in self._casting or i in self._gone

    def _cast_ahead(self, i: int, m: Manual) -> None:
        """A cast before a product is one before the kernel; of keys that are not turned round any more."""
        op, depth = self.old.ops[i], self._depth(m)
        within = (*op.within[:depth], sdpa.AROUND, *op.within[depth + 1 :])
        new = self.translate(i, None, within=within, line=self.old.ops[m.last].line)
        if m.k.source >= 0 and op.outputs == (m.k.tensor.id,):
            into, source = (self._factor(self.draft.tensors[t], True).id for t in references(new.inputs))
            inputs = (Ref(into), Ref(source), *new.inputs[2:])
            self.draft.ops[-1] = replace(new, inputs=inputs, outputs=(into,), writes=(into,))

    def _given(self, m: Manual, get: Callable[[int], Tensor], bias: Tensor | None = None) -> sdpa.Attention:
        q, k, v = (self._factor(get(p.tensor.id), p.swapped) for p in (m.q, m.k, m.v))
        causal = m.causal or (any(self._is_causal(t, m) for t in m.masks) and q.shape[2] == k.shape[2])
        usual = isclose(m.scale, q.shape[-1] ** -0.5, rel_tol=1e-3)
        return sdpa.Attention(q, k, v, None if causal else bias, m.dropout, causal, None if usual else m.scale)

    def _factor(self, t: Tensor, swapped: bool = False) -> Tensor:
        """A factor as [batch, head, position, width]."""
        more = (1,) * (4 - len(t.shape))
        shape, strides = (*more, *t.shape), (*more, *t.strides)
        if swapped:
            shape, strides = (*shape[:2], shape[3], shape[2]), (*strides[:2], strides[3], strides[2])
        return self.draft.tensor(t.storage, shape, strides, t.dtype, t.offset)

    def _is_causal(self, mask: int, m: Manual) -> bool:
        """A mask of queries by keys that is the same for all samples and heads, or that the step makes out of nothing
        but numbers, is taken to be causal."""
        t = self.old.tensors[mask]
        rows, keys = m.q.tensor.shape[-2], m.v.tensor.shape[-2]
        if t.shape[-2:] != (rows, keys) or rows != keys:
            return False
        return all(n == 1 for n in t.shape[:-2]) or (t.shape[-3:-2] == (1,) and self._is_made_up(t.storage))

    def _is_made_up(self, storage: int) -> bool:
        """Whether nothing that the step was given has a part in it."""
        todo, seen = [storage], set[int]()
        while todo:
            s = todo.pop()
            if s not in self.story.made:
                return False
            seen.add(s)
            makers = [op for op in self.old.ops[: self.story.made[s] + 1] if op.thread == "main" and self._makes(op, s)]
            read = {self.old.tensors[t].storage for op in makers for t in references(op.inputs)}
            todo += [r for r in read - seen if r not in todo]
        return True

    def _makes(self, op: Op, storage: int) -> bool:
        return any(self.old.tensors[t].storage == storage for t in op.outputs)

    def _attend_whole(self, m: Manual) -> None:
        op, group = self.old.ops[m.last], self._groups.get(m.last)
        times = 2 if m.low or group is not None else 1
        around = (*op.within[: self._depth(m)], *[sdpa.AROUND] * times)
        bias = self._bias(m, op, around)
        like = replace(op, sequence=self.number(op.sequence))
        given = self._given(m, lambda t: self.get(t, group.subs if group else None), bias)
        made = sdpa.forward(self.draft, like, around, given, m.out.storage)
        self.known.add(m.out.storage)
        self.place[m.out.storage] = Place(m.out.storage, made.out.dtype, m.out, self._shaped(made.out, m.out.shape))
        self._ran[m.last] = made

    def _depth(self, m: Manual) -> int:
        """How many ops are around the call itself: those of a backward node where a checkpoint's ops run again."""
        return max(self.runs[self.story.run_of[m.last]].depth, 0)

    def _shaped(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.draft.tensor(t.storage, shape, viewed(t, shape) or contiguous(shape), t.dtype, t.offset)

    def _bias(self, m: Manual, op: Op, around: tuple[str, ...]) -> Tensor | None:
        """The mask as it is added to the scores, for every sample and head."""
        if not m.masks or self._is_causal(m.masks[0], m):
            return None
        group = self._groups.get(m.last)
        q, mask = (self.get(t, group.subs if group else None) for t in (m.q.tensor.id, m.masks[0]))
        q = self._factor(q)
        if mask.dtype == "bool":
            mask = self._from_bool(mask, q.dtype, op, around)
        elif mask.dtype != q.dtype:
            mask = self.cast(op, mask, q.dtype, around, self.number(op.sequence))
        pairs = [(1, 0)] * (4 - len(mask.shape)) + list(zip(mask.shape, mask.strides, strict=True))
        strides = tuple(0 if n == 1 else s for n, s in pairs)
        return self.draft.tensor(mask.storage, (*q.shape[:3], m.v.tensor.shape[-2]), strides, mask.dtype, mask.offset)

    def _from_bool(self, mask: Tensor, dtype: str, op: Op, around: tuple[str, ...]) -> Tensor:
        """Numbers to add: none where the mask lets through, minus infinity elsewhere."""
        pen = sdpa.Pen(self.draft, replace(op, sequence=self.number(op.sequence)), around)
        ends = [self.draft.new((), dtype) for _ in range(2)]
        for t in ends:
            pen.op("aten::empty", (), (), "aten::scalar_tensor", kernels=False)
            pen.op("aten::fill_", [Ref(t.id), 0], [t], "aten::scalar_tensor", overload="Scalar", writes=[t])
        out = self.draft.new(mask.shape, dtype, None, op.module)
        pen.op("aten::where", [Ref(t.id) for t in (mask, *ends)], [out], overload="self")
        return out

    # ---- backward

    def backward(self, run: Run) -> None:
        m = self._numbered.get(self.old.ops[run.first].sequence) if run.kind == "backward" else None
        if m is None:
            super().backward(run)
            return
        group = self._groups.get(m.last)
        if self._open is not group:
            self.flush(run.first)
        if group is not None and group.casts and self._open is None:
            self.open(group)
        start = len(self.draft.ops)
        self.draft.begin(run.first)
        if m.last not in self._done:
            self._done.add(m.last)
            self._attend_whole_back(run, m)
        for i in run.ops:
            self.draft.begin(i)
            if accumulates(self.old.ops[i]):
                self._accumulate(i, group, {})
            if self._open is not None:
                self._made |= self._made_by(i)
        self.draft.nodes.append((start, len(self.draft.ops)))

    def _inside(self, m: Manual) -> set[int]:
        """The ops of an attention's backward nodes."""
        return {
            i
            for run in self.runs
            if run.kind == "backward" and self.old.ops[run.first].sequence in m.numbers
            for i in run.ops
            if not accumulates(self.old.ops[i])
        }

    def _leaving(self, m: Manual) -> dict[int, int]:
        """Gradients that leave an attention's nodes: the storage, and the tensor that others read."""
        inside, out = self._inside(m), dict[int, int]()
        for s in {self.old.tensors[t].storage for i in inside for t in self.old.ops[i].outputs}:
            readers = [i for i in self.story.readers.get(s, ()) if i not in inside]
            if self.story.made.get(s) in inside and readers:
                out[s] = next(
                    t for t in references(self.old.ops[readers[0]].inputs) if self.old.tensors[t].storage == s
                )
        return out

    def _root(self, m: Manual, storage: int) -> str:
        """Which factor a gradient is of; '' for the scores."""
        op = self.old.ops[self.story.made[storage]]
        storages = [self.old.tensors[t].storage for t in references(op.inputs)]
        gradients = [s for s in storages if self.story.is_gradient(s) and s != storage]
        if op.name == "aten::copy_" or (op.name in PASSED_ON and len(storages) == 1):
            return self._root(m, gradients[0]) if gradients else ""
        if op.name not in ("aten::bmm", "aten::mm", "aten::baddbmm"):
            return ""
        saved = next((s for s in storages if s not in gradients), -1)
        q, k, v = (self._copies(m, name) for name in "qkv")
        return "k" if saved in q else "q" if saved in k else "" if saved in v else "v"

    def _copies(self, m: Manual, name: str) -> set[int]:
        """The storages that hold a factor as the products see it."""
        twin = self._twins.get(m.last)
        return self._held(m, getattr(m, name)) | (self._held(twin, getattr(twin, name)) if twin else set())

    def _held(self, m: Manual, part: Part) -> set[int]:
        whole = part.tensor
        found = {whole.storage}
        for i in m.forward:
            op = self.old.ops[i]
            read = [self.old.tensors[t] for t in references(op.inputs)]
            passed = op.name == "aten::copy_" or (op.name in PASSED_ON and len(read) == 1)
            # queries, keys and values may be parts of one storage
            if (
                passed
                and read[-1].storage in found
                and (read[-1].storage, read[-1].offset) in self._starts(found, whole)
            ):
                found |= {self.old.tensors[t].storage for t in op.outputs}
        return found

    def _starts(self, found: set[int], whole: Tensor) -> set[tuple[int, int]]:
        return {(s, whole.offset if s == whole.storage else 0) for s in found}

    def _attend_whole_back(self, run: Run, m: Manual) -> None:
        made, last = self._ran[self._twins.get(m.last, m).last], self.old.ops[m.last]
        inside = self._inside(m)
        read = (self.old.tensors[t] for i in run.ops for t in references(self.old.ops[i].inputs))
        outer = (t for t in read if self.story.is_gradient(t.storage) and self.story.made[t.storage] not in inside)
        grad = self._shaped(self.get(next(outer).id), made.out.shape)
        leaving = {self._root(m, s): self.old.tensors[t] for s, t in self._leaving(m).items()}
        storages = [leaving[x].storage if x in leaving else None for x in "qkv"]
        like = replace(self.old.ops[run.first], sequence=self.number(last.sequence), module=last.module, line=last.line)
        for name, new in zip("qkv", sdpa.backward(self.draft, like, made, grad, storages), strict=True):
            if name in leaving:
                self._leave(leaving[name], new)

    def _leave(self, old: Tensor, new: Tensor) -> None:
        """A gradient as those who take it know it."""
        self.known.add(old.storage)
        if old.shape[-2:] != new.shape[-2:] and old.shape[-2:] == new.shape[-2:][::-1]:
            new = self._factor(new, True)
        shown = new if old.shape == new.shape else self._shaped(new, old.shape)
        self.place[old.storage] = Place(old.storage, new.dtype, old, shown)
