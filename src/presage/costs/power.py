"""The power limit: a step that would draw more than the GPU may runs its tensor-core kernels slower.

A kernel's energy is so much a FLOP (by type of number) and so much a byte, above what a busy GPU draws anyway. Where
the mean demand over the step exceeds the limit, tensor-core kernels take `1 + slope x excess / limit` times as long;
the excess falls as they do, and the point where both agree is the root of a quadratic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np


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


def fit_power(table: dict[str, Any]) -> Power:
    """From the pack's sustained loads. `slope` and the energies of tensor-core FLOPs come from the large GEMM mixed
    with copies and pauses: how long it takes at each mean demand."""
    limit, loads = float(table["limit_watts"]), table["loads"]
    alone = {r["load"]: r for r in loads if not r["copies"] and not r["pause"]}
    base = float(alone["gemm_bf16_small"]["watts"]) if "gemm_bf16_small" in alone else 2 * float(table["idle_watts"])
    copy = alone["copy"]
    per_byte = (copy["watts"] - base) / (copy["bytes"] / copy["ms"] * 1e3)
    worked = [
        (min(r["watts"], limit) - base) / (r["bytes"] / r["ms"] * 1e3) for r in (alone["gelu"], alone["layer_norm"])
    ]
    per_flop = {"fp32": _energy(alone["gemm_fp32"], min(limit, alone["gemm_fp32"]["watts"]), base, per_byte)}
    slope = 0.0
    for load, kind in (("gemm_bf16", "bf16"), ("gemm_tf32", "tf32")):
        demand, slope_here = _mixed(loads, load, copy["watts"], base, limit)
        per_flop[kind] = _energy({**alone[load], "ms": _full_clock(loads, load)}, demand, base, per_byte)
        slope = slope_here if kind == "bf16" else slope
    per_flop["fp16"] = per_flop["bf16"]
    return Power(limit, base, per_byte, per_flop, slope, sum(worked) / len(worked))


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
