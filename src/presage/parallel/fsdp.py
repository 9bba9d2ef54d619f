"""Fully sharded data parallelism (FSDP2, ZeRO-3): each rank keeps its part of every parameter, gradient and state.

What PyTorch's `fully_shard` does when every block is wrapped, and the whole model as the root:

    forward   before a block its parameters are gathered: parts are copied into one buffer, all-gathered, copied out;
              the next block's gather runs beside this one's work, as far as the host is ahead. Freed after the block
    backward  the block before (in order of the forward pass) is gathered beside this block's work; afterwards its
              gradients are copied into one buffer and reduce-scattered beside what follows
    update    on the rank's own parts

The root's parameters are gathered once and stay until its gradients are sent, at the end of the backward pass, unless
it is asked to free them too.

A gather waits until what an earlier one brought is copied out, a copy of gradients until the block before has sent its
own: `turn`s, memory of no size that both write, keep that order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from presage.graph.builder import GraphBuilder, host_op, new_op, retarget
from presage.graph.graph import DTYPE_BYTES, Graph, Op, Ref, references
from presage.parallel.gradients import (
    ROOT,
    FsdpUnit,
    Gradient,
    backward_passes,
    earlier_gradients,
    fresh_gradients,
    fsdp_units,
    gradients,
    shard_elements,
    shard_update,
    whole_tensors,
)

GROUP, COPY_IN = "dp", "copy-in"
ALL_GATHER, REDUCE_SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


@dataclass(frozen=True)
class Fsdp:
    """How `fully_shard` is set up; empty dtypes are the model's own."""

    reshard_after_forward: bool = True  # blocks are gathered anew for the backward pass
    reshard_root: bool = False  # and so is the root
    master_dtype: str = ""  # of the parts that are kept and updated
    reduce_dtype: str = ""  # gradients are sent in it


DEFAULT = Fsdp()


def fsdp(graph: Graph, ranks: int, options: Fsdp = DEFAULT, group: str = GROUP) -> Graph:
    """The step of one of `ranks` ranks."""
    return graph if ranks == 1 else _Sharding(fresh_gradients(graph), ranks, options, group).graph()


