"""Autocast: products, convolutions and attention in low precision on float32 parameters."""

from __future__ import annotations

from collections.abc import Sequence

from presage.errors import PresageError
from presage.graph.arguments import references
from presage.graph.autocast import kind_of
from presage.graph.graph import Graph, Op, Tensor
from presage.whatif.edits.edit import Change, NotApplicable, valued
from presage.whatif.edits.rewriting import sdpa
from presage.whatif.edits.rewriting.asked import Asked
from presage.whatif.edits.rewriting.retype import Cast, Group
from presage.whatif.edits.rewriting.runs import Run
from presage.whatif.edits.rewriting.types import FLOATS, LOW

__all__ = ["EDITS", "autocast", "nests"]

CAST = ("aten::to", "aten::_to_copy")
INSIDE = ("aten::softmax", "aten::log_softmax")  # cast their input themselves; others with a float32 result need not


def nests(name: str) -> bool:
    """Whether an op runs itself again, by another overload, without autocast's doing."""
    return name in ("aten::sum", "aten::prod", "aten::norm") or "upsample" in name


def autocast(dtype: str = "bfloat16") -> Change:
    """The forward pass under `torch.autocast("cuda", dtype)`."""

    def change(graph: Graph) -> Graph:
        return _Autocast(graph, dtype).changed()

    return change


def listing(op: Op) -> tuple[int, str]:
    """The outermost op around this one, or itself, that autocast has in a list; none where it was at work already."""
    path = (*op.within, op.name)
    for depth, name in enumerate(path):
        if name.startswith("aten::_") and depth < len(op.within):
            break  # what such an op runs inside is past autocast
        if kind_of(name):
            doubled = path[depth + 1 : depth + 2] == (name,) and not (nests(name) and depth + 2 == len(path))
            cast = path[depth + 1 : depth + 3] == CAST
            return (-1, "") if doubled or cast else (depth, name)
    return -1, ""


