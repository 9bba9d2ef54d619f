"""The time of a collective from the facts of its links.

Every protocol of every way to do it (`paths`) takes its start, its hops one after another, its bytes through the
slowest tier, a copy of what stays at home, and a ramp, for a link comes up to its rate over decades of sizes:

    t = (start + hop x hops x latency) x turn + wire x u + own x home + ramp x sqrt(u x latency)
    u = bytes sent / bandwidth

Starts and hops within a domain are instructions of the SMs, which look for a flag and pass it on: they take so many
clocks, and `turn` is a clock's time against an H100's. Without it A100s, predicted from Hopper and Blackwell, come out
21% too quick, with it 9% off; Hopper from the others 34% instead of 37%, Blackwell as before (docs/collectives.md).

The five coefficients of a protocol are never negative, so time never falls with bytes. They are fitted on measured
tables (`fit`), for each generation of links (a fabric) and for any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import RankGroup
from presage.costs.collectives.network import NetworkCost, network_cost, tree_share
from presage.costs.collectives.paths import CollectivePath, paths, tier_sizes, usable_share
from presage.costs.collectives.tuner import TunerEstimate, crossings, tuner_estimate
from presage.hardware import NetworkLink, Platform

Array = npt.NDArray[np.float64]
US = 1e-6
ANY = "any"  # the fabric of links that nothing was measured on
CLOCK = 1.98e9  # an H100's: what starts and hops of a law are at
TUNED = 8  # ranks up to which NCCL's choices were seen to be as its tuner's constants say
PROTOCOLS = {
    "ring": ("ll", "ll128", "simple"),
    "tree": ("ll", "ll128", "simple"),
    "pat": ("simple",),
    "nvls": ("nvls",),
    "nvls_tree": ("nvls",),
    "collnet": ("simple",),
    "direct": ("direct_ll", "direct"),
}


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of one protocol, for the terms of the law."""

    start: float  # us, at an H100's clock
    hop: float  # of the link's latency, likewise
    wire: float  # of the time at full bandwidth
    own: float  # likewise, of the bytes that stay
    ramp: float


Laws = Mapping[str, Mapping[str, Coefficients]]  # by fabric, by protocol


@dataclass(frozen=True, slots=True)
class ProtocolCost:
    """Cost of one protocol on one path, and NCCL's own estimate of it where known."""

    name: str
    latency: float
    per_byte: float  # through the slowest link of a domain
    kept: float  # seconds a byte of the copy of what stays
    per_root: float
    tuner: TunerEstimate | None = None
    network: float = 0.0  # seconds a byte between nodes
    tree: str = ""  # the protocol of a tree over nodes, whose rate goes with bytes

    def seconds(self, nbytes: Array) -> Array:
        share = tree_share(self.tree, nbytes) if self.tree else 1.0
        slowest = np.maximum(self.per_byte, self.network / share)
        return np.asarray(self.latency + (slowest + self.kept) * nbytes + self.per_root * np.sqrt(nbytes))


def protocol_costs(op: str, group: RankGroup, platform: Platform, laws: Laws) -> list[ProtocolCost]:
    """Costs of every protocol on every path. NCCL's tuner is modelled within a domain, up to the ranks measured."""
    links, sizes = platform.links, tier_sizes(platform.links, group)
    inner = links[0]
    own_laws = laws.get(inner.fabric, {})
    tuned = inner.fabric if group.domains == 1 and group.ranks <= TUNED else None
    turn, out = clock_turn(platform), []
    for path in paths(op, group, links):
        for protocol in PROTOCOLS[path.algorithm]:
            c = own_laws.get(protocol) or laws[ANY][protocol]
            c = replace(c, start=c.start * turn, hop=c.hop * turn)
            near = terms(path, links, sizes, op)
            tuner = tuner_estimate(tuned, protocol, path, group.ranks) if tuned else None
            far = network_cost(path, protocol, links, sizes, op)
            out.append(_protocol_cost(path, protocol, near, far, c, tuner))
    return out


def clock_turn(platform: Platform) -> float:
    """The time of a clock of the SMs, against an H100's."""
    return CLOCK / platform.gpu.boost_clock


def _protocol_cost(
    path: CollectivePath,
    protocol: str,
    near: tuple[float, ...],
    far: NetworkCost,
    c: Coefficients,
    tuner: TunerEstimate | None,
) -> ProtocolCost:
    hops, wire, own, root = near
    tree = protocol if far.tree else ""
    latency, per_root = US * c.start + c.hop * hops + far.latency, max(c.ramp * root, far.per_root)
    name = f"{path.algorithm} {protocol}"
    return ProtocolCost(name, latency, c.wire * wire, c.own * own, per_root, tuner, far.per_byte, tree)


def terms(path: CollectivePath, links: Sequence[NetworkLink], sizes: Sequence[int], op: str) -> tuple[float, ...]:
    """Terms of the law within a domain: seconds of hops, seconds a byte (sent, kept), the root."""
    near = wire = root = 0.0
    for link, n, hops, share in zip(links, sizes, path.hops, path.share, strict=True):
        if link.topology != "fat-tree":
            per_byte = share / (link.bandwidth * usable_share(link, n, op))
            near += hops * link.latency
            wire = max(wire, per_byte)
            root = max(root, (per_byte * link.latency) ** 0.5)
    own = path.own / (links[0].bandwidth * usable_share(links[0], sizes[0], op))
    return near, wire, own, root


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
