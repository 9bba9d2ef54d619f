"""What a script reads and writes while it is captured.

Data loaders run without their processes and threads, are timed, and their ops are not recorded. Checkpoints are kept in
memory: nothing of theirs is written, and no file of the user's is overwritten with one.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from presage.capture.contents import leaves, pin
from presage.capture.fake_device import patched, unpatched
from presage.capture.typical_step import random_state, set_random_state


class LoadedBatch(NamedTuple):
    """One batch of a data loader."""

    seconds: float  # of one process
    workers: int
    nbytes: int  # of its tensors
    pinned: bool


class Loading:
    """What loading batches takes on this host."""

    def __init__(self) -> None:
        self.batches: list[LoadedBatch] = []
        self.real: dict[int, float] = {}  # by loader, seconds of a batch, where its dataset is of fake tensors
        self.drawn = random_state()  # after the last batch: what is drawn from then on, the step draws

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """Loaders made or used while this lasts."""
        with patched(DataLoader, "_get_iterator", lambda loader: _Batches(loader, self)):
            yield

    def summary(self, step: slice) -> dict[str, float]:
        """Seconds and bytes of a batch, as one process loads it, workers, whether they are pinned, and how many of the
        batches are the step's; nothing where it has none. The time is a round one (1, 2 or 5): runs differ."""
        drawn = self.batches[step]
        if not drawn:
            return {}
        first = drawn[0]
        alike = [b for b in self.batches if b.workers == first.workers]
        return {
            "batch_seconds": _round(median(b.seconds for b in alike)),
            "workers": first.workers,
            "batches": len(drawn),
            "batch_bytes": max(b.nbytes for b in drawn),
            "pinned": float(first.pinned),
        }


def _round(seconds: float) -> float:
    unit = 10.0 ** math.floor(math.log10(max(seconds, 1e-6)))
    return float(f"{next(n for n in (1, 2, 5, 10) if n * unit >= 0.8 * seconds) * unit:.1g}")


