"""Cache and power of a GPU, fitted to a calibration pack's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.cache import Cache
from presage.costs.kernel_model import Power


def fit_cache(rows: Sequence[dict[str, Any]]) -> Cache:
    """From the pack's table: microseconds to read a tensor again, by its bytes and the bytes between."""
    size, between = (np.array([float(r[k]) for r in rows]) for k in ("bytes", "between"))
    us, read = np.array([float(r["us"]) for r in rows]), np.array([r["how"] == "read" for r in rows])
    share = np.zeros(len(rows))
    for one in set(zip(size, read, strict=True)):
        same = (size == one[0]) & (read == one[1])
        low, high = us[same & (between == 0)].mean(), np.median(us[same & (between >= 64 << 20)])
        share[same] = np.clip((us[same] - low) / max(high - low, 1e-9), 0, 1)
    return min(_candidates(), key=lambda c: _misfit(c, size, between, read, share))


def _candidates() -> list[Cache]:
    mega = 2.0**20
    return [
        Cache(kept * mega, lost * mega, weight)
        for kept in range(2, 30, 2)
        for lost in range(24, 64, 2)
        if lost > kept
        for weight in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    ]


def _misfit(c: Cache, size: npt.NDArray[Any], between: npt.NDArray[Any], read: npt.NDArray[Any], share: Any) -> float:
    distance = between * np.where(read, c.read_weight, 1.0)
    guess = np.clip((distance + size / 2 - c.kept) / (c.lost - c.kept), 0, 1)
    return float(((guess - share) ** 2).sum())


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


# ---- How near a GPU's limits ops run: the least time their FLOPs and bytes allow, over the time they take.
