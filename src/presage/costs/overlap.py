"""Contention between a kernel and a collective that run concurrently on one GPU.

A collective takes a multiprocessor for each of its `n` channels and a share of the memory's bandwidth. With `f` the
share of multiprocessors taken, `d` the share of bandwidth drawn, `m` the share the kernel draws by itself and `w` the
waves of tiles the kernel works in, the kernel takes so many times as long:

    products    1 + min(most, hypot(tail n/(n+1) / w, f/(1-f)))          + (base + press m^bend) d/(1-d)
    attention   1 + attention f/(1-f)                                    + the same
    streams     1 + streams f/(1-f) min(1, (1-m)/(1-full))               + the same
    scattered   1 + scattered f/(1-f)                                    + scattered_press d/(1-d)

A product whose tiles no longer fit into its waves does a part of them again: `tail` waves, however few channels there
are. A stream that keeps the memory busy does not miss multiprocessors. The collective slows where its channels,
waiting longer for a busy memory, can no longer keep their pace, `x` of the most that a channel can:

    ((1 + x^8 (1 + delay m^delay_bend)^8) / (1 + x^8))^(1/8)

and then draws less by as much. Constants are in `data/h200/overlap.toml`, made by `tools/fit_overlap.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from presage.errors import PresageError
from presage.files.reading import shipped_toml
from presage.hardware.gpu import Gpu

Kind: TypeAlias = Literal["products", "attention", "streams", "scattered"]
KNEE = 8  # how sharply a channel's pace bends at its limit
MOST_DRAWN = 0.9  # of the bandwidth, whatever a collective asks for
REACHED = 0.88  # of the data sheet's bandwidth, by streaming kernels, where it was not measured
MOST_TAKEN = 0.75  # of the multiprocessors
TILE = 32_768  # results that a multiprocessor works on at a time: 256 x 128 and their like
KINDS: dict[str, Kind] = {
    "matrix multiply": "products",
    "convolution": "products",
    "recurrent": "products",
    "attention": "attention",
    "embedding": "scattered",
    "index": "scattered",
}


@dataclass(frozen=True, slots=True)
class Contention:
    compute: float  # a kernel takes this many times as long while the collective runs beside it
    collective: float  # and the collective this many times as long


@dataclass(frozen=True, slots=True)
class OverlapLaw:
    """Fitted constants of the overlap law."""

    tail: float  # waves
    most: float  # what multiprocessors cost a product at most: all its work again
    attention: float
    streams: float
    full: float  # share of bandwidth up to which a stream misses every multiprocessor
    scattered: float
    scattered_press: float
    base: float
    press: float
    bend: float
    delay: float
    delay_bend: float
    pace: float  # the most that a channel draws, over its multiprocessor's even share of the bandwidth


def kind_of(family: str) -> Kind:
    """How kernels of a family (presage.graph.families) take it."""
    return KINDS.get(family, "streams")


def waves(gpu: Gpu, results: float) -> float:
    """Waves of tiles of a GEMM or convolution with this many outputs."""
    return float(max(1, math.ceil(results / TILE / gpu.sms)))


def contention(
    gpu: Gpu,
    *,
    bytes_per_second: float,
    channels: int,
    computes: bool,
    memory_share: float,
    waves: float = math.inf,
    kind: Kind | None = None,
    traffic: float = 3.0,
) -> Contention:
    """Slow-down of a kernel and a collective that run concurrently; the collective alone receives `bytes_per_second`.

    `memory_share`: of the peak bandwidth, what the kernel draws by itself. `waves`: see `waves()`; without it a
    product is taken for a long one. `kind`: by family, where known, else by `computes`. `traffic`: bytes through
    memory for each received: 3 for rings, which write, read back and add the user's own; 2 for NVLS.
    """
    reached = gpu.sustained_copy or REACHED * gpu.memory_bandwidth
    kernel_kind = kind or ("products" if computes else "streams")
    held = min(max(memory_share, 0.0) * gpu.memory_bandwidth / reached, 1.0)
    drawn = max(bytes_per_second, 0.0) * traffic / reached
    return slowdowns(law(), kernel_kind, gpu.sms, channels, drawn, held, waves)


def slowdowns(
    law: OverlapLaw, kind: Kind, sms: int, channels: int, drawn: float, held: float, waves: float
) -> Contention:
    """`drawn` and `held`: shares of the bandwidth that streaming kernels reach, of the collective and of the kernel."""
    if channels <= 0:
        return Contention(1.0, 1.0)
    taken = min(channels / sms, MOST_TAKEN)
    pace = drawn / channels * sms / law.pace  # over the most a channel can
    slower = _slower(pace, 1 + law.delay * held**law.delay_bend)
    left = min(drawn / slower, MOST_DRAWN)
    share = _lost(law, kind, taken / (1 - taken), channels, held, waves)
    return Contention(1 + share + _pressed(law, kind, held) * left / (1 - left), slower)


def _slower(pace: float, delayed: float) -> float:
    x = pace**KNEE
    return float(((1 + x * delayed**KNEE) / (1 + x)) ** (1 / KNEE))


def _lost(law: OverlapLaw, kind: Kind, taken: float, channels: int, held: float, waves: float) -> float:
    """Slow-down by SMs taken. `taken`: over the SMs left."""
    if kind == "products":
        return min(law.most, math.hypot(law.tail * channels / (channels + 1) / waves, taken))
    if kind == "attention":
        return law.attention * taken
    if kind == "scattered":
        return law.scattered * taken
    return law.streams * taken * min(1.0, (1 - held) / (1 - law.full))


def _pressed(law: OverlapLaw, kind: Kind, held: float) -> float:
    """Slow-down by the collective's bandwidth, per unit of its share over the share left."""
    if kind == "scattered":
        return law.scattered_press
    return float(law.base + law.press * held**law.bend)


@cache
def _file() -> dict[str, Any]:
    return shipped_toml("h200/overlap.toml")


@cache
def law() -> OverlapLaw:
    """As fitted on an H200; other GPUs by their multiprocessors and bandwidth."""
    return OverlapLaw(**_file()["law"])


def start_wait(running: float, kind: Kind, high_priority: bool = False) -> float:
    """Seconds that a collective, ready at any moment of a kernel that runs so many seconds, waits for its first block.

    A full GPU has no room before blocks of the kernel end. Those of products and attention all last to its end; those
    of other kernels end all the time, but only a stream of high priority gets ahead of the kernel's own next ones.
    """
    shares: dict[str, float] = _file()["start"]["high" if high_priority else "low"]
    return running * shares.get(kind, shares["streams"])


def channels(gpu: Gpu, way: Literal["ring", "nvls", "pairs"] = "ring") -> int:
    """Channels NCCL uses for a large collective within a node, as observed; small ones have fewer.

    `pairs`: sends and receives, so all-to-all too. GPUs without a fast link between them get as many as PCIe can use.
    """
    table: dict[str, dict[str, int]] = _file()["channels"]
    if gpu.link is None:
        return table["pcie"][way]
    if gpu.architecture not in table:
        raise PresageError(f"no channel count known for {gpu.name} ({gpu.architecture}); give the number of channels")
    return table[gpu.architecture][way]
