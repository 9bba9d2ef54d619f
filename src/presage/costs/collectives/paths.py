"""The ways a collective can go: hops and bytes on every tier of the network.

Tiers are the platform's links, the innermost first. A ring goes round all ranks, domain by domain; trees and switches
work within a domain, then across. What crosses domains goes over the network cards of all their ranks at once (rails).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from presage.costs.collectives.group import Group
from presage.hardware import NetworkLink

__all__ = ["Path", "paths", "reach", "width"]

CUBE = {2: 1 / 3, 3: 2 / 3, 4: 2 / 3}  # of the six NVLinks of a DGX-1's GPU, those to so many neighbours
CUBE_ROUTED = 0.45  # of it for an all-to-all, for many pairs have no link: 46 GB/s were seen on eight V100
# Parallel aggregated trees (NCCL 2.23 and on), as NCCL's tuner counts them beside a ring's hops of 14 us: a fifth of a
# hop for each rank, two sevenths for each level of the trees, and three quarters of the bandwidth.
PAT_RANK, PAT_LEVEL, PAT_RATE = 0.2, 2 / 7, 0.75


@dataclass(frozen=True, slots=True)
class Path:
    """One algorithm for one op in one group."""

    algorithm: str  # ring, tree, pat, nvls, direct
    hops: tuple[float, ...]  # one after another, on each tier
    share: tuple[float, ...]  # bytes over a rank's link of each tier, per byte of the op
    own: float  # bytes a rank keeps, or sends to one peer, per byte of the op


def reach(links: Sequence[NetworkLink], group: Group) -> list[int]:
    """How many parts meet on each tier: ranks of a domain on the first, domains on the next, and so on."""
    sizes = [group.per_domain]
    inside = group.per_domain
    for inner, outer in pairwise(links):
        last = outer is links[-1]
        parts = math.ceil(group.ranks / inside)
        sizes.append(parts if last else min(parts, outer.ranks // inner.ranks))
        inside *= sizes[-1]
    return sizes


def width(link: NetworkLink, ranks: int, op: str) -> float:
    """Of a link's bandwidth, what so many ranks can use among themselves; two that send each other, what joins two."""
    ranks = min(ranks, 2) if op == "send_recv" else ranks
    if link.topology == "mesh":
        return (min(ranks, link.ranks) - 1) / (link.ranks - 1) if ranks > 1 else 1.0
    if link.topology == "cube":
        return CUBE.get(ranks, 1.0) * (CUBE_ROUTED if op == "all_to_all" and ranks > 4 else 1.0)
    return 1.0


def paths(op: str, group: Group, links: Sequence[NetworkLink]) -> list[Path]:
    """All ways NCCL has to do an op."""
    sizes = reach(links, group)
    if op == "send_recv":
        return [_pair(sizes)]
    if op == "all_to_all":
        return [_direct(sizes, group.ranks)]
    found = [_ring(op, sizes, links)]
    hosted = any(k.topology == "host" and n > 1 for k, n in zip(links, sizes, strict=True))
    if op in ("all_reduce", "broadcast") and group.domains > 1 and not hosted:
        found.append(_tree(op, sizes, links))
    if op in ("all_gather", "reduce_scatter") and sizes[0] == 1 and len(links) == 2 and not hosted:
        found.append(_aggregated(sizes))
    if op == "all_reduce" and links[0].in_network and sizes[0] > 2:
        found.append(_switch(op, sizes, links))
    return found


def _pair(sizes: Sequence[int]) -> Path:
    """Two ranks, as far apart as the group is wide."""
    far = max((k for k, n in enumerate(sizes) if n > 1), default=0)
    at = tuple(float(k == far) for k in range(len(sizes)))
    return Path("direct", at, at, 0.0)


def _direct(sizes: Sequence[int], ranks: int) -> Path:
    """Every rank to every other, all at once: a hop a peer is far too many, but peers are not free."""
    hops, share, inside = [], [], 1
    for n in sizes:
        hops.append(float(inside * (n - 1)))
        share.append(inside * (n - 1) / ranks)
        inside *= n
    return Path("direct", tuple(hops), tuple(share), 1 / ranks)


def _turns(op: str) -> float:
    """How often everything goes round."""
    return 2.0 if op == "all_reduce" else 1.0


def _ring(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> Path:
    """Round all ranks, neighbours first. A node has a rail a rank, each with its part of the rings; a host has one."""
    ranks = math.prod(sizes)
    factor = 1.0 if op == "broadcast" else _turns(op) * (ranks - 1) / ranks
    hops, share, inside = [], [], 1
    for n, link in zip(sizes, links, strict=True):
        hops.append(_turns(op) * (ranks // inside - ranks // (inside * n)))
        rails = inside if link.topology == "fat-tree" else 1
        share.append(factor / rails if n > 1 else 0.0)
        inside *= n
    return Path("ring", tuple(hops), tuple(share), 1 / sizes[0])


def _tree(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> Path:
    """A chain in each domain, and two trees over domains, each with half: every node is inner in one of them."""
    near = sizes[0] - 1
    hops, share = _branches(op, sizes, links)
    return Path("tree", (_turns(op) * near, *hops), (_turns(op) * bool(near), *share), 1 / sizes[0])


def _aggregated(sizes: Sequence[int]) -> Path:
    """Trees that send what is for many ranks at once. NCCL has them for one rank a node."""
    n = sizes[1]
    hops = PAT_RANK * n + PAT_LEVEL * math.ceil(math.log2(n)) if n > 1 else 0.0
    return Path("pat", (0.0, hops), (0.0, (n - 1) / n / PAT_RATE), 1.0)


def _switch(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> Path:
    """The switch of the domain reduces and sends to all; trees over domains."""
    hops, share = _branches(op, sizes, links)
    return Path("nvls", (2.0, *hops), (1.0, *share), 1 / sizes[0])


def _branches(op: str, sizes: Sequence[int], links: Sequence[NetworkLink]) -> tuple[list[float], list[float]]:
    """Hops and shares over domains: up and down the trees, or to a switch that reduces and back."""
    hops, share, inside = [], [], sizes[0]
    for n, link in zip(sizes[1:], links[1:], strict=True):
        reduces = link.in_network and op == "all_reduce"
        hops.append(_turns(op) * (1 if reduces else math.ceil(math.log2(n))) if n > 1 else 0.0)
        share.append((1.0 if n == 2 or reduces else _turns(op)) / inside if n > 1 else 0.0)
        inside *= n
    return hops, share
