"""Other types of numbers for a whole step: TF32 products, or everything in bfloat16."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.autocast import kind_of
from presage.graph.families import family
from presage.graph.graph import DTYPE_BYTES, Graph, Op, Storage, Tensor
from presage.whatif.edits.autocast import nests
from presage.whatif.edits.edit import NotApplicable, plain
from presage.whatif.edits.rewriting import sdpa
from presage.whatif.edits.rewriting.asked import Asked
from presage.whatif.edits.rewriting.attending import MATH
from presage.whatif.edits.rewriting.retype import Cast, Group, Place
from presage.whatif.edits.rewriting.runs import Run, outside
from presage.whatif.edits.rewriting.types import FLOATS

__all__ = ["EDITS", "bf16", "tf32"]

PRODUCTS = ("matrix multiply", "convolution", "recurrent")
MODEL = ("parameter", "gradient", "optimizer", "buffer", "input")
CAST = ("aten::to", "aten::_to_copy")


def tf32(graph: Graph) -> Graph:
    """Products and convolutions of float32 numbers on tensor cores, their inputs rounded to 19 bits."""
    flags = {"allow_tf32": True, "cudnn.allow_tf32": True}
    if all(graph.flags.get(k) for k in flags):
        raise NotApplicable("TF32 is on already, for products and for convolutions")
    if not any(_gains(graph, op) for op in graph.ops):
        raise NotApplicable("no product or convolution of float32 numbers that does not use TF32 already")
    return replace(graph, flags={**graph.flags, **flags, "float32_matmul_precision": "high"})


def _gains(graph: Graph, op: Op) -> bool:
    kind = family(op.name)
    if kind not in PRODUCTS or not op.kernels or "float32" not in {t.dtype for t in graph.inputs_of(op)}:
        return False
    return not graph.flags.get("allow_tf32" if kind == "matrix multiply" else "cudnn.allow_tf32")


def bf16(graph: Graph) -> Graph:
    """Parameters, gradients, optimizer state, buffers and inputs in bfloat16, and no autocast."""
    return _Whole(graph, "bfloat16").changed()


def _listing(op: Op) -> tuple[int, str]:
    path = (*op.within, op.name)
    return (path.index(sdpa.AROUND), sdpa.AROUND) if sdpa.AROUND in path else (-1, "")


class _Whole(Asked):
    """Every float32 of the model becomes low; casts that autocast made go, those that the user's code makes stay."""

    def __init__(self, graph: Graph, low: str) -> None:
        super().__init__(graph, _listing, low)
        self.parameter = low
        dtypes: dict[int, tuple[str, bool]] = {}
        for t in graph.tensors:
            dtypes.setdefault(t.storage, (t.dtype, not t.shape))
        self.changed_storages = [s for s in graph.storages if self._changes(s, *dtypes.get(s.id, ("float32", False)))]

    def _changes(self, s: Storage, dtype: str, number: bool) -> bool:
        counts = s.role == "optimizer" and (number or s.nbytes == DTYPE_BYTES["float32"])  # steps that were taken
        return s.id in self.known and s.role in MODEL and dtype == "float32" and not counts

    def changed(self) -> Graph:
        if not any(s.role == "parameter" for s in self.changed_storages):
            raise NotApplicable("no parameter is float32")
        for s in self.changed_storages:
            self.start(s.id, self.low)
        for run in self.runs:
            if run.kind in ("backward", "gradient"):
                self.backward(run)
            else:
                self.flush(run.first)
                self.forward(run)
        self.flush(len(self.old.ops))
        return self.draft.done()

    def forward(self, run: Run) -> None:
        self.draft.begin(run.first)
        start = len(self.draft.ops)
        if self.asks(run):
            return
        group = self._matched(run, self.asking(run, None))
        if run.listed == sdpa.AROUND and self.attends(run):
            self.attend(run, group, _once((*self.old.ops[run.first].within[: run.depth], sdpa.AROUND)))
        elif run.listed == sdpa.AROUND and (m := self.unfused(run)) is not None and self.fits(m):
            self.plan(dataclasses.replace(m, low=False))
            for i in run.ops:
                self.draft.begin(i)
                self.ahead(i)
        elif run.listed == sdpa.AROUND:
            self.attend_plainly(run, group, {i: _once(self.old.ops[i].within) for i in run.ops})
        else:
            for i in run.ops:
                self.draft.begin(i)
                self.forward_op(i, group.subs if group else {})
        self.draft.nodes.append((start, len(self.draft.ops)))
        self.answered(run)

    def forward_op(self, i: int, subs: dict[int, Tensor]) -> None:
        op = self.old.ops[i]
        if not self._uncast(i, subs, self._target(op)):
            self.translate(i, subs, within=_once(op.within, op.name))

    def _matched(self, run: Run, group: Group | None) -> Group | None:
        """A product takes one type only: what comes to it in another, code must have cast to its weight's."""
        op = self.old.ops[run.first]
        if family(op.name) not in PRODUCTS or not op.kernels:
            return group
        subs = group.subs if group else {}
        wide = [t for t in self.floats(references(op.inputs)) if self.dtype(t, subs) not in (self.low, "float64")]
        wide = [t for t in wide if self.old.tensors[t].storage in self.known]
        roles = {self.draft.storages[self.get(t, subs).storage].role for t in references(op.inputs)}
        if not wide or "parameter" not in roles:
            return group
        group = group or Group()
        for number, t in enumerate(dict.fromkeys(wide), 1):
            now, sequence = self.get(t, group.subs), self.number(op.sequence) - number
            group.casts.append(
                Cast(self.old.tensors[t], now.dtype, self.cast(op, now, self.low, (), sequence), sequence)
            )
            group.subs[t] = group.casts[-1].new
        self.join(run, group)
        return group

    def _target(self, op: Op) -> str:
        """The type that a cast of the forward pass is to: '' if autocast made it, and there is none any more."""
        around = op.within[: -len(CAST)]
        if MATH not in around and any(kind_of(name) for name in around):
            return ""
        return self.old.tensors[op.outputs[0]].dtype if op.outputs else ""

    def _uncast(self, i: int, subs: dict[int, Tensor], target: str) -> bool:
        """Whether a cast has nothing left to do; what was cast then stands for its result."""
        op = self.old.ops[i]
        if op.within[-2:] != CAST or op.name != "aten::copy_" or len(ids := list(references(op.inputs))) != 2:
            return False
        into, source = (self.old.tensors[t] for t in ids)
        if into.dtype == source.dtype or {into.dtype, source.dtype} - set(FLOATS):
            return False
        now = self.get(source.id, subs)
        if (target and target != now.dtype) or into.storage in self.known:
            return False
        if self.draft.ops and self.draft.ops[-1].name == "aten::empty_strided":
            self.draft.ops.pop()
        self.known.add(into.storage)
        self._stand_in(into, now)
        return True

    def _stand_in(self, old: Tensor, new: Tensor) -> None:
        self.place[old.storage] = Place(new.storage, new.dtype, old, new)
        if self.old.storages[old.storage].role == "gradient" and new.storage not in self.draft.heirs:
            self.draft.inherit(new.storage, old.storage)

    def dropped(self, i: int, subs: dict[int, Tensor]) -> bool:
        op = self.old.ops[i]
        if op.within[-2:] != CAST or not op.outputs:
            return False
        if "ToCopyBackward0" in op.within[0]:
            return self._uncast(i, subs, self._source_dtype(op.sequence))
        if len(op.within) > 1 and op.within[1] == CAST[0]:  # the engine's own
            taker = self.story.goal(self.old.tensors[op.outputs[0]].storage, i + 1)
            return self._uncast(i, subs, self._taken(taker))
        return False

    def _accumulate(self, i: int, group: Group | None, subs: dict[int, Tensor]) -> None:
        """Gradients that were added after a cast, in the cast's node, are added in the node before it."""
        op, last = self.old.ops[i], self.draft.ops[-1] if self.draft.ops else None
        if last is None or "ToCopyBackward0" not in op.within[-1] or last.thread != "autograd":
            super()._accumulate(i, group, subs)
            return
        within = last.within[: outside(last) + 1]
        self._add(i, subs, within=within, sequence=last.sequence, module=last.module, line=last.line)

    def _source_dtype(self, sequence: int) -> str:
        """The type of what the forward cast of this number is given now."""
        for t in self.story.outputs.get(sequence, ()):
            made = self.story.made.get(self.old.tensors[t].storage)
            op = self.old.ops[made] if made is not None else None
            if op is not None and op.name == "aten::copy_":
                return self.dtype(list(references(op.inputs))[1])
        return ""


def _once(within: tuple[str, ...], name: str = "") -> tuple[str, ...]:
    """The ops around an op without autocast's calls, which have the name of what they call."""
    inner = (*within[1:], "" if nests(name) else name)
    return tuple(n for n, next_in in zip(within, inner, strict=False) if not (n == next_in and kind_of(n)))


EDITS = (
    plain(
        "tf32",
        "Products and convolutions of float32 numbers use TF32 tensor cores (torch.backends.cuda.matmul.allow_tf32 and "
        "torch.backends.cudnn.allow_tf32): inputs are rounded to 10 bits of mantissa, all else stays float32.",
        tf32,
    ),
    plain(
        "bf16",
        "The whole model in bfloat16 (model.to(torch.bfloat16)): parameters, gradients, optimizer state, buffers and "
        "inputs; autocast and its casts go, those that the code itself asks for stay.",
        bf16,
    ),
)
