"""The time of a collective from the facts of its links.

Every protocol of every way to do it (`paths`) takes its start, its hops one after another, its bytes through the
slowest tier, a copy of what stays at home, and a ramp, for a link comes up to its rate over decades of sizes:

    t = start + hop x hops x latency + wire x u + own x home + ramp x sqrt(u x latency),   u = bytes sent / bandwidth

The five coefficients of a protocol are never negative, so time never falls with bytes. They are fitted on measured
tables (`fit`), for each generation of links (a fabric) and for any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import RankGroup
from presage.hardware import NetworkLink, Platform

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
    """Coefficients of one protocol, for the terms of the law."""

    start: float  # us
    hop: float  # of the link's latency
    wire: float  # of the time at full bandwidth
    own: float  # likewise, of the bytes that stay
    ramp: float


Laws = Mapping[str, Mapping[str, Coefficients]]  # by fabric, by protocol


@dataclass(frozen=True, slots=True)
class ProtocolCost:
    """Cost of one protocol on one path, and NCCL's own estimate of it where known."""

    name: str
    latency: float
    per_byte: float
    per_root: float
    tuner: TunerEstimate | None

    def seconds(self, nbytes: Array) -> Array:
        return self.latency + self.per_byte * nbytes + self.per_root * np.sqrt(nbytes)


def protocol_costs(op: str, group: RankGroup, platform: Platform, laws: Laws) -> list[ProtocolCost]:
    """Costs of every protocol on every path. NCCL's tuner is modelled only where all ranks share a domain."""
    links, sizes = platform.links, tier_sizes(platform.links, group)
    inner = links[0]
    own_laws = laws.get(inner.fabric, {})
    tuned = inner.fabric if own_laws and group.domains == 1 else None
    out = []
    for path in paths(op, group, links):
        for protocol in PROTOCOLS[path.algorithm]:
            c = own_laws.get(protocol) or laws[ANY][protocol]
            tuner = tuner_estimate(tuned, protocol, path, group.ranks) if tuned else None
            out.append(
                _protocol_cost(f"{path.algorithm} {protocol}", terms(path, protocol, links, sizes, op), c, tuner)
            )
    return out


def _protocol_cost(name: str, x: tuple[float, ...], c: Coefficients, tuner: TunerEstimate | None) -> ProtocolCost:
    hops, far, wire, far_wire, own, root, far_root = x
    latency = US * c.start + c.hop * hops + far
    return ProtocolCost(name, latency, max(c.wire * wire, far_wire) + c.own * own, max(c.ramp * root, far_root), tuner)


def terms(
    path: CollectivePath, protocol: str, links: Sequence[NetworkLink], sizes: Sequence[int], op: str
) -> tuple[float, ...]:
    """Terms of the law: seconds of hops (near, far), seconds a byte (near, far, kept), roots (near, far)."""
    near = far = wire = far_wire = root = far_root = 0.0
    hop = RING_HOP if path.algorithm == "ring" and sizes[0] > 1 and op != "all_reduce" else NETWORK_HOP
    for link, n, hops, share in zip(links, sizes, path.hops, path.share, strict=True):
        per_byte = share / (link.bandwidth * usable_share(link, n, op))
        if link.topology == "fat-tree":
            far += hops * link.latency * hop[protocol]
            far_wire = max(far_wire, per_byte * NETWORK_BYTES.get(protocol, 1.0) / NETWORK_RATE)
            far_root = max(far_root, NETWORK_RAMP * (per_byte * link.latency) ** 0.5)
        else:
            near += hops * link.latency
            wire = max(wire, per_byte)
            root = max(root, (per_byte * link.latency) ** 0.5)
    own = path.own / (links[0].bandwidth * usable_share(links[0], sizes[0], op))
    return near, far, wire, far_wire, own, root, far_root


def law_seconds(protocols: Sequence[ProtocolCost], nbytes: Array) -> Array:
    """Seconds of the fastest protocol, or of the one NCCL's tuner chooses where its estimates are known."""
    times = np.array([w.seconds(nbytes) for w in protocols])
    lines = [w.tuner for w in protocols]
    if any(line is None for line in lines):
        return np.asarray(times.min(axis=0))
    tuner = np.array([line.latency + line.per_byte * nbytes for line in lines if line is not None])
    return np.asarray(np.take_along_axis(times, tuner.argmin(axis=0)[None], axis=0)[0])


