"""A communicator: how many ranks meet, and how many of them are close."""

from __future__ import annotations

import math
from dataclasses import dataclass

from presage.errors import PresageError
from presage.hardware import Platform

__all__ = ["OPS", "Group", "volume"]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


@dataclass(frozen=True, slots=True)
class Group:
    """So many ranks, so many of them in each innermost domain (a node, an NVLink domain)."""

    ranks: int
    per_domain: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.per_domain <= self.ranks:
            raise PresageError(f"no group of {self.ranks} ranks can have {self.per_domain} in each domain")

    @classmethod
    def of(cls, platform: Platform, ranks: int) -> Group:
        """Neighbours, packed into as few domains as can be."""
        return cls(ranks, min(ranks, platform.domain))

    @property
    def domains(self) -> int:
        """How many domains it spans; the last may be part full."""
        return math.ceil(self.ranks / self.per_domain)


def volume(op: str, ranks: int) -> float:
    """Bytes of a bus per byte of the op, as nccl-tests counts them: bus bandwidth = volume x bytes / seconds."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
