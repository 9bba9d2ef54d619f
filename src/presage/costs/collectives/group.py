"""A communicator: its ranks, and how many share a domain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from presage.errors import PresageError
from presage.hardware import Platform

Array = npt.NDArray[np.float64]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

LARGEST_NODE = 16  # GPUs; a larger domain is a rack or several
TRAY = 4  # GPUs of a node of such a rack


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Number of ranks, and how many share an innermost domain (a node, an NVLink domain)."""

    ranks: int
    per_domain: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.per_domain <= self.ranks:
            raise PresageError(f"no group of {self.ranks} ranks can have {self.per_domain} in each domain")

    @classmethod
    def of(cls, platform: Platform, ranks: int) -> RankGroup:
        """The group of this many neighbouring ranks, packed into as few domains as possible."""
        return cls(ranks, min(ranks, platform.domain))

    @classmethod
    def on_nodes(cls, platform: Platform, ranks: int, nodes: int) -> RankGroup:
        """The group of ranks on so many nodes. Where a rack is one domain, its nodes fill rack after rack."""
        each = max(ranks // nodes, 1)
        if platform.links[0].topology == "switch" and platform.domain > LARGEST_NODE and each <= TRAY:
            each *= platform.domain // TRAY
        return cls(ranks, min(each, ranks, platform.domain))

    @property
    def domains(self) -> int:
        """How many domains it spans; the last may be part full."""
        return math.ceil(self.ranks / self.per_domain)


def volume(op: str, ranks: int) -> float:
    """Bus bytes per byte of the op, by the nccl-tests convention: bus bandwidth = volume x bytes / seconds."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


# ---- uneven all-to-alls: the even one that takes as long


def even_bytes(sent: Array, group: RankGroup) -> list[tuple[float, RankGroup]]:
    """Even all-to-alls, bytes a rank and group, that each do what the busiest rank does here: the longest counts.

    Of totals (sent, received): one, of the most that any rank sends or receives. Of a matrix, with ranks of a domain
    side by side: one among the domains, and one within each.
    """
    n, near = group.ranks, group.per_domain
    if sent.shape not in ((n, n), (2, n)):
        raise PresageError(f"an uneven all-to-all of {n} ranks takes {n} x {n} or 2 x {n} bytes, not {sent.shape}")
    if not np.isfinite(sent).all() or (sent < 0).any():
        raise PresageError("an uneven all-to-all takes bytes, none negative")
    if n == 1:
        return [(0.0, group)]
    if sent.shape == (2, n) and n != 2:
        return [(float(sent.max()) * n / (n - 1), group)]
    domain = np.arange(n) // near
    inside = domain[:, None] == domain
    close = _busiest(sent, inside & ~np.eye(n, dtype=bool))
    within = RankGroup(near, near)
    inner = [(close * near / (near - 1), within)] if near > 1 else []
    return [*inner, (_busiest(sent, ~inside) * n / (n - near), group)] if n > near else inner


def _busiest(sent: Array, pairs: npt.NDArray[np.bool_]) -> float:
    """The most that one rank sends or receives among these pairs."""
    counted = np.where(pairs, sent, 0.0)
    return float(max(counted.sum(axis=0).max(), counted.sum(axis=1).max()))
