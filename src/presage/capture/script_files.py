"""What a script reads and writes while it is captured.

Data loaders run without their processes and threads, are timed, and their ops are not recorded. Checkpoints are kept in
memory: nothing of theirs is written, and no file of the user's is overwritten with one.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from presage.capture.contents import leaves
from presage.capture.fake_device import patched, unpatched


class Loading:
    """What loading batches takes on this host."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, int]] = []  # seconds, and workers of the loader

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """Loaders made or used while this lasts."""
        with patched(DataLoader, "_get_iterator", lambda loader: _Batches(loader, self)):
            yield

    def summary(self, step: slice) -> dict[str, float]:
        """Seconds per batch, as one process takes, workers, and the batches of the step, by their places in `batches`;
        nothing where a step loads none. The time is a round one (1, 2 or 5): it differs from run to run."""
        drawn = self.batches[step]
        if not drawn:
            return {}
        seconds = median(t for t, workers in self.batches if workers == drawn[0][1])
        return {"batch_seconds": _round(seconds), "workers": drawn[0][1], "batches": len(drawn)}


def _round(seconds: float) -> float:
    unit = 10.0 ** math.floor(math.log10(max(seconds, 1e-6)))
    return float(f"{next(n for n in (1, 2, 5, 10) if n * unit >= 0.8 * seconds) * unit:.1g}")


class _Batches:
    """The iterator of a loader, in this process: of its workers only the number is kept."""

    def __init__(self, loader: Any, loading: Loading) -> None:
        self._loading, self._workers = loading, loader.num_workers
        self._on_gpu = self._workers == 0  # until a batch shows that it is not
        self._reset(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        del first_iter
        plain = object.__new__(type(loader))
        plain.__dict__.update(loader.__dict__)
        plain.__dict__.update(num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None)
        self._inner = _SingleProcessDataLoaderIter(plain)

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __next__(self) -> Any:
        start = time.perf_counter()
        with nullcontext() if self._on_gpu else _elsewhere():
            batch = next(self._inner)
        self._loading.batches.append((time.perf_counter() - start, self._workers))
        if self._on_gpu:
            self._on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in _tensors(batch))
        return batch


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
    if isinstance(batch, dict):
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
