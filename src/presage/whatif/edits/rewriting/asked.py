"""Casts that the user's code asks for: `.float()`, `.to(x.dtype)`.

On float32 tensors they do nothing, and a graph shows only that they were called. Here they come to life: a tensor that
is now of low precision is cast up, and what a module has cast up it casts down again where it calls for a type the
next time. Which tensor is meant is read from the ops before and after the call.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op, Tensor
from presage.whatif.edits.rewriting.fusing import Fusing
from presage.whatif.edits.rewriting.retype import SPREAD, Cast, Group
from presage.whatif.edits.rewriting.runs import Listing, Run

__all__ = ["Asked"]

CAST = ("aten::to", "aten::_to_copy")
CALLS: tuple[tuple[str, ...], ...] = ((), ("aten::type_as",))  # around such a call
NEAR, FAR = 4, 200  # ops between a call and the op that takes its result, the tensor's shape not known or known


@dataclass
class _Asked:
    """A cast that was asked for, and who takes it instead of the old tensor."""

    cast: Cast
    last: int  # the last op that does
    owned: bool = False  # a run has taken it


class Asked(Fusing):
    def __init__(self, graph: Graph, listing: Listing, low: str) -> None:
        super().__init__(graph, listing)
        self.low = low
        self._told = any(op.name == "aten::to" and op.inputs for op in graph.ops)  # what such calls are about
        self._lifted: set[int] = set()  # old storages that come from something cast up
        self._asked: dict[int, _Asked] = {}  # by old tensor
        self._passed: dict[int, Tensor] = {}  # views of what was cast, for the next to take

    def asks(self, run: Run) -> bool:
        """Whether a run is such a call and was made a cast."""
        op = self.old.ops[run.first]
        if op.name != "aten::to" or op.within not in CALLS or op.thread != "main" or bool(op.inputs) != self._told:
            return False
        found = self._subject(run.first)
        if found is None:
            return False
        subject, taker = found
        now, old = self.get(subject), self.old.tensors[subject]
        dtype = self._dtype(old, now.dtype)
        if dtype == now.dtype or not old.elements:
            return False
        sequence = max(self.old.ops[taker].sequence * SPREAD - SPREAD // 2, 0)
        new = self.cast(replace(op, inputs=()), now, dtype, op.within, sequence)
        last = len(self.old.ops) if dtype == self.low else self._lasts(subject, taker)
        self._asked[subject] = _Asked(Cast(old, now.dtype, new, sequence, last > taker), last)
        return True

    def _lasts(self, subject: int, taker: int) -> int:
        """The last op that takes what was cast up: others of the taker's module may, up to the next such call."""
        last, module = taker, self.old.ops[taker].module
        for i, op in enumerate(self.old.ops[taker + 1 :], taker + 1):
            if op.module != module or op.name == "aten::to" or op.thread != "main":
                break
            last = i if subject in references(op.inputs) else last
        return last

    def _dtype(self, old: Tensor, now: str) -> str:
        """What a tensor is cast to: the type it had, or down again if it comes from something that was cast up."""
        if now != old.dtype:
            return old.dtype
        return self.low if old.storage in self._lifted and now == "float32" else now

    def translate(self, i: int, subs: dict[int, Tensor] | None = None, **changes: object) -> Op:
        new, op = super().translate(i, subs, **changes), self.old.ops[i]
        if op.thread == "main" and op.phase == "forward":
            read = list(references(op.inputs))
            up = any(
                t in self._passed or (t in self._asked and self._asked[t].cast.new.dtype != self.low) for t in read
            )
            made_float = op.name == "aten::copy_" and op.within == CAST and not self.floats(read[-1:])
            up = up or (made_float and self.parameter == self.low)  # numbers that a low model makes of others
            if up or any(self.old.tensors[t].storage in self._lifted and t not in self._asked for t in read):
                made = {self.old.tensors[t].storage for t in op.outputs if self.dtype(t, subs) == "float32"}
                self._lifted |= made
        return new

    def _subject(self, i: int) -> tuple[int, int] | None:
        """The tensor that is meant, and the op that takes it."""
        op = self.old.ops[i]
        shape, dtype = op.inputs if len(op.inputs) == 2 else (None, None)
        before = next((b.outputs for b in reversed(self.old.ops[max(0, i - NEAR) : i]) if b.outputs), ())
        for j in range(i + 1, min(i + 1 + (FAR if shape else NEAR), len(self.old.ops))):
            taker = self.old.ops[j]
            ids = [t for t in self.floats(references(taker.inputs)) if self.old.tensors[t].storage in self.known]
            if shape is not None:
                ids = [t for t in ids if (list(self.old.tensors[t].shape), self.old.tensors[t].dtype) == (shape, dtype)]
            ids = [t for t in ids if t not in self._asked or self._asked[t].last < i]
            if taker.thread == "main" and taker.phase == op.phase and ids:
                return next(((t, j) for t in ids if t in before), (ids[0], j))
        return None

    def asking(self, run: Run, group: Group | None) -> Group | None:
        """The run's group, with the casts that the user's code asked for among its inputs."""
        if self.old.ops[run.first].thread != "main":
            return group
        read = dict.fromkeys(t for i in run.ops for t in references(self.old.ops[i].inputs))
        for t in read:
            one = self._asked.get(t)
            if one is not None and run.first <= one.last:
                group = group or Group()
                group.subs.setdefault(t, one.cast.new)
                (group.used if one.owned else group.casts).append(one.cast)
                one.owned = True
            elif t in self._passed:
                group = group or Group()
                group.subs[t] = self._passed[t]
        if group is not None:
            self.join(run, group)
        return group

    def answered(self, run: Run) -> None:
        """What only shows a cast otherwise is what the next take."""
        for op in (self.old.ops[i] for i in run.ops):
            source = next((t for t in references(op.inputs) if self._taken_by(t, run)), None)
            if source is None:
                continue
            if op.kernels:
                if source in self._passed and self._passed[source].dtype != self.low:
                    del self._passed[source]
                continue
            old, new = self.old.tensors[source], self._passed.get(source)
            new = self._asked[source].cast.new if new is None else new
            same = [t for t in op.outputs if self.old.tensors[t].storage == old.storage]
            self._passed |= {t: self._view(self.old.tensors[t], old, new) for t in same}

    def _taken_by(self, t: int, run: Run) -> bool:
        return t in self._passed or (t in self._asked and run.first <= self._asked[t].last)
