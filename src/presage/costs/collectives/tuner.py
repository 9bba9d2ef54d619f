"""NCCL's own estimate of a protocol: it takes the one it estimates to be fastest, and is at times wrong.

Constants are those of NCCL's source, src/graph/tuning.cc: microseconds of start and of a hop, the rates of LL, the
shares of LL128 and NVLS. The rate of all rings together is the links times what NCCL counts for one, and NVLS's 5/6
and ranks - 1 of ranks are general knowledge of it, not looked up. Where the switch comes too early or too late the
measured curves jump, at the sizes these constants say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from presage.costs.collectives.paths import CollectivePath

START = {"ll": 6.6, "ll128": 14.0, "simple": 8.4, "nvls": 25.0}
HOP = {"ll": 0.6, "ll128": 1.9, "simple": 3.4, "nvls": 0.0}
LL128_SHARE = 0.92
LL_SHARE = 0.5
NVLS_SHARE = 5 / 6
SMALL = 16384.0  # bytes to one peer that still go by LL


@dataclass(frozen=True, slots=True)
class TunerEstimate:
    """NCCL's estimate of a protocol's time, in microseconds."""

    latency: float
    per_byte: float


@dataclass(frozen=True, slots=True)
class NvlinkSpeed:
    """GB/s that NCCL assumes for one generation of NVLink: a ring, LL at most, and the NVLS share of a ring."""

    ring: float
    ll: float
    nvls: float


SPEEDS = {
    "nvlink3": NvlinkSpeed(ring=235.0, ll=87.7, nvls=0.85),
    "nvlink4": NvlinkSpeed(ring=370.0, ll=141.0, nvls=0.85),
    "nvlink5": NvlinkSpeed(ring=740.0, ll=282.0, nvls=0.74),
}


def tuner_estimate(fabric: str, protocol: str, path: CollectivePath, ranks: int) -> TunerEstimate | None:
    """A protocol's time within one domain, as NCCL estimates it; None where its constants are not known here."""
    speed = SPEEDS.get(fabric)
    if speed is None:
        return None
    if protocol == "direct_ll":
        return TunerEstimate(0.0, path.own or 1.0)
    if protocol == "direct":
        return TunerEstimate(SMALL, 0.0)
    if protocol == "nvls":
        return TunerEstimate(START["nvls"], 1e-3 / (speed.nvls * speed.ring * NVLS_SHARE * (ranks - 1) / ranks))
    rate = {"ll": min(speed.ll, speed.ring * LL_SHARE), "ll128": speed.ring * LL128_SHARE, "simple": speed.ring}
    return TunerEstimate(START[protocol] + HOP[protocol] * path.hops[0], 1e-3 * path.share[0] / rate[protocol])


def crossings(lines: Sequence[TunerEstimate]) -> list[float]:
    """Sizes at which two lines meet."""
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.per_byte != b.per_byte]
    at = ((b.latency - a.latency) / (a.per_byte - b.per_byte) for a, b in pairs)
    return sorted({m for m in at if m > 0})
