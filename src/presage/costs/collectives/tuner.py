"""What NCCL thinks a protocol takes, for it takes the one it thinks fastest, and is at times wrong.

Its constants are in NCCL's source, src/graph/tuning.cc: microseconds of start and of a hop, the rates of LL, the
shares of LL128 and NVLS. The rate of all rings together is the links times what NCCL counts for one, and NVLS's 5/6
and ranks - 1 of ranks are general knowledge of it, not looked up. Where the switch comes too early or too late the
measured curves jump, at the sizes these constants say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from presage.costs.collectives.paths import Path

__all__ = ["Line", "crossings", "estimate"]

START = {"ll": 6.6, "ll128": 14.0, "simple": 8.4, "nvls": 25.0}
HOP = {"ll": 0.6, "ll128": 1.9, "simple": 3.4, "nvls": 0.0}
LL128_SHARE = 0.92
LL_SHARE = 0.5
NVLS_SHARE = 5 / 6
SMALL = 16384.0  # bytes to one peer that still go by LL


@dataclass(frozen=True, slots=True)
class Line:
    """Thought time, in microseconds."""

    latency: float
    per_byte: float


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s that NCCL counts with on one generation of NVLink: a ring, LL at most, and the share of it NVLS reaches."""

    ring: float
    ll: float
    nvls: float


SPEEDS = {
    "nvlink3": Speed(ring=235.0, ll=87.7, nvls=0.85),
    "nvlink4": Speed(ring=370.0, ll=141.0, nvls=0.85),
    "nvlink5": Speed(ring=740.0, ll=282.0, nvls=0.74),
}


def estimate(fabric: str, protocol: str, path: Path, ranks: int) -> Line | None:
    """A protocol's time within one domain, as NCCL estimates it; None where its constants are not known here."""
    if protocol == "direct_ll":
        return Line(0.0, path.own or 1.0)
    if protocol == "direct":
        return Line(SMALL, 0.0)
    speed = SPEEDS.get(fabric)
    if speed is None:
        return None
    if protocol == "nvls":
        return Line(START["nvls"], 1e-3 / (speed.nvls * speed.ring * NVLS_SHARE * (ranks - 1) / ranks))
    rate = {"ll": min(speed.ll, speed.ring * LL_SHARE), "ll128": speed.ring * LL128_SHARE, "simple": speed.ring}
    return Line(START[protocol] + HOP[protocol] * path.hops[0], 1e-3 * path.share[0] / rate[protocol])


def crossings(lines: Sequence[Line]) -> list[float]:
    """Sizes at which two lines meet."""
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.per_byte != b.per_byte]
    at = ((b.latency - a.latency) / (a.per_byte - b.per_byte) for a, b in pairs)
    return sorted({m for m in at if m > 0})
