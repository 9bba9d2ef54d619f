"""The time of a collective from the facts of its links.

Every protocol of every way to do it (`paths`) takes its start, its hops one after another, its bytes through the
slowest tier, a copy of what stays at home, and a ramp, for a link comes up to its rate over decades of sizes:

    t = start + hop x hops x latency + wire x u + own x home + ramp x sqrt(u x latency),   u = bytes sent / bandwidth

The five coefficients of a protocol are never negative, so time never falls with bytes. They are fitted on measured
tables (`fit`), for each generation of links (a fabric) and for any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import Group
from presage.costs.collectives.paths import Path, paths, reach, width
from presage.costs.collectives.tuner import Line, crossings, estimate
from presage.hardware import NetworkLink, Platform

__all__ = ["ANY", "PROTOCOLS", "Coefficients", "Laws", "Way", "floor", "knots", "law", "terms", "ways"]

Array = npt.NDArray[np.float64]
US = 1e-6
ANY = "any"  # the fabric of links that nothing was measured on
PROTOCOLS = {
    "ring": ("ll", "ll128", "simple"),
    "tree": ("ll", "ll128", "simple"),
    "pat": ("simple",),
    "nvls": ("nvls",),
    "direct": ("direct_ll", "direct"),
}
# Over a network of nodes: what a hop costs beside one of LL (NCCL's tuner: 5, 8.5 and 14 us), and bytes beside payload.
NETWORK_HOP = {"ll": 1.0, "ll128": 1.7, "simple": 2.8, "nvls": 2.8, "direct_ll": 0.5, "direct": 0.5}
# Of a ring that gathers or scatters among several ranks a node, for latencies overlap (NCCL's tuner: 2.7, 4 and 14 us).
# All-reduces have trees for few bytes; their ring is as the one measured table over nodes has it, p4de's.
RING_HOP = {"ll": 0.54, "ll128": 0.8, "simple": 2.8}
NETWORK_BYTES = {"ll": 2.0, "ll128": 16 / 15, "direct_ll": 2.0}
# Of a network card's rate: 24 GB/s of 200 Gb/s and 46 to 48 of 400 (NCCL's maintainers, nccl-tests issues 119 and 290).
NETWORK_RATE = 0.95
# Two nodes of one H100 show 1.2 over InfiniBand (nccl-tests issue 232), and the p4de table 3.4 over EFA.
NETWORK_RAMP = 1.5


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one protocol costs, in units of the terms of the law."""

    start: float  # us
    hop: float  # of the link's latency
    wire: float  # of the time at full bandwidth
    own: float  # likewise, of the bytes that stay
    ramp: float


Laws = Mapping[str, Mapping[str, Coefficients]]  # by fabric, by protocol


@dataclass(frozen=True, slots=True)
class Way:
    """One protocol of one path: what it takes, and what NCCL's tuner thinks it takes, where that is known."""

    name: str
    latency: float
    per_byte: float
    per_root: float
    thought: Line | None

    def seconds(self, nbytes: Array) -> Array:
        return self.latency + self.per_byte * nbytes + self.per_root * np.sqrt(nbytes)


def ways(op: str, group: Group, platform: Platform, laws: Laws) -> list[Way]:
    """Every protocol of every path. The tuner is asked only where all ranks share a domain."""
    links, sizes = platform.links, reach(platform.links, group)
    inner = links[0]
    found = laws.get(inner.fabric, {})
    tuned = inner.fabric if found and group.domains == 1 else None
    out = []
    for path in paths(op, group, links):
        for protocol in PROTOCOLS[path.algorithm]:
            c = found.get(protocol) or laws[ANY][protocol]
            thought = estimate(tuned, protocol, path, group.ranks) if tuned else None
            out.append(_way(f"{path.algorithm} {protocol}", terms(path, protocol, links, sizes, op), c, thought))
    return out


def _way(name: str, x: tuple[float, ...], c: Coefficients, thought: Line | None) -> Way:
    hops, far, wire, far_wire, own, root, far_root = x
    latency = US * c.start + c.hop * hops + far
    return Way(name, latency, max(c.wire * wire, far_wire) + c.own * own, max(c.ramp * root, far_root), thought)


def terms(path: Path, protocol: str, links: Sequence[NetworkLink], sizes: Sequence[int], op: str) -> tuple[float, ...]:
    """What coefficients multiply: seconds of hops (near, far), seconds a byte (near, far, kept), roots (near, far)."""
    near = far = wire = far_wire = root = far_root = 0.0
    hop = RING_HOP if path.algorithm == "ring" and sizes[0] > 1 and op != "all_reduce" else NETWORK_HOP
    for link, n, hops, share in zip(links, sizes, path.hops, path.share, strict=True):
        per_byte = share / (link.bandwidth * width(link, n, op))
        if link.topology == "fat-tree":
            far += hops * link.latency * hop[protocol]
            far_wire = max(far_wire, per_byte * NETWORK_BYTES.get(protocol, 1.0) / NETWORK_RATE)
            far_root = max(far_root, NETWORK_RAMP * (per_byte * link.latency) ** 0.5)
        else:
            near += hops * link.latency
            wire = max(wire, per_byte)
            root = max(root, (per_byte * link.latency) ** 0.5)
    own = path.own / (links[0].bandwidth * width(links[0], sizes[0], op))
    return near, far, wire, far_wire, own, root, far_root


def law(found: Sequence[Way], nbytes: Array) -> Array:
    """The fastest way; or, where the tuner's mind is known, the way it takes."""
    times = np.array([w.seconds(nbytes) for w in found])
    lines = [w.thought for w in found]
    if any(line is None for line in lines):
        return np.asarray(times.min(axis=0))
    thought = np.array([line.latency + line.per_byte * nbytes for line in lines if line is not None])
    return np.asarray(np.take_along_axis(times, thought.argmin(axis=0)[None], axis=0)[0])


def knots(found: Sequence[Way], grid: Array) -> Array:
    """Sizes to know the law at: a grid, and both sides of where the tuner changes its mind."""
    at = crossings([w.thought for w in found if w.thought is not None])
    extra = [m * side for m in at for side in (0.98, 1.02) if grid[0] < m * side < grid[-1]]
    both = np.sort(np.concatenate([grid, extra]))  # np.unique would load numpy.ma
    return np.asarray(both[np.append(True, both[1:] != both[:-1])])


def floor(op: str, group: Group, platform: Platform) -> float:
    """Seconds a byte that no way can go below: the slowest tier at its full bandwidth."""
    sizes = reach(platform.links, group)
    rates = [k.bandwidth * width(k, n, op) for k, n in zip(platform.links, sizes, strict=True)]
    return min(max(s / r for s, r in zip(p.share, rates, strict=True)) for p in paths(op, group, platform.links))
