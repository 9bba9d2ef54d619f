"""What serving engines add to a kernel, used where a published table of their ops is scored.

A row of such a table is an op as an engine runs it. Law: the engine's floor, and the kernel at the clock that is left
when a collector repeats it. Trees correct it by shape and engine. An engine that is not known is the median of those of
its version, framework, or all. The file (data/GPU/tables.npz) is shared with the corrections of
`presage.costs.corrections` that come from the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.corrections import TableCorrection
from presage.costs.kernel_files import SHIPPED, TABLES, read_arrays, write_arrays
from presage.costs.rates import Rates
from presage.costs.trees import Trees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
HEATED = 1.2e-3  # seconds of a kernel under whose repeats the clock half falls: the H200's table beside our bursts
SERVING_TILE = 128
SERVING_TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (128, 192))


@dataclass(frozen=True)
class ServingOverhead:
    """The engines of one kind of kernel on one GPU."""

    kernel: str  # gemm or attention
    collectors: tuple[str, ...]  # framework, version and code path
    floors: tuple[float, ...]  # seconds, by collector
    heat: float  # how much longer the longest kernels take
    trees: Trees

    def base(self, which: Ints, kernel: Floats) -> Floats:
        """The law, for rows of these collectors."""
        return np.asarray(np.array(self.floors)[which] + heated(kernel, self.heat))

    def seconds(self, sizes: Ints, kernel: Floats, rates: Rates, by: Sequence[Sequence[str]]) -> Floats:
        """Seconds of shapes whose kernels take `kernel` seconds: the median of the engines that timed each."""
        codes = [[c for name in names for c in self.standing_for(name)] for names in by]
        shape = np.repeat(np.arange(len(sizes)), [len(c) for c in codes])
        which = np.array([c for some in codes for c in some], np.int64)
        x = np.column_stack([serving_features(self.kernel, sizes, kernel, rates)[shape], self.codes(which)])
        seconds = self.base(which, kernel[shape]) * np.exp(self.trees.predict(x.astype(np.float32)))
        return medians(seconds, shape, len(sizes))

    def standing_for(self, name: str) -> tuple[int, ...]:
        """Places of the collectors that tell what this one takes."""
        if name in self.collectors:
            return (self.collectors.index(name),)
        words = name.split()
        for some in (words[:2], words[:1]):
            alike = [i for i, c in enumerate(self.collectors) if some and c.split()[: len(some)] == some]
            if alike:
                return tuple(alike)
        return tuple(range(len(self.collectors)))

    def codes(self, which: Ints) -> Floats:
        """Collector and framework as numbers."""
        frameworks = sorted({c.split()[0] for c in self.collectors})
        of = np.array([frameworks.index(c.split()[0]) for c in self.collectors], np.float64)
        return np.column_stack([which.astype(np.float64), of[which]])


def heated(seconds: Floats, heat: float) -> Floats:
    """What collectors see: their repeats of long kernels lower the clock."""
    return np.asarray(seconds * (1 + heat * seconds**2 / (seconds**2 + HEATED**2)))


def medians(values: Floats, of: Ints, count: int) -> Floats:
    """By `of`, which has all of 0 to count."""
    order = np.lexsort((values, of))
    first = np.searchsorted(of[order], np.arange(count + 1))
    sorted_, n = values[order], np.diff(first)
    return np.asarray((sorted_[first[:-1] + (n - 1) // 2] + sorted_[first[:-1] + n // 2]) / 2)


def serving_features(kernel: str, sizes: Ints, seconds: Floats, rates: Rates) -> Floats:
    """Features of shapes, a row each."""
    return np.array(SERVING_FEATURES[kernel](sizes, seconds, rates), np.float64).T


def _serving_gemm(sizes: Ints, seconds: Floats, rates: Rates) -> list[Floats]:
    m, n, k = sizes.T.astype(np.float64)
    flops, moved = 2 * m * n * k, 2 * (m * k + k * n + m * n)
    out = [
        *_logs(m, n, k, flops, moved, flops / moved, m * n, m / n, n * k, m * k, k / np.minimum(m, n)),
        *_logs(seconds, flops / seconds, moved / seconds, moved / rates.bandwidth / seconds),
        m % 2, m % 8, m % 64, m % SERVING_TILE, np.ceil(m / SERVING_TILE) * SERVING_TILE / m,
    ]  # fmt: skip
    for rows, columns in SERVING_TILES:
        waves = np.ceil(m / rows) * np.ceil(n / columns) / rates.sms
        out += [waves / np.ceil(waves), np.log(np.ceil(waves))]
    return out


def _serving_attention(sizes: Ints, seconds: Floats, rates: Rates) -> list[Floats]:
    b, s, h, kv, d, window = sizes.T.astype(np.float64)
    cut = (window > 0) & (window < s)
    seen = np.where(cut, window, s)
    blocks = np.ceil(s / SERVING_TILE)
    longest = np.where(cut, np.minimum(blocks, np.ceil(seen / SERVING_TILE) + 2), blocks)
    tiles = (blocks - longest) * longest + longest * (longest + 1) / 2
    waves = b * h * blocks / rates.sms
    tile = 4.0 * SERVING_TILE * SERVING_TILE * d * rates.sms / rates.rate("bfloat16")
    work = np.maximum(longest * tile, b * h * tiles * tile / rates.sms)
    queries, keys = 4 * b * s * h * d / rates.bandwidth, 4 * b * s * kv * d / rates.bandwidth
    return [
        *_logs(b, s, h, kv, seen, h / kv, b * h, b * s, b * s * kv * d, b * s * h * d, work, queries, keys, waves),
        *_logs(seconds, work / seconds, longest * tile / work, s / seen, work + queries + keys),
        d, cut.astype(np.float64), waves / np.ceil(waves), s % SERVING_TILE, b * s * (h + 2 * kv),
    ]  # fmt: skip


def _logs(*columns: Floats) -> list[Floats]:
    return [np.log(np.maximum(c, 1e-30)) for c in columns]


SERVING_FEATURES: Mapping[str, Callable[[Ints, Floats, Rates], list[Any]]] = {
    "gemm": _serving_gemm,
    "attention": _serving_attention,
}


# ---- the file


@lru_cache(8)
def serving_overheads(gpu: str) -> dict[str, ServingOverhead]:
    """What engines add on a GPU, by family; none where no table timed it."""
    path = SHIPPED / gpu / TABLES
    if not path.exists():
        return {}
    about, arrays = read_arrays(path)
    return {
        f: ServingOverhead(
            f, tuple(e["collectors"]), tuple(e["floors"]), e["heat"], Trees.from_arrays(arrays, f"engine.{f}")
        )
        for f, e in about["engines"].items()
    }


def save_tables(
    path: Path, own: Mapping[str, TableCorrection], engines: Mapping[str, ServingOverhead], source: Mapping[str, Any]
) -> None:
    """Write what tables show of a GPU: corrections of its kernels, and what engines add."""
    arrays: dict[str, Any] = {}
    for kind, models in (("own", own), ("engine", engines)):
        for name, model in models.items():
            arrays |= model.trees.to_arrays(f"{kind}.{name}")
    overheads = {name: {"collectors": e.collectors, "floors": e.floors, "heat": e.heat} for name, e in engines.items()}
    about = {"own": {name: list(o.ops) for name, o in own.items()}, "engines": overheads, "source": dict(source)}
    write_arrays(path, arrays, about)