class _Sharding:
    """One rank's step while it is sharded."""

    def __init__(self, graph: Graph, ranks: int, options: Fsdp, group: str) -> None:
        self.builder = GraphBuilder(graph)
        self.source, self.ranks, self.options, self.group = graph, ranks, options, group
        self.tensors = whole_tensors(graph)
        self.units = fsdp_units(graph)
        self.passes = backward_passes(graph)
        self.parts: dict[int, int] = {}  # the rank's part of each parameter and gradient, by the storage of the whole
        self.wholes: dict[tuple[str, int, int], int] = {}  # gathered, by phase, pass and the parameter's own storage
        self._gathered: dict[str, tuple[int, int]] = {}  # of each unit the last gather's output, and its turn
        self._kept: dict[str, int] = {}  # each unit's gradients
        self._alike: dict[tuple[int, int], int] = {}

    def graph(self) -> Graph:
        blocks = [u for u in self.units if u.name != ROOT]
        root = [u for u in self.units if u.name == ROOT]
        for u in self.units:
            self._keep_part(u)
        for k in range(len(self.passes)):
            self._forward(k)
            self._backward(k)
            self._reduce([*blocks, *root], k)
        self._move_uses()
        end = self.passes[-1][-1]
        shard_update(self.builder, self.ranks, end, self.parts, self.options.master_dtype)
        for i in range(end + 1, len(self.source.ops)):
            one = self.builder.ops[i]
            if one.kernels:
                self.builder.before(i, host_op("FSDP::update", references(one.inputs), one))
        for s in earlier_gradients(self.source):
            self.builder.resize(s.id, s.nbytes // self.ranks)
        return self.builder.build()

    def _keep_part(self, unit: FsdpUnit) -> None:
        """Keep only the rank's part of each parameter all the time."""
        for p in unit.parameters:
            t = self.tensors[p.id]
            dtype = self.options.master_dtype or t.dtype
            elements = shard_elements(t, self.ranks)
            self.builder.resize(p.id, elements * DTYPE_BYTES[dtype])
            self.parts[p.id] = self.builder.add_tensor(p.id, (elements,), dtype)

    def _forward(self, k: int) -> None:
        """Gathers before each unit; one may run while what the one before brought is copied out."""
        turns = [self._turn(), self._turn()]
        begin = self.passes[k - 1][-1] + 1 if k else 0
        for n, u in enumerate(u for u in self.units if u.forward[k]):
            place, last = u.forward[k] or (0, 0)
            place = begin if u.name == ROOT else place
            self.builder.before(place, *self._gather(u, turns[n % 2], place), *self._spread(u, "forward", k, place))
            if self._again(u):
                self._reshard(u, "forward", k, self.passes[k].start - 1 if u.name == ROOT else last)

    def _backward(self, k: int) -> None:
        """Each unit gathers the next before it begins, when what it gathered itself is copied out."""
        turn = self._turn()
        begins = {u: self._begin(u, k) for u in self.units if u.backward[k] and self._again(u)}
        order = sorted(begins, key=lambda u: (begins[u], u.name != ROOT))
        for n, u in enumerate(order):
            place = begins[u]
            if n == 0:
                self.builder.before(place, *self._gather(u, turn, place))
            self.builder.before(place, *self._spread(u, "backward", k, place))
            if n + 1 < len(order):
                self.builder.before(place, *self._gather(order[n + 1], turn, place))

    def _again(self, unit: FsdpUnit) -> bool:
        """Whether a unit is freed after the forward pass and gathered for the backward pass."""
        return self.options.reshard_root if unit.name == ROOT else self.options.reshard_after_forward

    def _begin(self, unit: FsdpUnit, k: int) -> int:
        """Where a unit's backward pass begins; the root's, with the first op that is not the loss's."""
        if unit.name == ROOT:
            return min(span[0] for u in self.units if (span := u.backward[k]))
        return (unit.backward[k] or (0, 0))[0]

    def _turn(self) -> int:
        return self.builder.add_buffer(0, "uint8", "workspace", "turn", lifetime="always")

    def _reshard(self, unit: FsdpUnit, phase: str, k: int, place: int) -> None:
        """A unit's parameters stay up to here, all of them."""
        gathered = [self.wholes[phase, k, p.id] for p in unit.parameters]
        self.builder.after(place, host_op("FSDP::reshard", gathered, self.source.ops[place]))

    def _gather(self, unit: FsdpUnit, turn: int, place: int) -> tuple[Op, ...]:
        """The rank's parts side by side, and all ranks' parts gathered."""
        builder, like, dtype = self.builder, self.source.ops[place], self._dtype(unit)
        sizes = [shard_elements(self.tensors[p.id], self.ranks) for p in unit.parameters]
        own = builder.add_buffer(sum(sizes), dtype, "workspace", f"{unit.name} all-gather input")
        flat = builder.add_buffer(sum(sizes) * self.ranks, dtype, "workspace", f"{unit.name} all-gather output")
        self._gathered[unit.name] = flat, turn
        views = self._views(builder.tensors[own].storage, [(n,) for n in sizes], sizes, dtype)
        parts = [self.parts[p.id] for p in unit.parameters]
        both = [Ref(flat), Ref(own), Ref(turn)]
        gather = new_op(ALL_GATHER, both, writes=(flat, turn), like=like, stream=self.group, group=self.group)
        hooks = [host_op("FSDP::all_gather", parts, like), *self._cast(dtype, like)]
        return *hooks, _copies(views, parts, like, COPY_IN), gather

    def _cast(self, dtype: str, like: Op) -> list[Op]:
        """What it costs the host to have parts in another dtype."""
        return [host_op("FSDP::cast", (), like)] if self.options.master_dtype not in ("", dtype) else []

    def _spread(self, unit: FsdpUnit, phase: str, k: int, place: int) -> tuple[Op, Op]:
        """What was gathered, copied to where the parameters are used."""
        builder, like, (flat, turn) = self.builder, self.source.ops[place], self._gathered[unit.name]
        whole = [self.tensors[p.id] for p in unit.parameters]
        sizes = [shard_elements(t, self.ranks) * self.ranks for t in whole]
        views = self._views(builder.tensors[flat].storage, [t.shape for t in whole], sizes, self._dtype(unit))
        out = []
        for p, t in zip(unit.parameters, whole, strict=True):
            storage = builder.add_storage(t.nbytes, "parameter", f"{p.name} (gathered)", p.module)
            out.append(builder.copy_tensor(t.id, storage))
            self.wholes[phase, k, p.id] = out[-1]
        return host_op("FSDP::all_gather_copy_out", out, like), _copies(out, views, like, turn=turn)

    def _reduce(self, order: list[FsdpUnit], k: int) -> None:
        """After each unit its gradients are sent; each rank keeps the sum of its part."""
        backward, turn = self.passes[k], self._turn()
        found: dict[str, Gradient] = {g.parameter: g for g in gradients(self.source, backward)}
        for u in order:
            own = [found[p.name] for p in u.parameters if p.name in found]
            if own:
                last = max(*(g.ready for g in own), (u.backward[k] or (0, 0))[1])
                place = backward[-1] if u.name == ROOT else last
                self._reshard(u, "backward" if self._again(u) else "forward", k, place)
                self._send(u, own, place, turn)

    def _send(self, unit: FsdpUnit, mine: list[Gradient], place: int, turn: int) -> None:
        builder, like = self.builder, self.source.ops[place]
        dtype = self.options.reduce_dtype or mine[0].tensor.dtype
        sizes = [shard_elements(g.tensor, self.ranks) for g in mine]
        flat = builder.add_buffer(sum(sizes) * self.ranks, dtype, "workspace", "reduce-scatter input")
        wholes = [n * self.ranks for n in sizes]
        views = self._views(builder.tensors[flat].storage, [g.tensor.shape for g in mine], wholes, dtype)
        part = builder.add_buffer(sum(sizes), dtype, "gradient", f"{unit.name} gradients")
        both = [Ref(part), Ref(flat), Ref(turn)]
        ops = [
            host_op("FSDP::post_backward_reduce", views, like),
            *self._cast(mine[0].tensor.dtype, like),
            _copies(views, [g.tensor.id for g in mine], like, turn=turn),
            new_op(REDUCE_SCATTER, both, writes=(part, turn), like=like, stream=self.group, group=self.group),
        ]
        builder.lifetimes |= dict.fromkeys((g.storage for g in mine), "while used")
        builder.after(place, *ops, *self._keep_gradients(unit, mine, part, sizes, like))

    def _keep_gradients(self, unit: FsdpUnit, mine: list[Gradient], part: int, sizes: list[int], like: Op) -> list[Op]:
        """The first pass's sums are the gradients, in the dtype they are updated in; later ones are added."""
        builder, dtype = self.builder, self.options.master_dtype or mine[0].tensor.dtype
        ops: list[Op] = []
        if dtype != builder.tensors[part].dtype:
            cast = builder.add_buffer(sum(sizes), dtype, "gradient", f"{unit.name} gradients")
            ops.append(new_op("aten::copy_", [Ref(cast), Ref(part)], writes=(cast,), like=like, stream=self.group))
            part = cast
        kept = self._kept.setdefault(unit.name, part)
        if kept == part:
            builder.lifetimes[builder.tensors[part].storage] = "kept"
            views = self._views(builder.tensors[part].storage, [(n,) for n in sizes], sizes, dtype)
            self.parts |= {g.storage: view for g, view in zip(mine, views, strict=True)}
        else:
            ops.append(new_op("aten::add_", [Ref(kept), Ref(part)], writes=(kept,), like=like, stream=self.group))
        return ops

    def _move_uses(self) -> None:
        """Ops use gathered parameters; in the backward pass those gathered for it, where there are any."""
        ends = [backward[-1] for backward in self.passes]
        for i, one in enumerate(self.source.ops[: ends[-1] + 1]):
            k = bisect_left(ends, i)
            new = {}
            for t in (*self.source.inputs_of(one), *self.source.outputs_of(one)):
                places = [(phase, k, t.storage) for phase in (one.phase, "forward")]
                found = next((self.wholes[p] for p in places if p in self.wholes), None)
                if found is not None:
                    new[t.id] = self._moved(t.id, self.builder.tensors[found].storage)
            self.builder.ops[i] = retarget(self.builder.ops[i], new)

    def _moved(self, tensor: int, storage: int) -> int:
        """A tensor in other memory, the same for all ops that use it there."""
        key = tensor, storage
        if key not in self._alike:
            self._alike[key] = self.builder.copy_tensor(tensor, storage)
        return self._alike[key]

    def _views(self, storage: int, shapes: Sequence[Sequence[int]], sizes: Sequence[int], dtype: str) -> list[int]:
        """Tensors side by side in one memory; each takes up so many elements of it."""
        offsets = accumulate(sizes, initial=0)
        return [self.builder.add_tensor(storage, shape, dtype, at) for shape, at in zip(shapes, offsets, strict=False)]

    def _dtype(self, unit: FsdpUnit) -> str:
        return self.tensors[unit.parameters[0].id].dtype


def _copies(to: Sequence[int], source: Sequence[int], like: Op, stream: str = "", turn: int | None = None) -> Op:
    lists = [[*map(Ref, to)], [*map(Ref, source)]]
    extra = [] if turn is None else [turn]
    inputs = [*lists, *map(Ref, extra)]
    return new_op("aten::_foreach_copy_", inputs, writes=[*to, *extra], like=like, stream=stream)
