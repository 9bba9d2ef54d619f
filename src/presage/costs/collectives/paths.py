"""Paths of a collective: hops and bytes on every tier of the network.

Tiers are the platform's links, the innermost first. A ring goes round all ranks, domain by domain; trees and switches
work within a domain, then across. What crosses domains goes over the network cards of all ranks at once (rails).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from presage.costs.collectives.group import RankGroup
from presage.hardware import NetworkLink

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
    if op == "all_reduce" and group.domains > 1 and not hosted:
        out.append(_tree(sizes))
        out += [_sharp(sizes)] if links[-1].in_network else []
    if op in ("all_gather", "reduce_scatter") and sizes[0] == 1 and len(links) == 2 and not hosted:
        out.append(_aggregated(sizes))
    if op == "all_reduce" and links[0].in_network and sizes[0] > 2:
        out.append(_switch(sizes, links))
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
    return CollectivePath("ring", tuple(hops), tuple(share), 0.0 if op == "broadcast" else 1 / sizes[0])


def _tree(sizes: Sequence[int]) -> CollectivePath:
    """A chain within each domain, and a double binary tree over domains, half of the data each."""
    near = sizes[0] - 1
    hops, share = _branches(sizes)
    return CollectivePath("tree", (2.0 * near, *hops), (2.0 * bool(near), *share), 1 / sizes[0])


def _sharp(sizes: Sequence[int]) -> CollectivePath:
    """A chain within each domain, and a network whose switches reduce (CollNet)."""
    near = sizes[0] - 1
    hops, share = _reduced(sizes)
    return CollectivePath("collnet", (2.0 * near, *hops), (2.0 * bool(near), *share), 1 / sizes[0])


def _aggregated(sizes: Sequence[int]) -> CollectivePath:
    """Parallel aggregated trees (PAT), which NCCL uses with one rank per node."""
    n = sizes[1]
    hops = PAT_RANK * n + PAT_LEVEL * math.ceil(math.log2(n)) if n > 1 else 0.0
    return CollectivePath("pat", (0.0, hops), (0.0, (n - 1) / n / PAT_RATE), 1.0)


def _switch(sizes: Sequence[int], links: Sequence[NetworkLink]) -> CollectivePath:
    """The switch of the domain reduces and sends to all; over domains a tree, or switches that reduce too."""
    reduced = links[-1].in_network or max(sizes[1:], default=1) == 1
    hops, share = _reduced(sizes) if reduced else _branches(sizes)
    return CollectivePath("nvls" if reduced else "nvls_tree", (2.0, *hops), (1.0, *share), 0.0)


def _branches(sizes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Hops and shares of an all-reduce over domains, up and down the trees. Two nodes swap what they have."""
    hops, share, inside = [], [], sizes[0]
    for n in sizes[1:]:
        hops.append(2.0 * math.ceil(math.log2(n)))
        share.append((1.0 if n == 2 else 2.0) / inside if n > 1 else 0.0)
        inside *= n
    return hops, share


def _reduced(sizes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Hops and shares of an all-reduce over domains whose switches reduce: there and back."""
    hops, share, inside = [], [], sizes[0]
    for n in sizes[1:]:
        hops.append(float(n > 1))
        share.append(1.0 / inside if n > 1 else 0.0)
        inside *= n
    return hops, share
