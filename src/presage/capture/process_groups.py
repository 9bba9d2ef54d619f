"""torch.distributed during a capture: one rank of any number, whose process groups wait for nobody."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl

from presage.capture.backend import CUDA
from presage.capture.rank_objects import SentObjects, sent_objects

PER_NODE = 8  # GPUs of a node, where nobody says otherwise
NCCL, GLOO = "nccl", "gloo"
_DEFAULT = ("", "undefined", "default_pg")


@dataclass
class ProcessGroups:
    """The rank that code runs as, and the groups it makes, of its own and of other ranks, in their order."""

    rank: int = 0
    ranks: int = 1
    per_node: int = PER_NODE
    made: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)  # PyTorch's name, description, ranks
    objects: SentObjects = field(default_factory=sent_objects)
    on_host: set[str] = field(default_factory=set)  # names of those whose backend is gloo
    _own: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    _counted: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun sets. Each process sees its GPU as the first."""
        local = min(self.ranks, self.per_node)
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(self.rank // local), "GROUP_WORLD_SIZE": str(-(-self.ranks // local)),
            "NODE_RANK": str(self.rank // local), "ROLE_RANK": str(self.rank), "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip

    def labels(self) -> dict[int, dict[str, tuple[str, tuple[int, ...]]]]:
        """Each rank's groups by PyTorch's name: what to call them (the same on all ranks), and who is in them."""
        out: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        taken: Counter[tuple[int, str]] = Counter()
        for name, description, ranks in self.made:
            word = self._word(description, ranks)
            for rank in ranks:
                groups = out.setdefault(rank, {})
                if name not in groups:
                    taken[rank, word] += 1
                    n = taken[rank, word]
                    groups[name] = word if n == 1 else f"{word} {n}", ranks
        return out

    def alike(self, messages: set[str]) -> tuple[int, ...]:
        """The ranks that have this one's place in all groups in which it exchanges messages, itself first."""
        places = {
            rank: {label: ranks.index(rank) for label, ranks in groups.values() if label in messages}
            for rank, groups in self.labels().items()
        }
        own = places.get(self.rank, {})
        return (self.rank, *(r for r in range(self.ranks) if r != self.rank and places.get(r) == own))

    def _word(self, description: str, ranks: tuple[int, ...]) -> str:
        plain = description.lower().removeprefix("mesh_").removesuffix("_group")
        if len(ranks) == self.ranks:
            return "world" if plain in _DEFAULT else plain
        if plain not in _DEFAULT:
            return plain
        apart = {b - a for a, b in pairwise(ranks)}
        return f"{len(ranks)} ranks" + (f", {apart.pop()} apart" if len(apart) == 1 else "")

    def of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """What a group of this rank is called, and its ranks."""
        if len(self.made) != self._counted:
            self._own, self._counted = self.labels().get(self.rank, {}), len(self.made)
        return self._own.get(name) or ("world", tuple(range(self.ranks)))

    def send(self, name: str, to: int | None, value: list[Any]) -> None:
        """Send values to a rank of a group (by its place in it), or to all, for captures of other ranks to read."""
        label, ranks = self.of(name)
        for place, rank in enumerate(ranks):
            if to in (None, place) and rank != self.rank:
                self.objects.send(self.rank, rank, value, (label, ranks.index(self.rank), place))

    def receive(self, name: str, sender: int) -> list[Any]:
        """What a rank of a group sent to this one."""
        label, ranks = self.of(name)
        return self.objects.receive(ranks[sender], self.rank, (label, sender, ranks.index(self.rank)))


@contextmanager
def environment(groups: ProcessGroups, alone: bool = False) -> Iterator[None]:
    """The code sees torchrun's variables, where there are several ranks; with `alone` also as the only one."""
    before = dict(os.environ)
    if groups.ranks > 1 or alone:
        os.environ.update(groups.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# How frameworks forget the groups of a process, which they keep in their modules.
_FRAMEWORKS = (
    "megatron", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "torchtitan", "fairscale", "torchrec",
)  # fmt: skip
_FORGET = (
    ("megatron.core.parallel_state", "destroy_model_parallel"),
    ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
    ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ("accelerate.state", "GradientState._reset_state"),
    ("accelerate.state", "AcceleratorState._reset_state"),
    ("accelerate.state", "PartialState._reset_state"),
)
_ZERO = "deepspeed.runtime.zero"
_FORGOTTEN = (
    ("deepspeed.comm.comm", "cdb", None),
    ("deepspeed.utils.groups", "mesh_device", None),
    (f"{_ZERO}.partition_parameters", "Init.param_id", 0),  # parameters are numbered in their order
    (f"{_ZERO}.parameter_offload", "DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__", ([0],)),  # modules
)


def leave_group() -> None:
    """End the process group that code has begun in a capture, what PyTorch remembers of its meshes, and frameworks."""
    if not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        with suppress(ImportError, AttributeError):
            debug: Any = import_module("torch.distributed.tensor.debug")
            debug._clear_sharding_prop_cache()
    for module, function in _FORGET:
        if module in sys.modules:
            attrgetter(function)(sys.modules[module])()
    for module, name, value in _FORGOTTEN:
        if module in sys.modules:
            owner, _, field_name = name.rpartition(".")
            setattr(
                attrgetter(owner)(sys.modules[module]) if owner else sys.modules[module], field_name, deepcopy(value)
            )
    for module in [m for m in sys.modules if m.partition(".")[0] in _FRAMEWORKS]:
        for name, value in [*vars(sys.modules[module]).items()]:
            if isinstance(value, torch.distributed.ProcessGroup):
                setattr(sys.modules[module], name, None)


def group_patches(groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    """Process groups of any backend and size that need no network, no GPU and no other process."""
    if not torch.distributed.is_available():
        return []
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d: Any = torch.distributed.distributed_c10d
    begin, make = c10d.init_process_group, c10d._new_process_group_helper
    store = FakeStore()

    def init(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
             store: Any = None, group_name: str = "", pg_options: Any = None, device_id: Any = None,
             **more: Any) -> None:  # fmt: skip
        del init_method, timeout, store, group_name, pg_options, device_id, more
        groups.on_host = {"0"} if backend == GLOO else set()
        groups.ranks = world_size if world_size > 0 else _given("WORLD_SIZE", groups.ranks)
        groups.rank = rank if rank >= 0 else _given("RANK", groups.rank)
        groups.made.append(("0", "", tuple(range(groups.ranks))))
        begin("fake", store=FakeStore(), rank=groups.rank, world_size=groups.ranks)

    def new_group(size: int, rank: int, ranks: Sequence[int], backend: Any, _: Any, group_name: str,
                  backend_options: Any = None, timeout: Any = None, pg_tag: Any = None, device_id: Any = None,
                  group_desc: str | None = None, **more: Any) -> Any:  # fmt: skip
        del backend_options, device_id, more
        if str(backend) == GLOO:
            groups.on_host.add(str(group_name))
        if ranks:
            groups.made.append((str(group_name), group_desc or "", tuple(ranks)))
        more_of = {"timeout": timeout, "pg_tag": pg_tag, "group_desc": group_desc}
        return make(size, rank, ranks, "fake", store, group_name, **more_of)

    out: list[tuple[Any, str, Any]] = [
        (torch.distributed, "init_process_group", init),
        (c10d, "init_process_group", init),
        (c10d, "_new_process_group_helper", new_group),
        *_answers(c10d, groups),
        *_objects(c10d, groups),
        *_processes(groups),
    ]
    return [*out, *_checks()]


def _processes(groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    """Processes that code starts: this rank's alone runs, in this one."""

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, **options: Any) -> Any:
        del options
        fn(groups.rank % nprocs, *args)
        return SimpleNamespace(processes=[], join=lambda *_, **__: True)

    return [(torch.multiprocessing, name, spawn) for name in ("spawn", "start_processes")]


def _given(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


def _answers(c10d: Any, groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    """Questions about backends are answered as where they are."""

    def backend(group: Any = None) -> str:
        return GLOO if (group or c10d.GroupMember.WORLD).group_name in groups.on_host else NCCL

    def split(parent_pg: Any = None, split_ranks: Any = None, **options: Any) -> Any:
        members = c10d.get_process_group_ranks(parent_pg or c10d.GroupMember.WORLD)
        known = {k: v for k, v in options.items() if k in ("timeout", "group_desc")}
        made = [[members[i] for i in some] for some in split_ranks or ()]
        own = [g for ranks in made if (g := c10d.new_group(ranks, **known)) and groups.rank in ranks]
        return own[0] if own else None

    answers: dict[str, Any] = {
        "is_nccl_available": lambda: True, "is_gloo_available": lambda: True, "get_backend": backend,
        "split_group": split, "monitored_barrier": lambda *_, **__: None,
        "get_node_local_rank": lambda fallback_rank=None: 0,  # noqa: ARG005
    }  # fmt: skip
    out = [(owner, name, answer) for name, answer in answers.items() for owner in (torch.distributed, c10d)]
    out += [(c10d, "_set_pg_timeout", lambda *_, **__: None)]  # groups that wait for nobody have none
    out += [(owner, "TCPStore", _store) for owner in (torch.distributed, c10d)]
    out += [(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))]
    return [*out, (torch.cuda.nccl, "version", lambda: (2, 27, 3))]


def _store(*_: Any, **__: Any) -> Any:
    c10d: Any = torch.distributed
    return c10d.HashStore()


def _checks() -> list[tuple[Any, str, Any]]:
    """Ranks that compare their parameters find them equal; the device called 0 is CUDA's."""
    fsdp: Any = import_module("torch.distributed.fsdp._init_utils")
    same, by_number = "_verify_param_shape_across_processes", "_get_device_from_device_id"
    owners = [torch.distributed.utils, torch.nn.parallel.distributed]
    out: list[tuple[Any, str, Any]] = [(owner, same, lambda *_, **__: None) for owner in owners if hasattr(owner, same)]
    real: Any = getattr(fsdp, by_number, None)

    def device(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found if found is None or found.type == "cpu" else CUDA

    handle: Any = fsdp._FSDPDeviceHandle
    out.append((handle, "from_device", lambda device: torch.cuda if device.type != "cpu" else handle(device)))
    sharded: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    if hasattr(sharded, "_chunk_with_empty"):
        out.append((sharded, "_chunk_with_empty", _Shards))
    return [*out, (fsdp, by_number, device)] if real else out


@dataclass(frozen=True)
class _Shards:
    """A parameter's shards, each made where it is asked for: `fully_shard` asks for two of as many as ranks are."""

    tensor: torch.Tensor
    count: int
    dim: int

    def __getitem__(self, place: int) -> torch.Tensor:
        length = self.tensor.shape[self.dim]
        each = max(1, -(-length // self.count))
        begin = place * each
        if begin >= length > 0 or place >= self.count:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(each, length - begin))


# ---- objects: what is sent arrives; gathered ones of other ranks are taken to be this one's


def _objects(c10d: Any, groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    def size(group: Any) -> int:
        return int(c10d.get_world_size(group))

    def gathered(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * size(group)

    def gathered_by_one(obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, **_: Any) -> None:
        del dst
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * size(group)

    def name(group: Any) -> str:
        return str((group or c10d.GroupMember.WORLD).group_name)

    def place(group: Any, rank: Any, place: Any) -> int:
        if place is not None or rank is None:
            return int(place or 0)
        return int(c10d.get_group_rank(group or c10d.GroupMember.WORLD, rank))

    def sent(object_list: Any, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None,
             use_batch: bool = False) -> None:  # fmt: skip
        del device, use_batch
        groups.send(name(group), place(group, dst, group_dst), list(object_list))

    def received(object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
                 use_batch: bool = False) -> int:  # fmt: skip
        del device, use_batch
        if src is None and group_src is None:
            raise NotImplementedError("recv_object_list from any rank is not captured: give it its source (src=)")
        sender = place(group, src, group_src)
        object_list[:] = groups.receive(name(group), sender)
        return int(groups.of(name(group))[1][sender])

    def broadcast(
        object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        del device
        sender = place(group, src, group_src)
        if sender == c10d.get_rank(group):
            groups.send(name(group), None, list(object_list))
        else:
            object_list[:] = groups.receive(name(group), sender)

    def scattered(output: Any, given: Any = None, src: Any = None, group: Any = None, group_src: Any = None) -> None:
        sender, me = place(group, src, group_src), int(c10d.get_rank(group))
        if sender == me:
            groups.send(name(group), None, list(given))
        output[0] = (given if sender == me else groups.receive(name(group), sender))[me]

    patches = {
        "all_gather_object": gathered, "gather_object": gathered_by_one, "scatter_object_list": scattered,
        "broadcast_object_list": broadcast, "send_object_list": sent, "recv_object_list": received,
    }  # fmt: skip
    return [(owner, name, f) for name, f in patches.items() for owner in (torch.distributed, c10d)]
