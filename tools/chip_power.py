"""Energies of a chip: from sustained loads on our H200; elsewhere from how far large products fall for good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chip_fits import Floats, simplex
from chip_rows import jobs

from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.costs.kernel_model import Power

IDLE_SHARE = 0.285  # of the limit: what a busy H200 draws that does next to nothing (200 of 700 W, pack)
LARGE = 8192
FITTED = ("bf16", "fp8", "attention", "attention_backward", "byte", "worked_byte", "slope")
START = (0.9, 0.48, 0.95, 1.2, 72.0, 86.0, 0.9)
PICO = 1e-12


@dataclass(frozen=True)
class Load:
    """At the full clock: seconds (the shortest seen, or the first few calls), FLOPs and bytes."""

    seconds: float
    kind: str = ""
    flops: float = 0.0
    nbytes: float = 0.0


LOADS = {
    "gemm_bf16": Load(1.418e-3, "bf16", 2.0 * LARGE**3, 4.0e8),
    "gemm_fp8": Load(0.749e-3, "fp8", 2.0 * LARGE**3, 2.7e8),
    "attention": Load(0.954e-3, "attention", 5.498e11, 5e8),
    "attention_back": Load(3.05e-3, "attention_backward", 1.374e12, 1e9),
    "copy": Load(0.2565e-3, "", 0.0, 2.0**30), "norm": Load(0.1562e-3, "worked", 0.0, 2.0**29),
    "gelu": Load(0.300e-3, "worked", 0.0, 2.0**30),
}  # fmt: skip


def predicted(p: Mapping[str, float], names: list[str], pause: float, limit: float) -> float:
    """How much longer tensor-core kernels take among these loads and pauses."""
    parts = [LOADS[n] for n in names]
    energies = {k: p[k] * PICO for k in FITTED[:4]}
    power = Power(limit, IDLE_SHARE * limit, 0.0, energies, p["slope"])
    bytes_cost = sum(x.nbytes * p["worked_byte" if x.kind == "worked" else "byte"] * PICO for x in parts)
    tensor = sum(x.seconds for x in parts if x.flops)
    other = sum(x.seconds for x in parts if not x.flops)
    energy = bytes_cost + sum(x.flops * energies[x.kind] for x in parts if x.flops)
    factor = 1.0
    for _ in range(20):  # pauses are a share of the time, which grows with the factor
        busy = tensor * factor + other
        factor = power.slowdown(energy, tensor, other + busy * pause / (1 - pause))
    return factor


def fit_power(folder: Path) -> dict[str, float]:
    found = jobs(folder, "sustained")
    limit = float(found["limit_watts"])
    rows = [
        r for r in found["loads"] if r["load"] in LOADS and LOADS[r["load"]].flops and set(r["others"]) <= set(LOADS)
    ]
    seen = np.array([r["ms"] * 1e-3 / LOADS[r["load"]].seconds for r in rows])

    def told(logs: Floats) -> Floats:
        p = dict(zip(FITTED, np.exp(logs), strict=True))
        return np.array([predicted(p, [r["load"], *r["others"]], r["pause"], limit) for r in rows])

    best = simplex(lambda logs: float(((told(logs) - seen) ** 2).sum()), np.log(START), rounds=2, calls=800)
    miss = np.abs(told(best) / seen - 1)
    print(f"power: median {np.median(miss):.2%}, most {miss.max():.2%} of {len(rows)} mixes, slowdown {seen.max():.3f}")
    p = dict(zip(FITTED, np.exp(best).tolist(), strict=True))
    return _file(p["slope"], p["byte"], p)


def _file(slope: float, byte: float, p: Mapping[str, float]) -> dict[str, float]:
    kinds = {k: p[k] for k in FITTED[:4]}
    made = {
        "fp16": p["bf16"],
        "tf32": 2.2 * p["bf16"],
        "fp32": 11.0 * p["bf16"],
        "mxfp8": p["fp8"],
        "nvfp4": p["fp8"] / 2,
    }
    return {
        "base_share": IDLE_SHARE,
        "slope": slope,
        "byte_pJ": byte,
        **{f"{k}_pJ": v for k, v in (kinds | made).items()},
    }


def flop_energy(chip: ClosedFormKernels, own: dict[str, Any], lasting: float) -> dict[str, float]:
    """Energies at which large products take `lasting` times as long for good; all types of number move together."""
    limit, kind = chip.gpu.power_limit, "bf16" if "bf16" in chip.gpu.peak else "fp16"
    seconds = chip.gemm(GemmShape(LARGE, LARGE, LARGE), kind)
    demand = ((lasting - 1) / own["slope"] * limit + limit * (1 - own["base_share"])) * lasting  # watts above the base
    bf16 = (demand * seconds - 6.0 * LARGE**2 * own["byte_pJ"] * PICO) / (2.0 * LARGE**3) / PICO
    return scaled_energy(own, bf16 / own["bf16_pJ"])


def scaled_energy(own: dict[str, Any], scale: float, kinds: tuple[str, ...] = ()) -> dict[str, float]:
    """The same chip with FLOPs that take so many times as much; of some types of number alone, where they are given."""
    if kinds:
        return {k: v * scale if k.removesuffix("_pJ") in kinds else v for k, v in own.items()}
    return {k: v * scale if k.endswith("_pJ") and k != "byte_pJ" else v for k, v in own.items()}
