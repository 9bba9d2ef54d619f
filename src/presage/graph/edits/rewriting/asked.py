"""Casts that the user's code asks for: `.float()`, `.to(x.dtype)`.

On float32 tensors they do nothing, and a graph shows only that they were called. Here they come to life: a tensor that
is now of low precision is cast up, and what a module has cast up it casts down again where it calls for a type the
next time. Which tensor is meant is read from the ops before and after the call.
"""

from __future__ import annotations

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.edits.rewriting.fusing import Fusing
from presage.graph.edits.rewriting.retype import SPREAD, Cast, Group
from presage.graph.edits.rewriting.runs import Listing, Run
from presage.graph.graph import Graph

__all__ = ["Asked"]

NEAR, FAR = 4, 40  # ops between a call and the op that takes its result, the tensor's shape not known or known


class Asked(Fusing):
    def __init__(self, graph: Graph, listing: Listing, low: str) -> None:
        super().__init__(graph, listing)
        self.low = low
        self._told = any(op.name == "aten::to" and op.inputs for op in graph.ops)  # what such calls are about
        self._lifted: set[str] = set()  # modules that have cast something up
        self._casts: dict[int, Cast] = {}  # what the next runs take instead of an old tensor
        self._owned: list[Cast] = []  # those that a run has taken
        self._taker = 0  # the op that takes the latest
        self._until = ""  # the module whose ops take it; '' for the next run alone

    def asks(self, run: Run) -> bool:
        """Whether a run is such a call and was made a cast."""
        op = self.old.ops[run.first]
        if op.name != "aten::to" or op.within or op.thread != "main" or bool(op.inputs) != self._told:
            return False
        if self._until:
            self._casts, self._until = {}, ""
        found = self._subject(run.first)
        if found is None:
            return False
        subject, taker = found
        now, old = self.get(subject), self.old.tensors[subject]
        dtype = self._dtype(op.module, now.dtype, old.dtype)
        if dtype == now.dtype:
            return False
        sequence = max(self.old.ops[taker].sequence * SPREAD - SPREAD // 2, 0)
        new = self.cast(replace(op, inputs=()), now, dtype, (), sequence)
        lasting = self._lasts(subject, taker)
        self._casts = {subject: Cast(old, now.dtype, new, sequence, lasting)}
        self._until, self._taker = op.module or "-" if lasting else "", taker
        return True

    def _lasts(self, subject: int, taker: int) -> bool:
        """Whether others than the next op take the result: those of its module, up to the next such call."""
        module = self.old.ops[taker].module
        for op in self.old.ops[taker + 1 :]:
            if op.module != module or op.name == "aten::to" or op.thread != "main":
                return False
            if subject in references(op.inputs):
                return True
        return False

    def _dtype(self, module: str, now: str, was: str) -> str:
        if now != was:
            self._lifted.add(module)
            return was
        if module in self._lifted and now == "float32":
            self._lifted.discard(module)
            return self.low
        return now

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
            if taker.thread == "main" and taker.phase == op.phase and ids:
                return next(((t, j) for t in ids if t in before), (ids[0], j))
        return None

    def asking(self, run: Run, group: Group | None) -> Group | None:
        """The run's group, with the casts that the user's code asked for among its inputs."""
        module = self.old.ops[run.first].module
        if self._until and (module or "-") != self._until:
            self._casts, self._until = {}, ""
        read = {t for i in run.ops for t in references(self.old.ops[i].inputs)}
        for t in [t for t in self._casts if t in read]:
            group = group or Group()
            group.subs.setdefault(t, self._casts[t].new)
            (group.used if self._casts[t] in self._owned else group.casts).append(self._casts[t])
            self._owned.append(self._casts[t])
        if group is not None:
            self.join(run, group)
        return group

    def answered(self, run: Run) -> None:
        """The run that was to take a cast has run; what only shows it otherwise is what the next take."""
        for op in (self.old.ops[i] for i in run.ops):
            cast = next((c for t, c in self._casts.items() if t in references(op.inputs)), None)
            if cast is not None and not op.kernels:
                same = [t for t in op.outputs if self.old.tensors[t].storage == cast.old.storage]
                self.views |= {t: self._view(self.old.tensors[t], cast.old, cast.new) for t in same}
        if not self._until and run.last > self._taker:
            self._casts = {}