class _Autocast(Asked):
    def __init__(self, graph: Graph, low: str) -> None:
        super().__init__(graph, listing, low)
        self._now = Run("forward", 0, 0)
        self._fresh = False  # a backward pass has run since the last forward op
        self.lowered = 0  # casts to the low type before a product
        self.kept: dict[int, Cast] = {}  # casts of parameters, by storage, until the pass ends
        self.parameters = {s.id for s in graph.storages if s.role == "parameter"}

    def changed(self) -> Graph:
        for run in self.runs:
            if run.kind in ("backward", "gradient"):
                if any(self.old.ops[i].kernels for i in run.ops):
                    self.kept, self._fresh = {}, True
                self.backward(run)
                continue
            if self._fresh:  # a checkpoint's ops run again, or another pass begins
                self.again, self._fresh = {}, False
            self.flush(run.first)
            self.forward(run)
        self.flush(len(self.old.ops))
        if not self.lowered:
            raise NotApplicable("no product, convolution or attention of the forward pass is in float32")
        return self.draft.done()

    def forward(self, run: Run) -> None:
        self.draft.begin(run.first)
        if self.asks(run):
            return
        kind = "" if self._switched_off(run) else kind_of(run.listed)
        start = len(self.draft.ops)
        group = self._group(run, kind, self.asking(run, None))
        self._now, self.default = run, self.low if kind and self.attends(run) else ""
        if run.listed == sdpa.AROUND and self.attends(run):
            self.attend(run, group, (*self.old.ops[run.first].within[: run.depth], *[sdpa.AROUND] * 2))
        elif run.listed == sdpa.AROUND and not self._refused(run):
            self.attend_plainly(run, group, {i: _twice(self.old.ops[i], run) for i in run.ops})
        elif run.listed != sdpa.AROUND:
            self._each(run, kind, group)
        self.default = ""
        if group is not None:
            self.join(run, group)
        self.draft.nodes.append((start, len(self.draft.ops)))
        self.answered(run)

    def forward_op(self, i: int, subs: dict[int, Tensor]) -> None:
        self.translate(i, subs, within=_twice(self.old.ops[i], self._now))

    def _refused(self, run: Run) -> bool:
        """Attention that no kernel took in float32: whether one takes it now, which is then written."""
        m = self.unfused(run)
        if m is None or not self.fits(m, self.low):
            return False
        group, outer = Group(), (*self.old.ops[run.first].within[: run.depth], sdpa.AROUND)
        parts = [t for t in (m.v.tensor.id, m.k.tensor.id, m.q.tensor.id, *m.masks) if self.dtype(t) != self.low]
        for number, t in enumerate(parts):
            self._cast_input(run, group, t, self.low, outer, len(parts) - number)
        self.join(run, group)
        self.plan(m, group)
        for i in run.ops:
            self.draft.begin(i)
            self.ahead(i)
        return True

    def _each(self, run: Run, kind: str, group: Group | None) -> None:
        for i in run.ops:
            self.draft.begin(i)
            op = self.old.ops[i]
            if kind == "full output" and run.listed not in INSIDE:
                self.settle(op, None, "float32")
            self.translate(i, group.subs if group else None, within=_twice(op, run) if kind else op.within)

    def _switched_off(self, run: Run) -> bool:
        """Rotary embeddings of the usual libraries switch autocast off: their angles need float32."""
        return "rotary" in self.old.ops[run.first].module

    def _group(self, run: Run, kind: str, group: Group | None) -> Group | None:
        """The casts before a run, beside those that were asked for."""
        target = self._target(run, kind)
        if not target or (run.listed == sdpa.AROUND and not self.attends(run)):
            return group
        group = group or Group()
        outer = (*self.old.ops[run.first].within[: run.depth], run.listed)
        outer = (*outer, run.listed) if run.listed in INSIDE else outer
        found = self._foreign(run, target, group)
        for number, t in enumerate(found):
            self._cast_input(run, group, t, target, outer, len(found) - number)
        self.join(run, group)
        return group

    def _target(self, run: Run, kind: str) -> str:
        if not kind or kind == "full output":
            told = "aten::cross_entropy_loss" in self.old.ops[run.first].within  # asks for the type it is given
            return "float32" if run.listed in INSIDE and not told else ""
        if kind != "widest":
            return self.low if kind == "low" else "float32"
        seen = {self.dtype(t) for i in run.ops for t in self.floats(references(self.old.ops[i].inputs))
                if self.old.tensors[t].storage in self.known}  # fmt: skip
        return "float32" if "float32" in seen else self.low

    def _foreign(self, run: Run, target: str, group: Group) -> list[int]:
        """What a run is given in another type, in the order of the casts: weights first, then from the last on."""
        found = dict[tuple[int, int, int], int]()
        for i in run.ops:
            for t in references(self.old.ops[i].inputs):
                x = self.old.tensors[t]
                if (
                    x.storage in self.known
                    and x.dtype in FLOATS
                    and self.dtype(t, group.subs) not in (target, "float64")
                ):
                    found.setdefault((x.storage, x.offset, x.elements), t)
        ids = list(reversed(found.values()))
        return sorted(ids, key=lambda t: self._is_whole(t) * (len(self.old.tensors[t].shape) - 9))

    def _is_whole(self, t: int) -> bool:
        """Whether it is a parameter and not a part of one."""
        x = self.old.tensors[t]
        return x.storage in self.parameters and x.nbytes == self.old.storages[x.storage].nbytes

    def _cast_input(self, run: Run, group: Group, t: int, dtype: str, outer: Sequence[str], number: int) -> None:
        old, now = self.old.tensors[t], self.get(t, group.subs)
        keep = self._is_whole(t) and dtype == self.low and old.shape != ()
        if keep and old.storage in self.kept:
            cast = self.kept[old.storage]
            group.used.append(cast)
        else:
            first = self.old.ops[run.first]
            wanted = old.storage in self.parameters or old.storage in self.story.made
            sequence = self.number(first.sequence) - (number if wanted else 0)
            new = self.cast(first, now, dtype, tuple(outer), sequence)
            self.lowered += dtype == self.low and old.dtype == "float32"
            cast = Cast(old, now.dtype, new, sequence, keep, wanted)
            group.casts.append(cast)
            if keep:
                self.kept[old.storage] = cast
        group.subs[t] = cast.new


def _twice(op: Op, run: Run) -> tuple[str, ...]:
    """The ops around it: autocast's call of a listed op is one more of the same name."""
    return (
        (*op.within[: run.depth + 1], *op.within[run.depth :]) if run.depth < len(op.within) else (*op.within, op.name)
    )


def _make(value: str) -> Change:
    dtype = {"": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(value, value)
    if dtype not in LOW:
        raise PresageError(f"autocast takes bfloat16 or float16, but {value!r} was given: write autocast=bfloat16")
    return autocast(dtype)


EDITS = (
    valued(
        "autocast",
        "The forward pass under torch.autocast: products, convolutions and attention in bfloat16 (or float16), "
        "losses, norms and sums in float32, with the casts between them; weights are cast once a step, and gradients "
        "are cast back. Parameters and the optimizer stay float32; a float16 run would also need a scaler.",
        "bfloat16",
        _make,
        tried=("",),
        needed=False,
    ),
)
