"""torch.distributed during a capture: one rank of any number, whose process groups wait for nobody."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.cuda.nccl

from presage.capture.backend import CUDA
from presage.capture.rank_objects import SentObjects, sent_objects

PER_NODE = 8  # GPUs of a node, where nobody says otherwise
NCCL = "nccl"
_DEFAULT = ("", "undefined", "default_pg")


@dataclass
class ProcessGroups:
    """The rank that code runs as, and the groups it makes, of its own and of other ranks, in their order."""

    rank: int = 0
    ranks: int = 1
    per_node: int = PER_NODE
    made: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)  # PyTorch's name, description, ranks
    objects: SentObjects = field(default_factory=sent_objects)
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


@contextmanager
def environment(groups: ProcessGroups) -> Iterator[None]:
    """The code sees torchrun's variables, where there are several ranks."""
    before = dict(os.environ)
    if groups.ranks > 1:
        os.environ.update(groups.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def leave_group() -> None:
    """End the process group that code has begun in a capture, and what PyTorch remembers of its meshes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        with suppress(ImportError, AttributeError):
            debug: Any = import_module("torch.distributed.tensor.debug")
            debug._clear_sharding_prop_cache()


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
        del backend, init_method, timeout, store, group_name, pg_options, device_id, more
        groups.ranks = world_size if world_size > 0 else _given("WORLD_SIZE", groups.ranks)
        groups.rank = rank if rank >= 0 else _given("RANK", groups.rank)
        groups.made.append(("0", "", tuple(range(groups.ranks))))
        begin("fake", store=FakeStore(), rank=groups.rank, world_size=groups.ranks)

    def new_group(size: int, rank: int, ranks: Sequence[int], backend: Any, _: Any, group_name: str,
                  backend_options: Any = None, timeout: Any = None, pg_tag: Any = None, device_id: Any = None,
                  group_desc: str | None = None, **more: Any) -> Any:  # fmt: skip
        del backend, backend_options, device_id, more
        if ranks:
            groups.made.append((str(group_name), group_desc or "", tuple(ranks)))
        more_of = {"timeout": timeout, "pg_tag": pg_tag, "group_desc": group_desc}
        return make(size, rank, ranks, "fake", store, group_name, **more_of)

    out: list[tuple[Any, str, Any]] = [
        (torch.distributed, "init_process_group", init),
        (c10d, "init_process_group", init),
        (c10d, "_new_process_group_helper", new_group),
        *_answers(c10d),
        *_objects(c10d, groups),
    ]
    return [*out, *_checks(), *(_votes() if groups.ranks > 1 else [])]


def _given(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


def _answers(c10d: Any) -> list[tuple[Any, str, Any]]:
    """Questions about backends are answered as where they are."""
    answers: dict[str, Any] = {
        "is_nccl_available": lambda: True, "is_gloo_available": lambda: True, "get_backend": lambda group=None: NCCL,  # noqa: ARG005
        "monitored_barrier": lambda *_, **__: None, "get_node_local_rank": lambda fallback_rank=None: 0,  # noqa: ARG005
    }  # fmt: skip
    out = [(owner, name, answer) for name, answer in answers.items() for owner in (torch.distributed, c10d)]
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
    return [*out, (fsdp, by_number, device)] if real else out


def _votes() -> list[tuple[Any, str, Any]]:
    """Stages of a pipeline agree on whether their shapes are given: the others' are taken to be as this one's."""
    try:
        pipelining: Any = import_module("torch.distributed.pipelining.stage")
        stage, mode = pipelining.PipelineStage, pipelining.InferenceMode
    except (ImportError, AttributeError):
        return []

    def vote(own: Any, has_backward: bool, received_acc: Any = None) -> Any:
        mine = torch.tensor([0 if mode.needs_dynamic(own._user_meta, has_backward) else 1])
        return mine if received_acc is None else received_acc * mine

    asked = {"_warmup_forward_vote": vote, "_warmup_backward_result": lambda _, received_result=None: received_result}
    return [(stage, name, answer) for name, answer in asked.items() if hasattr(stage, name)]


# ---- objects: other ranks are taken to have what this one has


def _objects(c10d: Any, groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    def size(group: Any) -> int:
        return int(c10d.get_world_size(group))

    def gathered(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * size(group)

    def gathered_by_one(obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, **_: Any) -> None:
        del dst
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * size(group)

    def scattered(output: Any, given: Any = None, src: Any = None, group: Any = None, **_: Any) -> None:
        del src
        if given:
            output[0] = given[max(0, c10d.get_rank(group))]

    def place(rank: Any, in_group: Any, group: Any) -> int:
        return int(rank if in_group is None else c10d.get_global_rank(group or c10d.GroupMember.WORLD, in_group))

    def broadcast(
        object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        del device
        sender = place(src or 0, group_src, group)
        if sender == groups.rank:
            for rank in c10d.get_process_group_ranks(group or c10d.GroupMember.WORLD):
                groups.objects.send(groups.rank, rank, object_list)
        elif any(value is None for value in object_list):
            object_list[:] = groups.objects.receive(sender, groups.rank)

    def send(object_list: Any, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None,
             use_batch: bool = False) -> None:  # fmt: skip
        del device, use_batch
        groups.objects.send(groups.rank, place(dst, group_dst, group), object_list)

    def receive(object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
                use_batch: bool = False) -> int:  # fmt: skip
        del device, use_batch
        sender = place(groups.rank - 1 if src is None else src, group_src, group)
        object_list[:] = groups.objects.receive(sender, groups.rank)
        return sender

    patches = {
        "all_gather_object": gathered, "gather_object": gathered_by_one, "scatter_object_list": scattered,
        "broadcast_object_list": broadcast, "send_object_list": send, "recv_object_list": receive,
    }  # fmt: skip
    return [(owner, name, f) for name, f in patches.items() for owner in (torch.distributed, c10d)]
