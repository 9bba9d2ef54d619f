"""What the laws need to know of a GPU: round rates in SI units, from its data sheet. Trees correct what they miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from presage.costs.vector import REACHED_BANDWIDTH, at_full_clock, reached

if TYPE_CHECKING:
    from presage.hardware.gpu import Gpu

__all__ = ["REACHED_BANDWIDTH", "REACHED_FLOPS", "REFERENCE_SMS", "Rates"]

REACHED_FLOPS = 0.8  # of the peak, by large products
REFERENCE_SMS = 132  # of the GPU whose waves features speak of, whichever the law is for
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
        flops = {kind: (reached(gpu) if kind == "fp32" else REACHED_FLOPS) * peak for kind, peak in gpu.peak.items()}
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
