"""What a recorder keeps: the calls as they came, the tensors they saw, and when memory was taken and given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from presage.capture.contents import is_pinned, parts
from presage.graph.graph import HOST_MEMORY, PINNED_MEMORY, Arg, OpCost, Phase, Role, Storage, Tensor, Thread


@dataclass
class RecordedCall:
    """One op as PyTorch's dispatcher saw it, before it is put into CUDA's words."""

    index: int
    name: str
    overload: str
    host: bool  # ran on the host, for real
    inputs: tuple[Arg, ...] = ()
    outputs: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    view: bool = False
    sync: bool = False
    opaque: bool = False
    phase: Phase = "forward"
    thread: Thread = "main"
    module: str = ""
    line: str = ""
    sequence: int = -1
    stream: str = ""
    group: str = ""  # of a collective, its process group
    issued: str | None = None  # of a collective, the stream that called it
    cost: OpCost | None = None  # of a custom kernel
    speed: float = 1.0  # how many times as fast as it is known to be
    replayed: str = ""  # the CUDA graph that it is part of
    compiled: str = ""  # the call of a compiled function that it ran in
    called: str = ""  # the op autograd called, where it would have called this one on plain tensors


class MemoryEvent(NamedTuple):
    """Storage `storage` is taken or given back before call number `call`."""

    call: int
    storage: int
    allocates: bool


@dataclass
class MemoryTracker:
    """Numbers tensors and storages. Holds none of them alive: a storage's end is told by a weak reference."""

    tensors: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    roles: dict[int, tuple[Role, str, str]] = field(default_factory=dict)
    moments: list[MemoryEvent] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    hosts: dict[str, int] = field(default_factory=dict)  # the storages of host memory, by name
    live: int = 0  # bytes of storages that are alive, in blocks as the GPU's allocator gives them
    peak: int = 0
    sparse: dict[int, tuple[int, ...]] = field(default_factory=dict)  # shapes of sparse tensors' values
    _alive: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _now: Callable[[], int] | None = None

    def start(self, now: Callable[[], int]) -> None:
        """The recorded step begins; what is alive now was there before it."""
        self._now = now
        self.tensors, self.moments = [], []
        self._known.clear()
        self.sparse.clear()
        self.before = {number for number, _ in self._alive.values()}

    def stop(self) -> None:
        self._now = None

    def storage_of(self, tensor: torch.Tensor) -> int:
        handle = _handle(tensor)
        found = self._alive.get(handle._cdata)
        return self._begun(handle) if found is None else found[0]

    def _begun(self, handle: Any) -> int:
        key, number = handle._cdata, len(self.sizes)
        self.sizes.append(handle.nbytes())
        self.live += _block(self.sizes[number])
        self.peak = max(self.peak, self.live)
        self._alive[key] = (number, weakref.ref(handle, partial(self._ended, key, number)))
        if self._now is not None:
            self.moments.append(MemoryEvent(self._now() - 1, number, True))
        return number

    def resized(self, handle: Any) -> None:
        """A storage has given its memory back, or taken some anew, as sharded parameters do: it is another one now."""
        found = self._alive.pop(handle._cdata, None)
        if found is None:
            return
        self._ended(-1, found[0], None)
        number = self._begun(handle)
        if found[0] in self.roles:
            self.roles[number] = self.roles[found[0]]

    def alive(self) -> list[tuple[int, Any]]:
        """Storages that are not given back: their numbers and weak references."""
        return list(self._alive.values())

    def _ended(self, key: int, number: int, _: Any) -> None:
        if self._alive.get(key, (-1,))[0] == number:
            del self._alive[key]
        self.live -= _block(self.sizes[number])
        if self._now is not None:
            self.moments.append(MemoryEvent(self._now(), number, False))

    def _host(self, name: str) -> int:
        """Pageable and pinned host memory are a storage of no bytes each: of host tensors only the shape matters."""
        if name not in self.hosts:
            self.hosts[name] = len(self.sizes)
            self.sizes.append(0)
            self.roles[self.hosts[name]] = ("input", name, "")
        return self.hosts[name]

    def tensor(self, x: torch.Tensor) -> int:
        on_gpu = x.device.type == "cuda"
        storage = self.storage_of(x) if on_gpu else self._host(PINNED_MEMORY if is_pinned(x) else HOST_MEMORY)
        strided = x.layout is torch.strided
        strides, offset = (x.stride(), x.storage_offset()) if strided else ((), 0)
        key = (storage, x.shape, strides, x.dtype, offset)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.tensors)
            dtype = str(x.dtype).removeprefix("torch.")
            if not strided:
                self.sparse[number] = tuple(_values(x).shape)
            self.tensors.append(Tensor(number, storage, tuple(x.shape), tuple(strides), dtype, int(offset)))
        return number

    def name(self, x: torch.Tensor | None, role: Role, name: str = "", module: str = "") -> None:
        """Say what a tensor's memory is for."""
        for part in () if x is None else parts(x):
            if part.device.type == "cuda":
                self.roles[self.storage_of(part)] = (role, name, module)

    def compact(self, modules: dict[int, str]) -> tuple[list[Tensor], list[Storage], list[MemoryEvent]]:
        """Tensors, storages and moments of the recorded step alone, its storages numbered from 0."""
        made = {m.storage for m in self.moments if m.allocates}
        number = {old: new for new, old in enumerate(sorted(self.before | made | set(self.hosts.values())))}
        storages = []
        for old, new in number.items():
            unnamed: Role = "activation" if old in made else "input"
            role, name, module = self.roles.get(old, (unnamed, "", modules.get(old, "")))
            storages.append(Storage(new, self.sizes[old], role, name, module))
        tensors = [replace(t, storage=number[t.storage]) for t in self.tensors]
        moments = [MemoryEvent(m.call, number[m.storage], m.allocates) for m in self.moments]
        return tensors, storages, moments


def _block(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _handle(tensor: torch.Tensor) -> Any:
    """The object whose life is the memory's: a sparse tensor's is that of its values."""
    return (tensor if tensor.layout is torch.strided else _values(tensor)).untyped_storage()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor._values()
