"""From recorded calls to the ops a CUDA run shows: each becomes those that CUDA's code for it runs, nested in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace
from torch.utils.flop_counter import flop_registry

from presage.capture.calls import RecordedCall
from presage.errors import PresageError
from presage.graph import work
from presage.graph.builder import GraphBuilder
from presage.graph.graph import DTYPE_BYTES, Arg, Event, Graph, Op, Ref, Storage, Tensor

Rule: TypeAlias = Callable[["CallLowering", RecordedCall], None]


class CallLowering(GraphBuilder):
    """A graph builder that writes the ops of one recorded call at a time (`begin`, the call's rule, `end`)."""

    def __init__(
        self,
        tensors: list[Tensor],
        storages: list[Storage],
        sparse: dict[int, tuple[int, ...]],
        facts: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.tensors, self.storages = tensors, storages
        self.facts = facts or {}  # how often the values of index tensors repeat
        self.sparse = sparse  # shapes of the values of sparse tensors
        self.call: RecordedCall | None = None
        self.within: tuple[str, ...] = ()
        self.hanging: dict[int, tuple[int, ...]] = {}  # assumptions that calls hang on
        self.merged: dict[int, int] = {}  # storages that on CUDA are another one, changed in place
        self._temporaries: list[int] = []
        self._spare: list[int] = []  # storages whose allocation is due in this call

    def begin(self, call: RecordedCall, within: tuple[str, ...], allocated: list[int]) -> None:
        self.call, self.within, self._spare = call, within, allocated
        for storage in allocated:
            self.events.append(Event(len(self.ops), storage, True))

    def end(self) -> None:
        for storage in reversed(self._temporaries):
            self.events.append(Event(len(self.ops), storage, False))
        self._temporaries, self.call = [], None

    def merge(self, storage: int, into: int) -> None:
        """The first storage never was: the second lives on in its place."""
        self.merged[storage] = self.merged.get(into, into)

    @contextmanager
    def inside(self, *names: str) -> Iterator[None]:
        before = self.within
        self.within = (*before, *names)
        try:
            yield
        finally:
            self.within = before

    def get(self, ref: Arg | int) -> Tensor:
        if isinstance(ref, Ref):
            return self.tensors[ref.id]
        assert isinstance(ref, int)
        return self.tensors[ref]

    def new(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> Ref:
        """A temporary tensor, given back at the end of the call."""
        shape = tuple(shape)
        storage = self.workspace(prod(shape) * DTYPE_BYTES[dtype])
        return self.view(storage, shape, dtype, strides)

    def workspace(self, nbytes: int) -> int:
        """Memory that is given back at the end of the call."""
        assert self.call is not None
        number = len(self.storages)
        self.storages.append(Storage(number, nbytes, "workspace", "", self.call.module))
        self.events.append(Event(len(self.ops), number, True))
        self._temporaries.append(number)
        return number

    def view(
        self, storage: int, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, offset: int = 0
    ) -> Ref:
        return Ref(self.add_tensor(storage, shape, dtype, offset, strides))

    def reshaped(self, ref: Arg | int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Ref:
        """A view of another shape over the same memory."""
        t = self.get(ref)
        return self.alike(self.view(t.storage, shape, t.dtype, strides, t.offset), t.id)

    def alike(self, new: Ref, old: Arg | int) -> Ref:
        """The new tensor, which holds the values of the old one."""
        self.copy_facts(self.get(old).id, new.id)
        return new

    def op(
        self,
        name: str,
        inputs: Sequence[Arg] = (),
        outputs: Sequence[Ref | int] = (),
        *,
        writes: Sequence[Ref | int] = (),
        kernels: bool = True,
        overload: str = "",
        sync: bool = False,
    ) -> None:
        c = self.call
        assert c is not None
        results = [o.id if isinstance(o, Ref) else o for o in outputs]
        if results and not any(self.tensors[i].elements for i in results) and not self._searches(name, inputs):
            kernels = sync = False  # nothing to compute or to wait for
        self.append(
            Op(
                name=name,
                overload=overload,
                inputs=tuple(inputs),
                outputs=tuple(results),
                phase=c.phase,
                thread=c.thread,
                module=c.module,
                within=self.within,
                names=names_of(name, overload, len(inputs)),
                writes=tuple(w.id if isinstance(w, Ref) else w for w in writes),
                kernels=kernels,
                sync=sync,
                opaque=c.opaque,
                sequence=c.sequence,
                line=c.line,
                compiled=c.compiled,
                stream=c.stream,
                group=c.group,
                issued=c.issued if kernels else None,
                cost=c.cost,
                speed=c.speed,
                replayed=c.replayed,
                assumed=self.hanging.get(c.index, ()),
            )
        )

    def _searches(self, name: str, inputs: Sequence[Arg]) -> bool:
        """Whether the op looks through its input, also where it finds nothing."""
        return name == "aten::nonzero" and self.get(inputs[0]).elements > 0

    def same(self, *, kernels: bool | None = None) -> None:
        """The call as it is."""
        c = self.call
        assert c is not None
        launches = not c.view if kernels is None else kernels
        # an in-place op without kernels (squeeze_) gives its tensor another shape and leaves the data alone
        writes = c.writes if launches or c.host else ()
        self.op(c.name, c.inputs, c.outputs, writes=writes, kernels=launches, overload=c.overload, sync=c.sync)

    def drop(self, ref: Arg | int) -> None:
        """Give a temporary back before its call ends."""
        storage = self.get(ref).storage
        self._temporaries.remove(storage)
        self.events.append(Event(len(self.ops), storage, False))

    def host(self, name: str, *inputs: Arg, outputs: Sequence[Ref | int] = ()) -> None:
        """An op that launches nothing."""
        self.op(name, inputs, outputs, kernels=False)

    def empty(self, shape: Sequence[int], dtype: str, name: str = "aten::empty") -> Ref:
        """A temporary, with the op that makes it."""
        out = self.new(shape, dtype)
        self.op(name, [list(shape)], [out], kernels=False)
        return out

    def out(self, place: int = 0) -> Ref:
        """An output of the call."""
        assert self.call is not None
        return Ref(self.call.outputs[place])

    def finish(self, frees: list[Event], **fields: Any) -> Graph:
        """The graph; `frees` are those of memory that the recorded program held."""
        self.events = frees + self.events
        self._apply_merges()
        return self.build(frees_first=True, **fields)

    def _apply_merges(self) -> None:
        """Where one storage took another's place: the place is kept until its last holder lets go."""
        into = self.merged
        if not into:
            return
        self.tensors = [t if t.storage not in into else replace(t, storage=into[t.storage]) for t in self.tensors]
        last = {e.storage: e for e in self.events if not e.allocates and e.storage in into}
        kept = {into[s]: max(e.op for k, e in last.items() if into[k] == into[s]) for s in last}
        lasting = set(into.values())
        rest = [e for e in self.events if e.storage not in into and (e.allocates or e.storage not in lasting)]
        self.events = rest + [Event(op, storage, False) for storage, op in kept.items()]
        for storage in into:  # without events of its own it must not count as there from before
            self.resize(storage, 0)


_names: dict[tuple[str, str, int], tuple[str, ...]] = {}


def names_of(name: str, overload: str, count: int) -> tuple[str, ...]:
    """Names of an op's inputs, where its schema has as many."""
    key = (name, overload, count)
    if key not in _names:
        space, _, short = name.partition("::")
        packet = getattr(getattr(torch.ops, space), short, None) if short.isidentifier() else None
        op = getattr(packet, overload or "default", None) if packet is not None else None
        found = tuple(a.name for a in op._schema.arguments) if op is not None else ()
        _names[key] = found if len(found) == count else ()
    return _names[key]


# ---- nothing is lost on the way from the calls to the graph

HOST = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::resize_", "aten::set_", "aten::as_strided", "aten::lift_fresh", "aten::detach_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::t_", "aten::transpose_", "aten::as_strided_", "aten::_unsafe_view",
    "aten::_reshape_alias", "aten::alias", "aten::_coalesced_", "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::is_coalesced", "aten::sparse_dim", "aten::dense_dim", "aten::_nnz", "aten::record_stream",
}  # fmt: skip
_KINDS = {
    "matrix products and convolutions": re.compile(r"^aten::((b|add|baddb|_scaled_)?mm|.*conv.*)$"),
    "attention": re.compile(r"^aten::.*attention.*"),
}  # families of ops whose FLOPs PyTorch counts too
_COUNTED = re.compile(
    r"^aten::((b|add|baddb|_scaled_)?mm|convolution(_backward)?|_scaled_dot_product_\w+_attention(_backward)?)$"
)


def check_complete(graph: Graph, calls: list[RecordedCall], profiled_calls: set[int]) -> None:
    """Raise an error where ops that ran, or FLOPs of theirs by PyTorch's own formulas, are not in the graph."""
    ran = [c for i, c in enumerate(calls) if not c.host and i not in profiled_calls]
    lost = [c.name for c in ran if not (c.view or c.replayed or c.name in HOST)]
    if lost:
        raise PresageError(
            f"{len(lost)} of the step's {len(calls)} ops ({lost[0]}) are lost between run and graph: a fault of "
            "presage's own, please report it"
        )
    for kind, names in _KINDS.items():
        wanted = sum(_flops_by_torch(graph, c) for c in calls if not c.host and names.match(c.name))
        have = sum(work.flops(graph, op) for op in graph.ops if op.inputs and names.match(op.name))
        if have < wanted:
            raise PresageError(
                f"the step's {kind} have {wanted:,} FLOPs and the graph's {have:,}: a fault of presage's own, please "
                "report it"
            )


def _flops_by_torch(graph: Graph, call: RecordedCall) -> int:
    """By the formula of torch's FlopCounterMode, where it is right: not of gradients of grouped convolutions."""
    formula = flop_registry.get(getattr(torch.ops.aten, call.name.removeprefix("aten::"), None))
    grouped = call.name == "aten::convolution_backward" and call.inputs[9] != 1
    if formula is None or not _COUNTED.match(call.name) or call.host or not call.inputs or grouped:
        return 0
    taken = 3 if call.name.endswith(("::addmm", "::baddbmm")) else 2 if call.name.endswith("mm") else None
    shapes = [graph.tensors[x.id].shape if isinstance(x, Ref) else x for x in call.inputs[:taken]]
    made = iter([graph.tensors[i].shape for i in call.outputs])
    wanted: Any = call.inputs[10] if call.name == "aten::convolution_backward" else None
    out: Any = next(made, ()) if wanted is None else [next(made) if want else None for want in wanted]
    try:
        return int(formula(*shapes, out_val=out))
    except (TypeError, ValueError, IndexError, AssertionError):  # shapes that the formula is not for
        return 0
