"""Measure what large tensors cost the host of this machine: ops that fill them, and data loaders that pass them on.

    python tools/measure_host_memory.py > RUN.json

Ops: microseconds of one that writes a new host tensor, by its bytes. Loaders: milliseconds a batch where nothing but
the loader is at work; the dataset hands out images made once.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

IMAGE = 3 * 224 * 224 * 4  # bytes
MIB = (0.25, 1, 4, 16, 32, 64, 128)
LOADERS = (  # workers, images a batch, pinned
    (0, 64, False), (0, 256, False), (8, 16, True), (8, 64, True), (8, 256, True), (12, 256, True),
    (8, 64, False), (8, 256, False), (4, 64, True), (2, 64, True),
)  # fmt: skip


class Images(Dataset[Any]):
    def __init__(self) -> None:
        self.images = torch.randn(64, 3, 224, 224)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> Any:
        return self.images[i % 64], i % 1000


def main() -> None:
    ops = [
        {"op": name, "bytes": int(mib * (1 << 20)), "us": [_microseconds(op) for _ in range(7)]}
        for mib in MIB
        for name, op in _ops(int(mib * (1 << 18)))
    ]
    loaders = [
        {"workers": w, "batch": b, "bytes": b * IMAGE, "pinned": pinned, **_loaded(w, b, pinned)}
        for w, b, pinned in LOADERS
    ]
    found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "ops": ops, "loaders": loaders}
    print(json.dumps(found))


def _ops(n: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    half, rows = torch.randn(n // 2), np.ones((n // 4096, 4096), np.float32)
    whole, places = torch.from_numpy(rows), np.random.randint(0, len(rows), len(rows))
    yield "cat", partial(torch.cat, [half, half])
    yield "mul", partial(torch.mul, whole, 2)
    yield "clone", whole.clone
    yield "numpy index", partial(rows.__getitem__, places)
    yield "randn", partial(torch.randn, n)
    yield "stack", partial(torch.stack, [*half.view(64, -1), *half.view(64, -1)])


def _microseconds(op: Callable[[], Any]) -> float:
    start = time.perf_counter()
    op()
    return round(1e6 * (time.perf_counter() - start), 1)


def _loaded(workers: int, batch: int, pinned: bool) -> dict[str, float]:
    ends, start = [], time.perf_counter()
    for k, _ in enumerate(DataLoader(Images(), batch, shuffle=True, num_workers=workers, pin_memory=pinned)):
        ends.append(time.perf_counter())
        if k > 20 and (ends[-1] - start > 6 or k > 120):
            break
    each = 1e3 * np.diff(ends[3 * workers if len(ends) > 5 * workers else 4 :])
    return {"median_ms": round(statistics.median(each), 3), "mean_ms": round(float(each.mean()), 3)}


if __name__ == "__main__":
    main()
