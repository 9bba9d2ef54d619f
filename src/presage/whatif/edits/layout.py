"""Channels-last: pictures and the weights of convolutions with their channels next to each other in memory."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Ref, Tensor
from presage.whatif.edits.edit import NotApplicable, plain
from presage.whatif.edits.memory_layout import channels_last as strides_last
from presage.whatif.edits.memory_layout import contiguous, is_channels_last
from presage.whatif.edits.rewriting import sdpa
from presage.whatif.edits.rewriting.fusing import Fusing
from presage.whatif.edits.rewriting.retype import Group, Place
from presage.whatif.edits.rewriting.runs import Run
from presage.whatif.edits.rewriting.types import FLOATS

__all__ = ["EDITS", "channels_last"]

FORWARD = ("aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::_conv_depthwise2d")
BACKWARD = "aten::convolution_backward"
DEPTHWISE = "aten::_conv_depthwise2d"
MODEL = ("parameter", "gradient", "optimizer", "buffer")
CLONE, INNER = ("aten::contiguous", "aten::clone"), "aten::empty_like>aten::empty"
CONVOLUTION = ("self", "weight", "padding", "stride", "dilation", "groups", "benchmark", "deterministic", "allow_tf32")


def channels_last(graph: Graph) -> Graph:
    """`model.to(memory_format=torch.channels_last)`, and the same for the pictures it is given."""
    weights = [graph.inputs_of(op)[1] for op in graph.ops if op.name in FORWARD and op.kernels]
    shown = _shapes(graph)
    weights = [w for w in weights if shown[w.storage] == {4}]
    if not weights:
        raise NotApplicable("no convolution over two dimensions")
    if all(is_channels_last(w) for w in weights):
        raise NotApplicable("all convolutions have channels-last weights already")
    return _ChannelsLast(graph).changed()


def _shapes(graph: Graph) -> dict[int, set[int]]:
    """How many dimensions the tensors have that show the whole of a storage, by storage."""
    out: dict[int, set[int]] = {}
    for t in graph.tensors:
        if t.nbytes == graph.storages[t.storage].nbytes or not out.get(t.storage):
            out.setdefault(t.storage, set()).add(len(t.shape))
    return out


def _listing(op: Op) -> tuple[int, str]:
    path = (*op.within, op.name)
    return (path.index(sdpa.AROUND), sdpa.AROUND) if sdpa.AROUND in path else (-1, "")


class _ChannelsLast(Fusing):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, _listing)
        self._dims = _shapes(graph)
        self._turned: set[int] = set()  # numbers of backward convolutions that are channels-last
        for t in graph.tensors:
            if t.storage not in self.place and self._turns_round(t):
                new = self.draft.tensor(t.storage, t.shape, strides_last(t.shape), t.dtype)
                self.place[t.storage] = Place(t.storage, t.dtype, t, new)

    def _turns_round(self, t: Tensor) -> bool:
        """Whether a tensor is of the model, or a picture for it."""
        s = self.old.storages[t.storage]
        whole = (
            self._dims[t.storage] == {4}
            and len(t.shape) == 4
            and t.is_contiguous
            and t.nbytes == s.nbytes
            and t.dtype in FLOATS
        )
        if not whole or t.storage not in self.known:
            return False
        return s.role in MODEL or (s.role == "input" and self._is_picture(t.storage))

    def _is_picture(self, storage: int) -> bool:
        """Not a target: the first thing done with it is no loss."""
        readers = (self.old.ops[i] for i in self.story.readers.get(storage, ()))
        first = next((op for op in readers if op.kernels), None)
        return first is not None and family(first.name) != "softmax and loss"

    def changed(self) -> Graph:
        for run in self.runs:
            if run.kind in ("backward", "gradient"):
                self.backward(run)
            elif run.listed == sdpa.AROUND:
                self._attention(run)
            else:
                self._each(run)
        return self.draft.done()

    def _each(self, run: Run) -> None:
        start = len(self.draft.ops)
        for i in run.ops:
            self.draft.begin(i)
            if not self.ahead(i):
                self.translate(i, {})
        self.draft.nodes.append((start, len(self.draft.ops)))

    # ---- attention

    def _attention(self, run: Run) -> None:
        around = self.old.ops[run.first].within[: run.depth + 1]
        if self.attends(run):
            self.attend(run, None, around * 2 if self._is_cast(run) else around)
            return
        m = self.unfused(run)
        if m is not None and self.fits(m):
            self.plan(m)
        self._each(run)

    # ---- ops

    def translate(self, i: int, subs: dict[int, Tensor] | None = None, **changes: object) -> Op:
        op, subs = self.old.ops[i], {} if subs is None else subs
        if op.name in FORWARD and len(self.old.tensors[op.outputs[0]].shape) == 4:
            return self._convolve(i, op, subs)
        if op.name == "aten::native_group_norm":
            self._straighten(op, 0, subs, saved=True)
        elif op.name == "aten::native_group_norm_backward":
            self._straighten(op, 0, subs)
        elif self._undone(op, subs):
            return op
        new = super().translate(i, subs, **changes)
        if op.name == BACKWARD:
            self._convolved_back(op, new)
        return new

    def _copy(self, op: Op, t: Tensor, strides: Sequence[int], within: tuple[str, ...], maker: str) -> Tensor:
        """A tensor written out in another layout; `maker` is the op that takes the memory."""
        new = self.draft.new(t.shape, t.dtype, strides, op.module)
        pen = sdpa.Pen(self.draft, replace(op, sequence=self.number(op.sequence)), within)
        *around, name = maker.split(">")
        pen.op(name, [Ref(t.id)] if name == "aten::empty_like" else (), (), *around, kernels=False)
        pen.op("aten::copy_", [Ref(new.id), Ref(t.id), False], [new], writes=[new])
        return new

    def _wants(self, x: Tensor, w: Tensor) -> tuple[int, ...]:
        """What cuDNN wants: channels-last if the picture or the weight is."""
        return strides_last(x.shape) if is_channels_last(x) or is_channels_last(w) else contiguous(x.shape)

    def _convolve(self, i: int, op: Op, subs: dict[int, Tensor]) -> Op:
        x, w = (self.get(t, subs) for t in list(references(op.inputs))[:2])
        wants = self._wants(x, w)
        if not _lies(x, wants):
            x = self._copy(op, x, wants, (*op.within, *CLONE), INNER)
        subs = {**subs, next(references(op.inputs)): x}
        if op.name != DEPTHWISE or wants == contiguous(x.shape):
            return super().translate(i, subs)
        return self._depthwise(i, op, subs)

    def _depthwise(self, i: int, op: Op, subs: dict[int, Tensor]) -> Op:
        """One filter a channel: cuDNN's kernels in this layout, PyTorch's own in the other."""
        x, w, _, bias, stride, padding, dilation = op.inputs[:7]
        at = replace(op, within=(*op.within,))
        made = super().translate(i, subs)
        groups = self.old.tensors[x.id].shape[1] if isinstance(x, Ref) else 1
        inputs = (made.inputs[0], made.inputs[1], padding, stride, dilation, groups, False, False, True)
        self.draft.ops[-1] = replace(made, name="aten::cudnn_convolution", inputs=inputs, names=CONVOLUTION)
        if isinstance(bias, Ref) and isinstance(w, Ref):
            out, row = self.draft.tensors[made.outputs[0]], self.get(bias.id, subs)
            shown = self.draft.tensor(
                row.storage, (1, row.shape[0], 1, 1), contiguous((1, row.shape[0], 1, 1)), row.dtype
            )
            pen = sdpa.Pen(self.draft, replace(at, sequence=made.sequence), op.within)
            pen.op("aten::view", [Ref(row.id)], (), "aten::reshape", kernels=False)
            pen.op("aten::add_", [Ref(out.id), Ref(shown.id), 1], [out], overload="Tensor", writes=[out])
        return self.draft.ops[-1]

    def _convolved_back(self, op: Op, new: Op) -> None:
        """Copies that the backward convolution makes of what lies otherwise than it wants."""
        grad, x, w = (self.draft.tensors[t] for t in list(references(new.inputs))[:3])
        wanted = op.inputs[10] if len(op.inputs) > 10 else None
        wants = self._wants(x, w)
        if len(x.shape) != 4 or wants == contiguous(x.shape):
            return
        self._turned.add(op.sequence)
        inside = (*op.within, BACKWARD)
        if isinstance(wanted, list) and wanted[1] and not _lies(x, wants):
            self._copy(op, x, wants, (*inside, *CLONE), INNER)
        if not _lies(grad, strides_last(grad.shape)):
            self._copy(op, grad, strides_last(grad.shape), (*inside, "aten::to", "aten::_to_copy"), "aten::empty")

    def _straighten(self, op: Op, place: int, subs: dict[int, Tensor], saved: bool = False) -> None:
        """An op that reads rows: what does not lie so is written out first, and kept if the backward pass reads it."""
        ref = op.inputs[place]
        if not isinstance(ref, Ref) or (t := self.get(ref.id, subs)).is_contiguous:
            return
        subs[ref.id] = self._copy(op, t, contiguous(t.shape), (*op.within, *CLONE), "aten::empty_like")
        if saved and op.sequence >= 0:
            self.groups.setdefault(op.sequence, Group()).subs[ref.id] = subs[ref.id]

    def _undone(self, op: Op, subs: dict[int, Tensor]) -> bool:
        """Whether an op is part of a copy that a backward convolution made for the other layout."""
        if op.sequence not in self._turned or BACKWARD not in op.within or "aten::clone" not in op.within:
            return False
        if op.outputs:
            into, source = references(op.inputs)
            subs[into] = self.get(source, subs)
            self.known.add(self.old.tensors[into].storage)
        return True


def _lies(t: Tensor, strides: Sequence[int]) -> bool:
    return all(n <= 1 or s == w for n, s, w in zip(t.shape, t.strides, strides, strict=True))


EDITS = (
    plain(
        "channels_last",
        "The model and the pictures it is given in torch.channels_last: convolutions run without turning their inputs "
        "round; what keeps the other layout (group norm) is copied there and back, as PyTorch does.",
        channels_last,
    ),
)