class _Batches:
    """The iterator of a loader, in this process: of its workers only the number is kept."""

    def __init__(self, loader: Any, loading: Loading) -> None:
        self._loading, self._workers, self._pins = loading, loader.num_workers, loader.pin_memory
        self._on_gpu = self._workers == 0  # until a batch shows that it is not
        self._reset(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        del first_iter
        plain = object.__new__(type(loader))
        plain.__dict__.update(loader.__dict__)
        plain.__dict__.update(num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None)
        self._inner, self._loader = _SingleProcessDataLoaderIter(plain), plain

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __next__(self) -> Any:
        with nullcontext() if self._on_gpu else _elsewhere():
            batch, seconds = _timed(lambda: next(self._inner))
        tensors = [x for x in _tensors(batch) if isinstance(x, torch.Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            seconds = self._with_real_data() or seconds
        nbytes = sum(x.numel() * x.element_size() for x in tensors)
        self._loading.drawn = random_state()
        self._loading.batches.append(LoadedBatch(seconds, self._workers, nbytes, self._pins))
        if self._on_gpu:
            self._on_gpu = any(x.is_cuda for x in tensors)
        if self._pins:
            for x in tensors:
                pin(x)
        return batch

    def _with_real_data(self) -> float:
        """Seconds of a batch of zeros in the place of fake tensors, on which every op takes long; 0 if it cannot be."""
        known, loader = self._loading.real, self._loader
        if (key := id(loader.dataset)) not in known:
            seeds = random_state()
            try:
                with _elsewhere():
                    data = _real(loader.dataset)
                    places = [k % len(data) for k in range(loader.batch_size)]
                    loads = (_timed(lambda: loader.collate_fn([data[k] for k in places])) for _ in range(3))
                    known[key] = min(seconds for _, seconds in loads)
            except Exception:  # the user's code with data that are not the user's: whatever it does not like
                known[key] = 0.0
            finally:
                set_random_state(seeds)
        return known[key]


def _timed(load: Callable[[], Any]) -> tuple[Any, float]:
    """What a process with one thread loads, and its seconds: those of its own work where it waits for nothing, so that
    what else this machine has to do does not count."""
    threads, waits = torch.get_num_threads(), _waits()
    torch.set_num_threads(1)
    start, own = time.perf_counter(), time.thread_time()
    try:
        batch = load()
    finally:
        torch.set_num_threads(threads)
    works = waits >= 0 and _waits() == waits
    return batch, time.thread_time() - own if works else time.perf_counter() - start


def _waits() -> int:
    """How often this thread has waited for a disk, a network or another thread; -1 where that is not known."""
    if sys.platform != "linux":
        return -1
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _real(data: Any, depth: int = 4) -> Any:
    """A dataset with zeros in the place of fake tensors."""
    if isinstance(data, FakeTensor):
        numbers = np.zeros(data.numel() * data.element_size(), np.uint8)
        return torch.from_numpy(numbers).view(data.dtype).view(data.shape)
    if depth and isinstance(data, tuple | list):
        return type(data)([_real(x, depth - 1) for x in data]) if type(data) in (tuple, list) else data
    if depth and type(data) is dict:
        return {k: _real(v, depth - 1) for k, v in data.items()}
    if depth and hasattr(data, "__getitem__") and hasattr(data, "__dict__") and not isinstance(data, torch.Tensor):
        own = copy(data)
        own.__dict__.update({k: _real(v, depth - 1) for k, v in data.__dict__.items()})
        return own
    return data


@contextmanager
def _elsewhere() -> Iterator[None]:
    """As in another process: PyTorch as it is, and nothing of it in the profile."""
    torch._C._autograd._enable_record_function(False)
    try:
        with unpatched():
            yield
    finally:
        torch._C._autograd._enable_record_function(True)


def _tensors(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [x for v in batch.values() for x in _tensors(v)]
    return [x for v in batch for x in _tensors(v)] if isinstance(batch, list | tuple) else leaves(batch)


class CheckpointFiles:
    """What `torch.save` is given and `torch.load` asked for, by the file's path."""

    def __init__(self) -> None:
        self.saved: dict[Any, Any] = {}

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Checkpoints saved while this lasts."""
        moves = [(shutil, "copyfile", False), (os, "replace", True), (os, "rename", True)]
        with (
            patched(torch, "save", self._save),
            patched(torch, "load", self._loading(torch.load)),
            patched(os.path, "exists", self._exists(os.path.exists)),
            ExitStack() as stack,
        ):
            for owner, name, moves_it in moves:
                stack.enter_context(patched(owner, name, self._moving(getattr(owner, name), moves_it)))
            yield

    def _save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.saved[_key(f)] = tree_map(_without_memory, obj)

    def _loading(self, load: Callable[..., Any]) -> Any:
        def run(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            where = torch.device(map_location).type if isinstance(map_location, str | torch.device) else ""
            if _key(f) in self.saved:
                found = tree_map(_with_memory, deepcopy(self.saved[_key(f)]))
            else:
                with _elsewhere():
                    found = load(f, "cpu", *args, **kwargs)
            return tree_map(partial(_moved, where), found) if where else found

        return run

    def _exists(self, exists: Callable[[Any], bool]) -> Any:
        return lambda path: _key(path) in self.saved or exists(path)

    def _moving(self, move: Callable[..., Any], moves: bool) -> Any:
        def run(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if _key(source) not in self.saved:
                return move(source, target, *args, **kwargs)
            self.saved[_key(target)] = self.saved.pop(_key(source)) if moves else self.saved[_key(source)]
            return target

        return run


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor of the GPU in a checkpoint, whose memory is not kept from being freed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _without_memory(value: Any) -> Any:
    on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
    return _SavedTensor(tuple(value.shape), value.dtype) if on_gpu else value


def _with_memory(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, _SavedTensor) else value


def _key(file: Any) -> Any:
    return os.path.abspath(file) if isinstance(file, str | os.PathLike) else file


def _moved(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor | torch.nn.Module) else value
