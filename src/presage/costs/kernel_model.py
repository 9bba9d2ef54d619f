"""KernelModel: the seam between ops and seconds; calibrated models and closed-form laws are its two kinds.

The power limit: a kernel's energy is so much a FLOP (by type of number) and so much a byte, above what a busy GPU draws
anyway. Where the mean demand over a step exceeds the limit, tensor-core kernels take `1 + slope x excess / limit` times
as long; the excess falls as they do, and the point where both agree is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, Protocol, TypeAlias

import numpy as np

from presage.costs.rates import REACHED_BANDWIDTH, REACHED_FLOPS
from presage.graph import work
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Tensor
from presage.hardware import Gpu

# Standard deviation of a step's GPU time about its prediction: on the GPU that was calibrated, and on another.
CALIBRATED_ERROR, TRANSFERRED_ERROR = 0.04, 0.2
# How a time was found: a fitted model or law of the op's family, that of a similar op, FLOPs and bytes, no kernels.
Source: TypeAlias = Literal["model", "likeness", "roofline", "none"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """GPU time of one op at the full clock, with its work and power demand."""

    seconds: float
    launches: int  # kernels, copies and memsets
    family: str  # presage.graph.families.family(op.name)
    source: Source
    at_once: float = 1.0  # kernels that run concurrently: recurrent layers use several streams
    flops: float = 0.0  # as its law counts them; 0 where no law applies
    nbytes: float = 0.0  # bytes moved, as its law counts them
    watts: float = 0.0  # power demand at the full clock
    tensor_cores: bool = False  # slowed down by the power limit
    host: float = 0.0  # seconds in which the host copies pageable memory for it, before it starts


class KernelModel(Protocol):
    """Kernel times of one GPU."""

    @property
    def gpu(self) -> Gpu: ...

    @property
    def power(self) -> Power: ...

    @property
    def transferred(self) -> str:
        """The GPU its parameters were measured on, where that is another one; else empty."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the source of the times."""

    def op_times(self, graph: Graph) -> Sequence[OpTime]:
        """The time of every op of a graph, in order, at the full clock."""

    def error(self, graph: Graph) -> float:
        """Standard deviation of the logarithm of a step's GPU time about its prediction."""


def slowdown(power: Power, times: Sequence[OpTime], idle: float = 0.0) -> float:
    """Slow-down of tensor-core kernels by the power limit, in a step of these kernels and `idle` seconds."""
    tensor = np.array([t.tensor_cores for t in times], np.bool_)
    if not tensor.any():
        return 1.0
    seconds, demand = np.array([t.seconds for t in times]), np.array([t.watts for t in times])
    factor = 1.0
    for _ in range(30):
        now = seconds * np.where(tensor, factor, 1.0)
        energy = float((demand * seconds).sum()) + power.base * (idle + float((now - seconds).sum()))
        mean = energy / max(float(now.sum()) + idle, 1e-12)
        factor = 0.5 * factor + 0.5 * (1.0 + power.slope * max(0.0, mean - power.limit) / power.limit)
    return factor


def throttled(power: Power, times: Sequence[OpTime], idle: float = 0.0) -> list[OpTime]:
    """The times under the power limit."""
    factor = slowdown(power, times, idle)
    return [replace(t, seconds=t.seconds * factor) if t.tensor_cores else t for t in times]


@dataclass(frozen=True)
class Power:
    """Power limit of a GPU, and the energy of its work."""

    limit: float  # W
    base: float  # W, a busy GPU doing next to nothing
    per_byte: float  # J, of kernels that only move data
    per_flop: Mapping[str, float]  # J, by type of number (bf16, fp16, tf32, fp32, ...), attention, attention_backward
    slope: float  # how much longer tensor-core kernels take, per unit of excess demand over the limit
    per_worked_byte: float = 0.0  # J, of kernels that compute on every element: activations, normalisation, softmax

    def energy(self, flops: Mapping[str, float], nbytes: float) -> float:
        """Joules above the base, of FLOPs by type of number and bytes."""
        default = self.per_flop["bf16"]
        return nbytes * self.per_byte + sum(f * self.per_flop.get(kind, default) for kind, f in flops.items())

    def demand(self, seconds: float, flops: float, kind: str, moved: float, works: bool = False) -> float:
        """Watts of a kernel at the full clock."""
        bytes_cost = moved * (self.per_worked_byte if works else self.per_byte)
        energy = flops * self.per_flop.get(kind, self.per_flop["fp32"]) + bytes_cost
        return self.base + energy / max(seconds, 1e-9)

    def slowdown(self, energy: float, tensor: float, other: float) -> float:
        """How much longer tensor-core kernels take that have `tensor` seconds at the full clock in a step with `other`
        seconds of other kernels and of waiting."""
        if tensor <= 0.0 or self.base + energy / (tensor + other) <= self.limit:
            return 1.0
        # f - 1 = slope (base - limit + energy / (other + tensor f)) / limit, in x = other + tensor f
        c = self.slope / self.limit
        b = other + tensor + tensor * c * (self.base - self.limit)
        x = (b + sqrt(b * b + 4.0 * tensor * c * energy)) / 2.0
        return max(1.0, (x - other) / tensor)


SHORT = {"float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


# Kernels of an op that has no model, one after the other, by its source (FBGEMM's sparse_permute_2d.cu and
# sparse_async_cumsum.cu): a permutation is two scans of two kernels each, one for lengths and one for values.
FBGEMM_KERNELS = {
    "fbgemm::permute_2D_sparse_data": 6,
    "fbgemm::permute_1D_sparse_data": 6,
    "fbgemm::asynchronous_complete_cumsum": 2,
    "fbgemm::asynchronous_exclusive_cumsum": 2,
    "fbgemm::asynchronous_inclusive_cumsum": 2,
}


def roofline_time(graph: Graph, op: Op, gpu: Gpu, floor: float) -> OpTime:
    """Time of an op that has no model: its work at the rates kernels reach, after a start of each of its kernels."""
    launches = op.cost.launches if op.cost else FBGEMM_KERNELS.get(op.name, 1)
    starts = 1 if op.recorded is not None else launches  # what a trace recorded holds those of all its kernels
    seconds = starts * floor + least_seconds(graph, op, gpu, REACHED_FLOPS, REACHED_BANDWIDTH)
    return OpTime(seconds, launches, family(op.name), "roofline")


def least_seconds(graph: Graph, op: Op, gpu: Gpu, flops_share: float = 1.0, bytes_share: float = 1.0) -> float:
    """Every FLOP at this share of the peak rate, or every byte once through memory; at the peaks the least possible."""
    flops, moved = work.flops(graph, op), work.bytes_moved(graph, op).total
    return max(flops / (flops_share * rate(graph, op, gpu)), moved / (bytes_share * gpu.memory_bandwidth))


def rate(graph: Graph, op: Op, gpu: Gpu) -> float:
    """The peak FLOP/s of the units an op's products run on."""
    dtype = SHORT.get(_dtype(graph.inputs_of(op)), "fp32")
    if dtype == "fp32" and graph.flags.get("cudnn.allow_tf32" if "conv" in op.name else "allow_tf32"):
        dtype = "tf32"
    return gpu.peak.get(dtype) or gpu.peak["fp32"]


def _dtype(tensors: list[Tensor]) -> str:
    """The dtype of the first floating-point tensor."""
    return next((t.dtype for t in tensors if "float" in t.dtype), "float32")