def knots(protocols: Sequence[ProtocolCost], grid: Array) -> Array:
    """Sizes at which to evaluate the law: a grid, and both sides of the tuner's switch points."""
    at = crossings([w.tuner for w in protocols if w.tuner is not None])
    extra = [m * side for m in at for side in (0.98, 1.02) if grid[0] < m * side < grid[-1]]
    both = np.sort(np.concatenate([grid, extra]))  # np.unique would load numpy.ma
    return np.asarray(both[np.append(True, both[1:] != both[:-1])])


def least_seconds_per_byte(op: str, group: RankGroup, platform: Platform) -> float:
    """Lower bound of seconds per byte: the slowest tier at full bandwidth."""
    sizes = tier_sizes(platform.links, group)
    rates = [k.bandwidth * usable_share(k, n, op) for k, n in zip(platform.links, sizes, strict=True)]
    return min(max(s / r for s, r in zip(p.share, rates, strict=True)) for p in paths(op, group, platform.links))


# ---- paths of a collective: hops and bytes on every tier of the network
#
# Tiers are the platform's links, the innermost first. A ring goes round all ranks, domain by domain; trees and switches
# work within a domain, then across. What crosses domains goes over the network cards of all ranks at once (rails).

CUBE = {2: 1 / 3, 3: 2 / 3, 4: 2 / 3}  # of the six NVLinks of a DGX-1's GPU, those to so many neighbours
CUBE_ROUTED = 0.45  # of it for an all-to-all, for many pairs have no link: 46 GB/s were seen on eight V100
# Parallel aggregated trees (NCCL 2.23 and on), as NCCL's tuner counts them beside a ring's hops of 14 us: a fifth of a
# hop for each rank, two sevenths for each level of the trees, and three quarters of the bandwidth.
PAT_RANK, PAT_LEVEL, PAT_RATE = 0.2, 2 / 7, 0.75


@dataclass(frozen=True, slots=True)
class CollectivePath:
    """One algorithm for one op in one group: hops and bytes by tier."""

    algorithm: str  # ring, tree, pat, nvls, direct
    hops: tuple[float, ...]  # one after another, on each tier
    share: tuple[float, ...]  # bytes over a rank's link of each tier, per byte of the op
    own: float  # bytes a rank keeps, or sends to one peer, per byte of the op


