"""What a network between nodes adds to a collective, by algorithm and protocol.

Figures are those of NCCL's tuner (src/graph/tuning.cc of NCCL 2.20 to 2.29) where nothing else is said: what a hop
takes, which part of the cards' rate a protocol reaches, and how much less of it trees reach at middling sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.paths import CollectivePath
from presage.hardware import NetworkLink

Array = npt.NDArray[np.float64]
US, GB = 1e-6, 1e9
INFINIBAND = 5.0 * US  # the hop of LL in a tree, which platform files give as a network's latency
# Microseconds of a hop. A ring's latencies overlap where nodes have several ranks; with one a node they are a tree's.
HOPS = {
    "tree": {"ll": 5.0, "ll128": 8.5, "simple": 14.0},
    "ring": {"ll": 2.7, "ll128": 4.0, "simple": 14.0},
    "pat": {"simple": 14.0},
    "nvls_tree": {"nvls": 14.0},
    "nvls": {"nvls": 18.0},
    "collnet": {"simple": 31.0},
    "direct": {"direct_ll": 5.0, "direct": 14.0},
}
TWICE = ("simple", "nvls", "direct")  # protocols that wait for the network a second time, to flush
PLATEAU = 1.4  # an all-reduce's ring by Simple takes so much longer, hop by hop
# Microseconds to post one message of an all-to-all: NCCL's network overhead of 1 us, three times that by Simple.
POSTS = {"direct_ll": 1.0, "direct": 3.0}
# Of a card's rate, by algorithm and protocol.
SHARES = {
    "tree": {"ll": 1 / 3.8, "ll128": 0.92 * 120 / 128, "simple": 0.92},
    "ring": {"ll": 0.5, "ll128": 0.92, "simple": 1.0},
    "pat": {"simple": 1.0},
    "nvls_tree": {"nvls": 1.0},
    "nvls": {"nvls": 1.0},
    "collnet": {"simple": 0.85},
    "direct": {"direct_ll": 0.5, "direct": 1.0},
}
# Of a card's rate again: 24 GB/s of 200 Gb/s and 46 to 48 of 400 (NCCL's maintainers, nccl-tests issues 119 and 290).
RATE = 0.95
# An all-to-all's: p5's at their best (83% to 91%), two nodes of four and eight H100s over RoCE at 16 GiB (82% to 84%).
DIRECT_RATE = 0.85
LL_MOST = (30e9, 20e9)  # bytes/s of a node by LL: two nodes, and more; between those of Intel's and AMD's hosts
HOST = 8  # ranks of a host, of which a rack has several
# GB/s of a channel (a card), by fabric within the node: trees of more than two nodes, by protocol.
CHANNEL = {
    "nvlink2": {"ll128": 20.0, "simple": 10.0},
    "nvlink3": {"ll128": 20.0, "simple": 17.8},
    "nvlink4": {"ll128": 29.0, "simple": 36.0, "nvls": 45.5},
    "nvlink5": {"ll128": 20.0, "simple": 24.0, "nvls": 80.0},
}
CHANNELS = 16  # cards that one communicator uses in a domain, at most: assumed
# Of the rate of trees, by doublings of bytes from 64 B to 512 MiB.
TREE_SHARES = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9, 1),
}
TREE_SHARES["nvls"] = TREE_SHARES["simple"]
TREES = ("tree", "nvls_tree")
RAMPS = {"ll": 6.0}
RAMP = 1.5


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """Seconds of hops one after another, a byte, a root of bytes; and whether its rate is a tree's."""

    latency: float = 0.0
    per_byte: float = 0.0
    per_root: float = 0.0
    tree: bool = False


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of a group: how many, its ranks in each, GPUs in each, and the fabric within."""

    count: int
    near: int
    gpus: int
    fabric: str

    @classmethod
    def of(cls, links: Sequence[NetworkLink], sizes: Sequence[int]) -> _Nodes:
        inner = [(k, n) for k, n in zip(links, sizes, strict=True) if k.topology != "fat-tree"]
        near = math.prod(n for _, n in inner)
        return cls(math.prod(sizes) // near, near, max((k.ranks for k, _ in inner), default=1), links[0].fabric)


def network_cost(
    path: CollectivePath, protocol: str, links: Sequence[NetworkLink], sizes: Sequence[int], op: str
) -> NetworkCost:
    """What a path takes between nodes, tier by tier of the network; nothing within one node."""
    tiers = [
        t for t in zip(links, path.hops, path.share, sizes, strict=True) if t[0].topology == "fat-tree" and t[3] > 1
    ]
    if not tiers:
        return NetworkCost()
    nodes, algorithm = _Nodes.of(links, sizes), path.algorithm
    hops = [(hop_seconds(k, algorithm, protocol, nodes.near), n) for k, n, _, _ in tiers]
    ramps = [(share / k.bandwidth * k.latency) ** 0.5 for k, _, share, _ in tiers]
    return NetworkCost(
        _latency(hops, algorithm, protocol, op),
        max(share / _rate(k, algorithm, protocol, nodes) for k, _, share, _ in tiers),
        0.0 if algorithm == "direct" else RAMPS.get(protocol, RAMP) * max(ramps),
        algorithm in TREES,
    )


def _latency(hops: Sequence[tuple[float, float]], algorithm: str, protocol: str, op: str) -> float:
    """Hops one after another; of messages to many peers the longest hop, and the posting of each."""
    if algorithm == "direct":
        return max(one for one, _ in hops) + US * POSTS[protocol] * sum(n for _, n in hops)
    longer = PLATEAU if (algorithm, protocol, op) == ("ring", "simple", "all_reduce") else 1.0
    return longer * sum(one * n for one, n in hops)


def hop_seconds(link: NetworkLink, algorithm: str, protocol: str, near: int) -> float:
    """One hop between nodes: NCCL's own, and what this network takes longer than InfiniBand."""
    table = HOPS["tree"] if algorithm == "ring" and near == 1 else HOPS[algorithm]
    waits = 2 if protocol in TWICE else 1
    longer = max(link.latency - INFINIBAND, 0.0)
    return US * table[protocol] * min(link.latency / INFINIBAND, 1.0) + waits * longer


def _rate(link: NetworkLink, algorithm: str, protocol: str, nodes: _Nodes) -> float:
    """Bytes/s of a rank's part of the cards."""
    of_card = DIRECT_RATE if algorithm == "direct" else RATE
    rate = link.bandwidth * of_card * SHARES[algorithm][protocol]
    if protocol == "ll":
        rate = min(rate, LL_MOST[nodes.count > 2] / min(nodes.near, HOST))
    channel = CHANNEL.get(nodes.fabric, {}).get(protocol)
    if algorithm in TREES and nodes.count > 2 and channel is not None:
        rate = min(rate, channel * GB * min(link.nics or nodes.gpus, nodes.gpus, CHANNELS) / nodes.gpus)
    return rate


def tree_share(protocol: str, nbytes: Array) -> Array:
    """The share of its rate that a tree reaches, by bytes."""
    table = TREE_SHARES[protocol]
    return np.asarray(np.interp(np.log2(np.maximum(nbytes, 1.0)) - 6, np.arange(len(table)), table))
