"""The power limit: a step that would draw more than the GPU may runs its compute-bound kernels slower.

A kernel's demand is its energy (so much a FLOP by type of number, so much a byte) over its time at the full clock,
above what the GPU draws anyway. Where the average demand over the step exceeds the limit, kernels on tensor cores take
`1 + slope x excess / limit` times as long; the excess falls as they do, and the point where both agree is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Power", "fit_power", "slowdown"]


@dataclass(frozen=True)
class Power:
    limit: float  # W
    base: float  # W, a busy GPU doing next to nothing
    per_byte: float  # J, of kernels that only move
    per_worked_byte: float  # J, of kernels that work on every element: activations, normalisation, softmax
    per_flop: dict[str, float]  # J, by type of number: bfloat16, float16, tf32, float32
    slope: float  # how much longer tensor-core kernels take, per unit of excess demand over the limit

    def demand(self, seconds: float, flops: float, kind: str, moved: float, works: bool = False) -> float:
        """Watts of a kernel at the full clock."""
        bytes_cost = moved * (self.per_worked_byte if works else self.per_byte)
        energy = flops * self.per_flop.get(kind, self.per_flop["float32"]) + bytes_cost
        return self.base + energy / max(seconds, 1e-9)


TENSOR_KINDS = ("bfloat16", "float16", "tf32")


def fit_power(table: dict[str, Any]) -> Power:
    """From the pack's sustained loads. `slope` and the energies of tensor-core FLOPs come from the large product mixed
    with copies and pauses: how long it takes at each mean demand."""
    limit, loads = float(table["limit_watts"]), table["loads"]
    alone = {r["load"]: r for r in loads if not r["copies"] and not r["pause"]}
    base = float(alone["gemm_bf16_small"]["watts"]) if "gemm_bf16_small" in alone else 2 * float(table["idle_watts"])
    copy = alone["copy"]
    per_byte = (copy["watts"] - base) / (copy["bytes"] / copy["ms"] * 1e3)
    worked = [
        (min(r["watts"], limit) - base) / (r["bytes"] / r["ms"] * 1e3) for r in (alone["gelu"], alone["layer_norm"])
    ]
    per_flop = {"float32": _energy(alone["gemm_fp32"], min(limit, alone["gemm_fp32"]["watts"]), base, per_byte)}
    slope = 0.0
    for load, kind in (("gemm_bf16", "bfloat16"), ("gemm_tf32", "tf32")):
        demand, slope_here = _mixed(loads, load, copy["watts"], base, limit)
        per_flop[kind] = _energy({**alone[load], "ms": _full_clock(loads, load)}, demand, base, per_byte)
        slope = slope_here if kind == "bfloat16" else slope
    per_flop["float16"] = per_flop["bfloat16"]
    return Power(limit, base, per_byte, sum(worked) / len(worked), per_flop, slope)


def _energy(row: dict[str, Any], watts: float, base: float, per_byte: float) -> float:
    seconds = row["ms"] * 1e-3
    return float(((watts - base) * seconds - row["bytes"] * per_byte) / row["flops"])


def _full_clock(loads: Sequence[dict[str, Any]], name: str) -> float:
    """Milliseconds a call where there is power to spare."""
    return float(min(r["ms"] for r in loads if r["load"] == name))


def _mixed(
    loads: Sequence[dict[str, Any]], name: str, copy_watts: float, base: float, limit: float
) -> tuple[float, float]:
    """Demand of the load alone, and the slope: the pair that explains its times among copies and pauses best."""
    rows = [r for r in loads if r["load"] == name]
    full = _full_clock(loads, name)
    times = np.array([r["ms"] / full for r in rows])
    busy = np.array([r["ms"] / (r["ms"] + r["others_ms"]) * (1 - r["pause"]) for r in rows])
    paused = np.array([r["pause"] for r in rows])
    best = (np.inf, 0.0, 0.0)
    for demand in np.arange(limit, 1.6 * limit, 5.0):
        mean = busy * demand + (1 - busy - paused) * copy_watts + paused * base
        excess = np.maximum(mean - limit, 0) / limit
        slope = float((excess * (times - 1)).sum() / max((excess**2).sum(), 1e-9))
        miss = float(((1 + slope * excess - times) ** 2).sum())
        best = min(best, (miss, float(demand), slope))
    return best[1], best[2]


def slowdown(
    power: Power, demand: npt.NDArray[Any], seconds: npt.NDArray[Any], tensor: npt.NDArray[Any], idle: float
) -> float:
    """How much longer tensor-core kernels take in a step of these kernels and so many idle seconds."""
    if not tensor.any():
        return 1.0
    factor = 1.0
    for _ in range(30):
        now = seconds * np.where(tensor, factor, 1.0)
        energy = float((demand * seconds).sum()) + power.base * (idle + float((now - seconds).sum()))
        mean = energy / max(float(now.sum()) + idle, 1e-12)
        factor = 0.5 * factor + 0.5 * (1.0 + power.slope * max(0.0, mean - power.limit) / power.limit)
    return factor
