"""Fully sharded data parallelism (FSDP2, ZeRO-3): each rank keeps its part of every parameter, gradient and state.

What PyTorch's `fully_shard` does when every block is wrapped, and the whole model as the root:

    forward   before a block its parameters are gathered: parts are copied into one buffer, all-gathered, copied out;
              the next block's gather runs beside this one's work, as far as the host is ahead. Freed after the block
    backward  the block before (in order of the forward pass) is gathered beside this block's work; afterwards its
              gradients are copied into one buffer and reduce-scattered beside what follows
    update    on the rank's own parts

The root's parameters are gathered once and stay until its gradients are sent, at the end of the backward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from presage.graph.graph import DTYPE_BYTES, Graph, Op, Ref
from presage.parallel.draft import Draft, op, retarget
from presage.parallel.gradients import Gradient, backward_passes, earlier_gradients, gradients, whole_tensors
from presage.parallel.shards import shard_elements, shard_update
from presage.parallel.units import ROOT, Unit, units

__all__ = ["Fsdp", "fsdp"]

GROUP, COPY_IN = "dp", "copy-in"
ALL_GATHER, REDUCE_SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


@dataclass(frozen=True)
class Fsdp:
    """How `fully_shard` is set up; empty dtypes are the model's own."""

    reshard_after_forward: bool = True
    master_dtype: str = ""  # of the parts that are kept and updated
    reduce_dtype: str = ""  # gradients are sent in it


DEFAULT = Fsdp()


def fsdp(graph: Graph, ranks: int, options: Fsdp = DEFAULT, group: str = GROUP) -> Graph:
    """The step of one of `ranks` ranks."""
    return graph if ranks == 1 else _Sharding(graph, ranks, options, group).graph()