def tier_sizes(links: Sequence[NetworkLink], group: RankGroup) -> list[int]:
    """Members on each tier: ranks per domain on the first, domains on the next, and so on."""
    sizes = [group.per_domain]
    inside = group.per_domain
    for inner, outer in pairwise(links):
        last = outer is links[-1]
        parts = math.ceil(group.ranks / inside)
        sizes.append(parts if last else min(parts, outer.ranks // inner.ranks))
        inside *= sizes[-1]
    return sizes


def usable_share(link: NetworkLink, ranks: int, op: str) -> float:
    """The share of a link's bandwidth that this many ranks can use; for a send, that between two ranks."""
    ranks = min(ranks, 2) if op == "send_recv" else ranks
    if link.topology == "mesh":
        return (min(ranks, link.ranks) - 1) / (link.ranks - 1) if ranks > 1 else 1.0
    if link.topology == "cube":
        return CUBE.get(ranks, 1.0) * (CUBE_ROUTED if op == "all_to_all" and ranks > 4 else 1.0)
    return 1.0


def paths(op: str, group: RankGroup, links: Sequence[NetworkLink]) -> list[CollectivePath]:
    """Algorithms NCCL has for an op."""
    sizes = tier_sizes(links, group)
    if op == "send_recv":
        return [_pair(sizes)]
    if op == "all_to_all":
        return [_direct(sizes, group.ranks)]
    out = [_ring(op, sizes, links)]
    hosted = any(k.topology == "host" and n > 1 for k, n in zip(links, sizes, strict=True))
    if op in ("all_reduce", "broadcast") and group.domains > 1 and not hosted:
        out.append(_tree(op, sizes, links))
    if op in ("all_gather", "reduce_scatter") and sizes[0] == 1 and len(links) == 2 and not hosted:
        out.append(_aggregated(sizes))
    if op == "all_reduce" and links[0].in_network and sizes[0] > 2:
        out.append(_switch(op, sizes, links))
    return out


def _pair(sizes: Sequence[int]) -> CollectivePath:
    """Two ranks, as far apart as the group is wide."""
    far = max((k for k, n in enumerate(sizes) if n > 1), default=0)
    at = tuple(float(k == far) for k in range(len(sizes)))
    return CollectivePath("direct", at, at, 0.0)


def _direct(sizes: Sequence[int], ranks: int) -> CollectivePath:
    """Every rank sends to every other at once; each peer counts as a hop, scaled down by the fitted coefficient."""
    hops, share, inside = [], [], 1
    for n in sizes:
        hops.append(float(inside * (n - 1)))
        share.append(inside * (n - 1) / ranks)
        inside *= n
    return CollectivePath("direct", tuple(hops), tuple(share), 1 / ranks)


def _turns(op: str) -> float:
    """Passes over the data: two for an all-reduce."""
    return 2.0 if op == "all_reduce" else 1.0


def _ring(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> CollectivePath:
    """Round all ranks, neighbours first. A node has a rail a rank, each with its part of the rings; a host has one."""
    ranks = math.prod(sizes)
    factor = 1.0 if op == "broadcast" else _turns(op) * (ranks - 1) / ranks
    hops, share, inside = [], [], 1
    for n, link in zip(sizes, links, strict=True):
        hops.append(_turns(op) * (ranks // inside - ranks // (inside * n)))
        rails = inside if link.topology == "fat-tree" else 1
        share.append(factor / rails if n > 1 else 0.0)
        inside *= n
    return CollectivePath("ring", tuple(hops), tuple(share), 1 / sizes[0])


def _tree(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> CollectivePath:
    """A chain within each domain, and a double binary tree over domains, half of the data each."""
    near = sizes[0] - 1
    hops, share = _branches(op, sizes, links)
    return CollectivePath("tree", (_turns(op) * near, *hops), (_turns(op) * bool(near), *share), 1 / sizes[0])


def _aggregated(sizes: Sequence[int]) -> CollectivePath:
    """Parallel aggregated trees (PAT), which NCCL uses with one rank per node."""
    n = sizes[1]
    hops = PAT_RANK * n + PAT_LEVEL * math.ceil(math.log2(n)) if n > 1 else 0.0
    return CollectivePath("pat", (0.0, hops), (0.0, (n - 1) / n / PAT_RATE), 1.0)


def _switch(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> CollectivePath:
    """The switch of the domain reduces and sends to all; trees over domains."""
    hops, share = _branches(op, sizes, links)
    return CollectivePath("nvls", (2.0, *hops), (1.0, *share), 1 / sizes[0])


def _branches(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> tuple[list[float], list[float]]:
    """Hops and shares over domains: up and down the trees, or to a switch that reduces and back."""
    hops, share, inside = [], [], sizes[0]
    for n, link in zip(sizes[1:], links[1:], strict=True):
        reduces = link.in_network and op == "all_reduce"
        hops.append(_turns(op) * (1 if reduces else math.ceil(math.log2(n))) if n > 1 else 0.0)
        share.append((1.0 if n == 2 or reduces else _turns(op)) / inside if n > 1 else 0.0)
        inside *= n
    return hops, share


# ---- NCCL's own estimate of a protocol: it takes the one it estimates to be fastest, and is at times wrong
#
# Constants are those of NCCL's source, src/graph/tuning.cc: microseconds of start and of a hop, the rates of LL, the
# shares of LL128 and NVLS. The rate of all rings together is the links times what NCCL counts for one, and NVLS's 5/6
# and ranks - 1 of ranks are general knowledge of it, not looked up. Where the switch comes too early or too late the
# measured curves jump, at the sizes these constants say.

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
    if protocol == "direct_ll":
        return TunerEstimate(0.0, path.own or 1.0)
    if protocol == "direct":
        return TunerEstimate(SMALL, 0.0)
    speed = SPEEDS.get(fabric)
    if speed is None:
        return None
    if protocol == "nvls":
        return TunerEstimate(START["nvls"], 1e-3 / (speed.nvls * speed.ring * NVLS_SHARE * (ranks - 1) / ranks))
    rate = {"ll": min(speed.ll, speed.ring * LL_SHARE), "ll128": speed.ring * LL128_SHARE, "simple": speed.ring}
    return TunerEstimate(START[protocol] + HOP[protocol] * path.hops[0], 1e-3 * path.share[0] / rate[protocol])


def crossings(lines: Sequence[TunerEstimate]) -> list[float]:
    """Sizes at which two lines meet."""
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.per_byte != b.per_byte]
    at = ((b.latency - a.latency) / (a.per_byte - b.per_byte) for a, b in pairs)
    return sorted({m for m in at if m > 0})
