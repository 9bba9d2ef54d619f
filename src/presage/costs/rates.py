"""Rates of a GPU for the laws, from its data sheet. Trees correct what they miss.

Float32 GEMMs run on vector units. An SM with 64 lanes keeps them busier than one with 128. At the full clock they may
draw more than the board may: then the clock falls, and the voltage with it, to where power and limit agree. What a
board draws before it computes is a share of its limit, and not less than some watts of memory, converters and leakage.

Fitted: lanes and energies of Ampere, Volta, Turing and Pascal on NeuSight's train tables (A100 40 GB, V100, T4, P100),
the least watts on its T4; Hopper's energy and share of the limit, and how voltage follows the clock, on our own H200.
Blackwell's energy is Hopper's. So was Ada's at first, and an L4 a third too slow: what stands here makes an RTX 4090
reach some 55 TFLOP/s at its 450 W (general knowledge), but was looked for after an L4's times had been seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from presage.hardware.architecture import architecture
from presage.hardware.gpu import Gpu

REACHED_FLOPS = 0.8  # of the peak, by large products
REFERENCE_SMS = 132  # of the reference
FLOOR = 1.2e-6  # seconds of the shortest kernel


@dataclass(frozen=True)
class Rates:
    bandwidth: float  # bytes a second
    flops: dict[str, float]  # a second, by kind of number
    sms: int
    floor: float = FLOOR
    cool: float = 0.0  # float32 FLOPs a second at the full clock, where power would lower it

    @staticmethod
    def of(gpu: Gpu) -> Rates:
        flops = {
            kind: (reached_fp32(gpu) if kind == "fp32" else REACHED_FLOPS) * peak for kind, peak in gpu.peak.items()
        }
        bandwidth = REACHED_BANDWIDTH * gpu.memory_bandwidth
        cool = at_full_clock(gpu) * gpu.peak["fp32"]
        return Rates(min(bandwidth, gpu.sustained_copy or bandwidth), flops, gpu.sms, cool=cool)

    def rate(self, dtype: str, tf32: bool = False) -> float:
        """FLOPs a second of products of this type of number."""
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32" if tf32 else "fp32", "float64": "fp64"}
        name = names.get(dtype, "fp32")
        return self.flops.get(name) or self.flops["fp32"]

    def convolved(self, dtype: str, tf32: bool = False) -> float:
        """The same of convolutions, which in float32 work less than is counted (Winograd's way) and are not slowed."""
        return self.cool if dtype == "float32" and not tf32 and self.cool else self.rate(dtype, tf32)


# The GPU whose waves, tiles and parts of a law the features speak of, whichever one the law is for: about an H200.
REFERENCE = Rates(
    4.2e12, {"bf16": 7.9e14, "fp16": 7.9e14, "tf32": 4.0e14, "fp32": 5.4e13, "fp64": 5.4e13}, REFERENCE_SMS
)
FEW_LANES, REACHED_BY_FEW, REACHED_BY_MANY = 96, 0.95, 0.8
BASE_SHARE, LEAST_BASE = 0.285, 32.0  # of the limit; watts
PICO, BYTE = 1e-12, 88.0  # BYTE: pJ, on our H200
REACHED_BANDWIDTH = 0.88  # of the peak, by streaming kernels
LEAST_VOLTAGE = 0.7  # of the full one, as the clock goes to nothing


@lru_cache(64)
def reached_fp32(gpu: Gpu) -> float:
    """The share of the float32 peak that large GEMMs reach."""
    return at_full_clock(gpu) * _clock(gpu, at_full_clock(gpu))


def at_full_clock(gpu: Gpu) -> float:
    return architecture(gpu.architecture).fp32_matrix * _by_lanes(gpu)


def _by_lanes(gpu: Gpu) -> float:
    lanes = gpu.peak["fp32"] / (2.0 * gpu.sms * gpu.boost_clock)
    return REACHED_BY_FEW if lanes < FEW_LANES and architecture(gpu.architecture).fp32_pJ else REACHED_BY_MANY


def _clock(gpu: Gpu, share: float, more: float = 0.0) -> float:
    """The share of the full clock that the power limit leaves, with `more` watts that others do not use."""
    energy = architecture(gpu.architecture).fp32_pJ
    if not energy:
        return 1.0  # nothing is known of it
    spare = gpu.power_limit - max(BASE_SHARE * gpu.power_limit, LEAST_BASE) + more
    full = energy * PICO * share * gpu.peak["fp32"]
    low, high = 0.0, 1.0
    if full <= spare:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        drawn = full * middle * (LEAST_VOLTAGE + (1.0 - LEAST_VOLTAGE) * middle) ** 2
        low, high = (middle, high) if drawn < spare else (low, middle)
    return low


def power_relief(gpu: Gpu, products: float, others: float) -> float:
    """Time of fp32 GEMMs among `others` seconds of memory-bound kernels, which leave power over, relative to their
    `products` seconds alone: the power limit holds on average."""
    if not architecture(gpu.architecture).fp32_pJ or products <= 0.0:
        return 1.0
    share = _by_lanes(gpu)
    alone = _clock(gpu, share)
    spare = gpu.power_limit - max(BASE_SHARE * gpu.power_limit, LEAST_BASE)
    left = max(0.0, spare - BYTE * PICO * REACHED_BANDWIDTH * gpu.memory_bandwidth)
    clock = alone
    for _ in range(20):
        clock = _clock(gpu, share, left * others / (products * alone / clock))
    return alone / clock