class _Sharding:
    """One rank's step while it is sharded."""

    def __init__(self, graph: Graph, ranks: int, options: Fsdp, group: str) -> None:
        self.draft = Draft(graph)
        self.source, self.ranks, self.options, self.group = graph, ranks, options, group
        self.tensors = whole_tensors(graph)
        self.units = units(graph)
        self.passes = backward_passes(graph)
        self.parts: dict[int, int] = {}  # the rank's part of each parameter and gradient, by the storage of the whole
        self.where: dict[tuple[str, int, int], int] = {}  # gathered: by phase, pass and the parameter's own storage
        self._send = self.draft.storage(0, "workspace", "reduce-scatter input")
        self._buffers: dict[str, int] = {}  # where each unit was gathered last
        self._kept: dict[str, int] = {}  # each unit's gradients
        self._alike: dict[tuple[int, int], int] = {}

    def graph(self) -> Graph:
        blocks = [u for u in self.units if u.name != ROOT]
        root = [u for u in self.units if u.name == ROOT]
        for u in self.units:
            self._keep_part(u)
        for k, backward in enumerate(self.passes):
            self._forward(k)
            if self.options.reshard_after_forward:
                self._backward([u for u in blocks if u.backward[k]], k)
            self._reduce([*blocks, *root], k, backward)
        self._move_uses()
        shard_update(self.draft, self.ranks, self.passes[-1][-1], self.parts, self.options.master_dtype)
        for s in earlier_gradients(self.source):
            self.draft.resize(s.id, s.nbytes // self.ranks)
        return self.draft.graph()

    def _keep_part(self, unit: Unit) -> None:
        """Of each parameter only the rank's part is there all the time."""
        for p in unit.parameters:
            t = self.tensors[p.id]
            dtype = self.options.master_dtype or t.dtype
            elements = shard_elements(t, self.ranks)
            self.draft.resize(p.id, elements * DTYPE_BYTES[dtype])
            self.parts[p.id] = self.draft.tensor(p.id, (elements,), dtype)

    def _forward(self, k: int) -> None:
        """Gathers before each unit; two buffers take turns, so that one can fill while the other is copied out."""
        buffers = [self.draft.storage(0, "workspace", "all-gather output") for _ in range(2)]
        begin = self.passes[k - 1][-1] + 1 if k else 0
        for n, u in enumerate(u for u in self.units if u.forward[k]):
            place = begin if u.name == ROOT else _first(u.forward[k])
            self.draft.before(place, *self._gather(u, buffers[n % 2], place), self._spread(u, "forward", k, place))

    def _backward(self, blocks: list[Unit], k: int) -> None:
        """Each block gathers the next before it begins; there is one buffer, free when it is copied out."""
        buffer = self.draft.storage(0, "workspace", "all-gather output")
        order = sorted(blocks, key=lambda u: _first(u.backward[k]))
        for n, u in enumerate(order):
            place = _first(u.backward[k])
            if n == 0:
                self.draft.before(place, *self._gather(u, buffer, place))
            self.draft.before(place, self._spread(u, "backward", k, place))
            if n + 1 < len(order):
                self.draft.before(place, *self._gather(order[n + 1], buffer, place))

    def _gather(self, unit: Unit, buffer: int, place: int) -> tuple[Op, Op]:
        """The rank's parts side by side, and all ranks' parts gathered in a buffer."""
        draft, like, dtype = self.draft, self.source.ops[place], self._dtype(unit)
        sizes = [shard_elements(self.tensors[p.id], self.ranks) for p in unit.parameters]
        total = sum(sizes) * self.ranks
        self._buffers[unit.name] = buffer
        draft.resize(buffer, max(draft.storages[buffer].nbytes, total * DTYPE_BYTES[dtype]))
        mine = draft.buffer(sum(sizes), dtype, "workspace", f"{unit.name} all-gather input")
        flat = draft.tensor(buffer, (total,), dtype)
        views = self._views(draft.tensors[mine].storage, [(n,) for n in sizes], sizes, dtype)
        copy = _copies(views, [self.parts[p.id] for p in unit.parameters], like, COPY_IN)
        args = [Ref(flat), Ref(mine)]
        return copy, op(ALL_GATHER, args, writes=(flat,), like=like, stream=self.group, group=self.group)

    def _spread(self, unit: Unit, phase: str, k: int, place: int) -> Op:
        """What was gathered, copied to where the parameters are used."""
        draft, like = self.draft, self.source.ops[place]
        whole = [self.tensors[p.id] for p in unit.parameters]
        sizes = [shard_elements(t, self.ranks) * self.ranks for t in whole]
        views = self._views(self._buffers[unit.name], [t.shape for t in whole], sizes, self._dtype(unit))
        out = []
        for p, t in zip(unit.parameters, whole, strict=True):
            storage = draft.storage(t.nbytes, "parameter", f"{p.name} (gathered)", p.module)
            self.where[phase, k, p.id] = storage
            out.append(draft.alike(t.id, storage))
        return _copies(out, views, like)

    def _reduce(self, order: list[Unit], k: int, backward: range) -> None:
        """After each unit its gradients are sent; each rank keeps the sum of its part."""
        found: dict[str, Gradient] = {g.parameter: g for g in gradients(self.source, backward)}
        for u in order:
            mine = [found[p.name] for p in u.parameters if p.name in found]
            if mine:
                span = u.backward[k]
                last = max(*(g.ready for g in mine), span[1] if span else 0)
                self._send_gradients(u, mine, backward[-1] if u.name == ROOT else last)

    def _send_gradients(self, unit: Unit, mine: list[Gradient], place: int) -> None:
        draft, like = self.draft, self.source.ops[place]
        dtype = self.options.reduce_dtype or mine[0].tensor.dtype
        sizes = [shard_elements(g.tensor, self.ranks) for g in mine]
        total = sum(sizes) * self.ranks
        draft.resize(self._send, max(draft.storages[self._send].nbytes, total * DTYPE_BYTES[dtype]))
        flat = draft.tensor(self._send, (total,), dtype)
        wholes = [n * self.ranks for n in sizes]
        views = self._views(self._send, [g.tensor.shape for g in mine], wholes, dtype)
        part = draft.buffer(sum(sizes), dtype, "gradient", f"{unit.name} gradients")
        ops = [
            _copies(views, [g.tensor.id for g in mine], like),
            op(REDUCE_SCATTER, [Ref(part), Ref(flat)], writes=(part,), like=like, stream=self.group, group=self.group),
        ]
        draft.life |= dict.fromkeys((g.storage for g in mine), "while used")
        draft.after(place, *ops, *self._keep_gradients(unit, mine, part, sizes, like))

    def _keep_gradients(self, unit: Unit, mine: list[Gradient], part: int, sizes: list[int], like: Op) -> list[Op]:
        """The first pass's sums are the gradients, in the dtype they are updated in; later ones are added."""
        draft, dtype = self.draft, self.options.master_dtype or mine[0].tensor.dtype
        ops: list[Op] = []
        if dtype != draft.tensors[part].dtype:
            cast = draft.buffer(sum(sizes), dtype, "gradient", f"{unit.name} gradients")
            ops.append(op("aten::copy_", [Ref(cast), Ref(part)], writes=(cast,), like=like, stream=self.group))
            part = cast
        kept = self._kept.setdefault(unit.name, part)
        if kept == part:
            draft.life[draft.tensors[part].storage] = "kept"
            views = self._views(draft.tensors[part].storage, [(n,) for n in sizes], sizes, dtype)
            self.parts |= {g.storage: view for g, view in zip(mine, views, strict=True)}
        else:
            ops.append(op("aten::add_", [Ref(kept), Ref(part)], writes=(kept,), like=like, stream=self.group))
        return ops

    def _move_uses(self) -> None:
        """Ops use gathered parameters; in the backward pass those gathered for it, where there are any."""
        ends = [backward[-1] for backward in self.passes]
        for i, one in enumerate(self.source.ops[: ends[-1] + 1]):
            k = bisect_left(ends, i)
            new = {}
            for t in (*self.source.inputs_of(one), *self.source.outputs_of(one)):
                places = [(phase, k, t.storage) for phase in (one.phase, "forward")]
                found = next((self.where[p] for p in places if p in self.where), None)
                if found is not None:
                    new[t.id] = self._moved(t.id, found)
            self.draft.ops[i] = retarget(self.draft.ops[i], new)

    def _moved(self, tensor: int, storage: int) -> int:
        """A tensor in other memory, the same for all ops that use it there."""
        key = tensor, storage
        if key not in self._alike:
            self._alike[key] = self.draft.alike(tensor, storage)
        return self._alike[key]

    def _views(self, storage: int, shapes: Sequence[Sequence[int]], sizes: Sequence[int], dtype: str) -> list[int]:
        """Tensors side by side in one memory; each takes up so many elements of it."""
        offsets = accumulate(sizes, initial=0)
        return [self.draft.tensor(storage, shape, dtype, at) for shape, at in zip(shapes, offsets, strict=False)]

    def _dtype(self, unit: Unit) -> str:
        return self.tensors[unit.parameters[0].id].dtype


def _copies(to: Sequence[int], source: Sequence[int], like: Op, stream: str = "") -> Op:
    return op("aten::_foreach_copy_", [[*map(Ref, to)], [*map(Ref, source)]], writes=to, like=like, stream=stream)


def _first(span: tuple[int, int] | None) -> int:
    assert span is not None
    return span[0]
