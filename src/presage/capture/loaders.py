"""Data loaders while a script is captured: without their processes and threads, timed, their ops not recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
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

    def summary(self) -> dict[str, float]:
        """Seconds per batch, as one process takes, and workers; nothing where there is no loader."""
        times = self.batches[1:] or self.batches
        if not times:
            return {}
        return {"batch_seconds": median(t for t, _ in times), "workers": times[-1][1]}


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
