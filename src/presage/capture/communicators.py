"""Records collectives and point-to-point messages of torch.distributed, and what their tensors hold after them.

Other ranks are taken to hold what this one holds: a sum over n ranks is n times its own numbers, gathered parts are
copies of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture.backend import CUDA
from presage.capture.contents import SMALL, leaves
from presage.capture.op_schema import on_gpu
from presage.graph.work import WAIT

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp")
aten = torch.ops.aten

# The op that PyTorch's profiler shows, by the kind of collective; others are named like them.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "c10d::allreduce_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
ALL_TO_ALL, BROADCAST, SEND, RECEIVE = "c10d::alltoall_base_", "c10d::broadcast_", "c10d::send", "c10d::recv_"
# kind, arguments that are sent, arguments that are received into; by name without namespace
_C10D: dict[str, tuple[str, str, str]] = {
    "allreduce_": (ALL_REDUCE, "tensors", "tensors"),
    "allreduce_coalesced_": (ALL_REDUCE, "tensors", "tensors"),
    "reduce_": (BROADCAST, "tensors", "tensors"),
    "broadcast_": (BROADCAST, "tensors", "tensors"),
    "allgather_": (ALL_GATHER, "input_tensors", "output_tensors"),
    "_allgather_base_": (ALL_GATHER, "input_tensor", "output_tensor"),
    "allgather_coalesced_": (ALL_GATHER, "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": (ALL_GATHER, "inputs", "outputs"),
    "reduce_scatter_": (REDUCE_SCATTER, "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": (REDUCE_SCATTER, "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": (REDUCE_SCATTER, "inputs", "outputs"),
    "alltoall_base_": (ALL_TO_ALL, "input", "output"),
    "alltoall_": (ALL_TO_ALL, "input_tensors", "output_tensors"),
    "gather_": (ALL_GATHER, "input_tensors", "output_tensors"),
    "scatter_": (BROADCAST, "input_tensors", "output_tensors"),
    "send": (SEND, "tensors", ""),
    "recv_": (RECEIVE, "", "tensors"),
    "barrier": (ALL_REDUCE, "tensor", "tensor"),
}


class Communicators:
    """The collectives of a capture: records them, and keeps the groups that took part."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.groups: dict[str, tuple[int, ...]] = {}  # of the recorded step, by their names in it
        self.messages: set[str] = set()  # groups in which ranks send to one another
        self._pending: dict[int, str] = {}  # storages of collectives that nobody has waited for: in which group

    def restart(self) -> None:
        """A step is recorded."""
        self.groups, self.messages, self._pending = {}, set(), {}

    def used(self) -> dict[str, tuple[int, ...]]:
        """The groups of the recorded step; all ranks, where these are several and do not communicate in it."""
        groups = self.recorder.groups
        return self.groups or ({"world": tuple(range(groups.ranks))} if groups.made and groups.ranks > 1 else {})

    def alike(self) -> tuple[int, ...]:
        """The ranks that run what was recorded; none where no ranks communicate."""
        return self.recorder.groups.alike(self.messages) if self.used() else ()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.partition("::")[2]
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if func.namespace == "c10d":
            if name not in _C10D:
                remedy = ": give recv its source (src=)" if name == "recv_any_source_" else ""
                raise NotImplementedError(f"{func._schema.name} is not captured{remedy}")
            return self._c10d(func, name, given)
        functional: Callable[[dict[str, Any]], Any] | None = getattr(self, f"_{name.strip('_')}", None)
        if functional is None:
            raise NotImplementedError(f"{func._schema.name} is not captured")
        return functional(given)

    def _c10d(self, func: Any, name: str, given: dict[str, Any]) -> Any:
        kind, sent, received = _C10D[name]
        group = torch.distributed.ProcessGroup.unbox(given["process_group"])
        inputs, outputs = (leaves(given.get(a)) if a else [] for a in (sent, received))
        peer, n = given.get("dst", given.get("src")), int(group.size())
        if name == "barrier":
            on_host = group.group_name in self.recorder.groups.on_host
            given["tensor"] = inputs = outputs = [] if on_host else [self._zero()]  # NCCL's barrier reduces a number
        shown = inputs * n if name == "gather_" and not outputs else inputs  # as large as where all of it is
        into = outputs * n if name == "scatter_" and not inputs else outputs
        self._record(kind, group.group_name, shown, into, peer=peer, sync=name == "barrier")
        self._hold(kind, group, inputs, outputs, given)
        result: list[Any] = []
        for returned in func._schema.returns:
            is_work = "Work" in str(returned.type)
            result.append(_done(outputs or inputs) if is_work else given[received])
        return result[0] if len(result) == 1 else tuple(result)

    # ---- functional collectives: what their code for CUDA does

    def _all_reduce(self, given: dict[str, Any]) -> Any:
        out = self._clone(given["input"])
        return self._functional(ALL_REDUCE, given, [out], [out])[0]

    def _all_reduce_coalesced(self, given: dict[str, Any]) -> Any:
        outs = [self._clone(x) for x in given["inputs"]]
        return self._functional(ALL_REDUCE, given, outs, outs)

    def _broadcast(self, given: dict[str, Any]) -> Any:
        out = self._clone(given["input"])
        return self._functional(BROADCAST, given, [out], [out])[0]

    def _all_gather_into_tensor(self, given: dict[str, Any]) -> Any:
        return self._gather([given["input"]], given)[0]

    def _all_gather_into_tensor_coalesced(self, given: dict[str, Any]) -> Any:
        return self._gather(given["inputs"], given)

    def _all_gather_into_tensor_out(self, given: dict[str, Any]) -> Any:
        return self._functional(ALL_GATHER, given, [given["input"]], [given["out"]])[0]

    def _gather(self, inputs: list[Any], given: dict[str, Any]) -> list[Any]:
        n = given["group_size"]
        outs = [self._new(x, (x.shape[0] * n, *x.shape[1:])) for x in inputs]
        return self._functional(ALL_GATHER, given, inputs, outs)

    def _reduce_scatter_tensor(self, given: dict[str, Any]) -> Any:
        return self._scatter([given["input"]], given)[0]

    def _reduce_scatter_tensor_coalesced(self, given: dict[str, Any]) -> Any:
        return self._scatter(given["inputs"], given)

    def _reduce_scatter_tensor_out(self, given: dict[str, Any]) -> Any:
        return self._functional(REDUCE_SCATTER, given, [given["input"]], [given["out"]])[0]

    def _scatter(self, inputs: list[Any], given: dict[str, Any]) -> list[Any]:
        n = given["group_size"]
        outs = [self._new(x, (x.shape[0] // n, *x.shape[1:])) for x in inputs]
        return self._functional(REDUCE_SCATTER, given, inputs, outs)

    def _all_to_all_single(self, given: dict[str, Any]) -> Any:
        x, rows = given["input"], [int(n) for n in given["output_split_sizes"]]
        out = self._new(x, (sum(rows) if rows else x.shape[0], *x.shape[1:]))
        return self._functional(ALL_TO_ALL, given, [x], [out])[0]

    def _shard_dim_alltoall(self, given: dict[str, Any]) -> Any:
        x, gather, shard = given["input"], given["gather_dim"], given["shard_dim"]
        n = _resolved(given["group_name"]).size()
        shape = list(x.shape)
        shape[gather], shape[shard] = shape[gather] * n, shape[shard] // n
        return self._functional(ALL_TO_ALL, given, [self._clone(x)], [self._new(x, shape)])[0]

    def _wait_tensor(self, given: dict[str, Any]) -> Any:
        self._waited([given["tensor"]])
        return given["tensor"]

    def _wrap_tensor_autograd(self, given: dict[str, Any]) -> Any:
        return given["input"]

    def _isend(self, given: dict[str, Any]) -> Any:
        group = _resolved(given["group_name"])
        self._record(SEND, group.group_name, [given["tensor"]], [], peer=given["dst"])
        self._hold(SEND, group, [given["tensor"]], [], given)
        return given["tensor"]

    def _irecv(self, given: dict[str, Any]) -> Any:
        group = _resolved(given["group_name"])
        self._record(RECEIVE, group.group_name, [], [given["tensor"]], peer=given["src"])
        self._hold(RECEIVE, group, [], [given["tensor"]], given)
        return given["tensor"]

    # ---- FSDP's copies of parameters and gradients to and from one buffer: a kernel each

    def _all_gather_copy_in(self, given: dict[str, Any]) -> Any:
        whole, size = given["all_gather_output"], given["all_gather_input_numel"]
        first = size * given["rank"]
        own = self.recorder._dispatch(aten.slice.Tensor, (whole, 0, first, first + size), {})
        self._copied(given["all_gather_inputs"], [own])
        return own, whole

    def _split_with_sizes_copy(self, given: dict[str, Any]) -> None:
        self._copied([given["all_gather_output"]], given["out"])

    def _chunk_cat(self, given: dict[str, Any]) -> None:
        self._copied(given["tensors"], [given["out"]])

    def _copied(self, inputs: list[Any], outputs: list[Any]) -> None:
        self.recorder.record_collective("aten::_foreach_copy_", inputs, outputs, "")
        self._lose(outputs)

    def _functional(self, kind: str, given: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
        group = _resolved(given["group_name"])
        self._record(kind, group.group_name, inputs, outputs)
        self._hold(kind, group, inputs, outputs, given)
        return outputs

    def _clone(self, x: torch.Tensor) -> Any:
        return self.recorder._dispatch(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})

    def _new(self, x: torch.Tensor, shape: Any) -> Any:
        return self.recorder._dispatch(aten.new_empty.default, (x, list(shape)), {})

    def _zero(self) -> Any:
        return self.recorder._dispatch(aten.empty.memory_format, ([1],), {"device": CUDA})

    # ---- what is recorded

    def _record(
        self, kind: str, group: str, inputs: list[Any], outputs: list[Any], *, peer: int | None = None,
        sync: bool = False,
    ) -> None:  # fmt: skip
        if not any(on_gpu(x) for x in [*inputs, *outputs]):
            return  # between hosts: no GPU waits for it
        label, ranks = self.recorder.groups.of(group)
        if peer is not None:
            self.messages.add(label)
            own = ranks.index(self.recorder.groups.rank)
            pair = (own, peer) if kind == SEND else (peer, own)
            label, ranks = f"{label} {pair[0]} to {pair[1]}", tuple(ranks[i] for i in pair)
        if len(ranks) < 2:
            return
        if self.recorder.recording:
            self.groups[label] = ranks
            self._pending |= dict.fromkeys(map(_storage, outputs or inputs), label)
        self.recorder.record_collective(kind, inputs, outputs, label, sync=sync)

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Work.wait, by which the current stream waits for a collective, whatever it runs next."""

        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            out = wait(work, *args, **kwargs)
            if self._pending:
                self._waited(work.get_future().value())
            return out

        return run

    def _waited(self, tensors: Any) -> None:
        if not self.recorder.recording:
            return
        found = [x for x in leaves(tensors) if isinstance(x, torch.Tensor) and _storage(x) in self._pending]
        for group in dict.fromkeys(self._pending[_storage(x)] for x in found):
            self.recorder._waited(WAIT, [x for x in found if self._pending[_storage(x)] == group], group)
        for x in found:
            self._pending.pop(_storage(x), None)

    # ---- what tensors hold afterwards

    def _hold(self, kind: str, group: Any, inputs: list[Any], outputs: list[Any], given: dict[str, Any]) -> None:
        size, rank = int(group.size()), int(group.rank())
        if kind in (SEND, RECEIVE):
            self._mailed(
                group, outputs or inputs, *((rank, given["dst"]) if kind == SEND else (given.get("src"), rank))
            )
            return
        if kind == BROADCAST:
            self._from_one(group, inputs, outputs, given)
            return
        if not outputs:
            return
        if any(x.numel() > SMALL for x in outputs):
            self._lose(outputs)
            return
        adds = _adds(given.get("reduce_op"))
        if kind == ALL_REDUCE:
            for x in outputs if adds else []:
                self._quietly(aten.mul_.Scalar, x, size)
        elif kind == ALL_GATHER:
            each = len(outputs) // max(len(inputs), 1)
            for i, x in enumerate(outputs):
                own = inputs[i // each if each else 0]
                parts = self._flat(x).chunk(x.numel() // max(own.numel(), 1)) if own.numel() else ()
                for part in parts:
                    self._quietly(aten.copy_.default, part, self._flat(own))
        elif kind in (REDUCE_SCATTER, ALL_TO_ALL) and all(x.numel() % size == 0 for x in [*inputs, *outputs]):
            self._exchanged(kind, size, rank, inputs, outputs, adds)
        else:
            self._lose(outputs)

    def _from_one(self, group: Any, inputs: list[Any], outputs: list[Any], given: dict[str, Any]) -> None:
        """A broadcast, a scatter, or a reduction to one rank."""
        root, rank = int(given.get("root_rank", given.get("src", 0))), int(group.rank())
        if "reduce_op" in given:
            if root == rank and _adds(given["reduce_op"]) and all(x.numel() <= SMALL for x in outputs):
                for x in outputs:
                    self._quietly(aten.mul_.Scalar, x, int(group.size()))
        elif "input_tensors" not in given:
            self._mailed(group, outputs, root, None)
        elif root == rank and outputs[0].numel() <= SMALL:
            self._quietly(aten.copy_.default, outputs[0], inputs[rank])
        else:
            self._lose(outputs)

    def _mailed(self, group: Any, tensors: list[Any], sender: int | None, to: int | None) -> None:
        """Whole numbers that ranks send one another, such as sizes, are read as sent; others are unknown."""
        groups = self.recorder.groups
        if sender is None or not all(_whole(x) for x in tensors):
            self._lose(tensors if to is not None and sender != group.rank() else [])
        elif sender == group.rank():
            groups.send(group.group_name, to, [self._numbers(x) for x in tensors])
        else:
            for x, numbers in zip(tensors, groups.receive(group.group_name, sender), strict=True):
                if numbers is None:
                    self._lose([x])
                elif isinstance(x, FakeTensor):
                    self.recorder.shadows.set(x, numbers)
                else:
                    x.copy_(numbers)

    def _numbers(self, x: torch.Tensor) -> torch.Tensor | None:
        found = self.recorder.shadows.numbers(x)
        return None if found is None or found.assumed else found.data.clone()

    def _exchanged(self, kind: str, size: int, rank: int, inputs: list[Any], outputs: list[Any], adds: bool) -> None:
        """Each rank's part for this one is as this one's part for itself."""
        listed = len(inputs) != len(outputs) or (kind == ALL_TO_ALL and len(outputs) == size)  # a tensor for each rank
        for i, x in enumerate(outputs):
            mine = self._flat(inputs[rank]) if listed else self._flat(inputs[i]).chunk(size)[rank]
            parts = [self._flat(x)] if listed or kind == REDUCE_SCATTER else self._flat(x).chunk(size)
            if any(part.numel() != mine.numel() for part in parts):
                self._lose([x])
                continue
            for part in parts:
                self._quietly(aten.copy_.default, part, mine)
            if kind == REDUCE_SCATTER and adds:
                self._quietly(aten.mul_.Scalar, x, size)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """All elements of a tensor in one row, sharing its memory."""
        return x.view(-1) if x.is_contiguous() else x

    def _quietly(self, func: Any, *args: Any) -> None:
        """Run an op that is not part of the step."""
        recorder = self.recorder
        was, recorder.recording = recorder.recording, False
        try:
            if isinstance(args[0], FakeTensor):
                recorder._dispatch(func, args, {})
            else:
                func(*args)
        finally:
            recorder.recording = was

    def _lose(self, outputs: list[Any]) -> None:
        self.recorder.shadows.lose([x for x in outputs if isinstance(x, FakeTensor)])


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _resolved(group: Any) -> Any:
    """A process group, given as such or by its name."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(group) if isinstance(group, str) else group


def _whole(x: torch.Tensor) -> bool:
    return x.numel() <= SMALL and not x.is_floating_point() and not x.is_complex()


def _adds(reduce_op: Any) -> bool:
    """Whether numbers are added up; a mean, a maximum or a minimum of equal ones is the number itself."""
    if reduce_op is None:
        return True
    if isinstance(reduce_op, str):
        return reduce_op.lower() == "sum"
    return bool(reduce_op.op() == 0)


def _done(tensors: list[Any]) -> Any:
    """The work of a collective, whose tensors are there."""
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()
