"""Fleet: GPUs with their names, their nodes and how slow each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError

__all__ = ["Fleet", "drawn_fleet"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Fleet:
    """In the order of ranks, spare GPUs last. Factors are times, of the fleet's median: above 1 is slow."""

    gpus: tuple[str, ...]
    nodes: tuple[str, ...]  # of each GPU; empty where unknown
    factors: Floats
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(factors: Sequence[float] | Floats, gpus: Sequence[str] = (), nodes: Sequence[str] = ()) -> Fleet:
        """Times in any unit; names are made up where none are given."""
        values = np.asarray(factors, np.float64)
        if not values.size or not np.isfinite(values).all() or values.min() <= 0:
            raise PresageError("a fleet needs a time above 0 for each GPU")
        names = tuple(gpus) or tuple(f"gpu{i}" for i in range(len(values)))
        return Fleet(names, tuple(nodes) or ("",) * len(values), values / float(np.median(values)))

    def __len__(self) -> int:
        return len(self.gpus)

    @cached_property
    def members(self) -> dict[str, Ints]:
        """GPUs of each node, in order; where no node is known, all of them are one."""
        names, index = np.unique(np.array(self.nodes), return_inverse=True)
        first = {str(n): np.flatnonzero(index == i) for i, n in enumerate(names)}
        return dict(sorted(first.items(), key=lambda item: int(item[1][0])))

    @property
    def known_nodes(self) -> bool:
        return len(self.members) > 1

    def unit(self, gpu: int) -> str:
        """What would be evicted for a GPU: its node, or itself where no node is known."""
        return self.nodes[gpu] if self.known_nodes and self.nodes[gpu] else self.gpus[gpu]

    def of_unit(self, name: str) -> Ints:
        """GPUs of a node, or the one GPU of this name."""
        return self.members[name] if self.known_nodes and name in self.members else np.array([self.gpus.index(name)])

    def hot(self, node: str, factor: float) -> Fleet:
        """The same with a node whose GPUs take `factor` as long. What is usual stays."""
        if node not in self.members:
            raise PresageError(f"unknown node {node}: choose from {', '.join(list(self.members)[:5])} ...")
        factors = self.factors.copy()
        factors[self.members[node]] *= factor
        return replace(self, factors=factors)


def drawn_fleet(
    gpus: int, node: int, sd: float, rng: np.random.Generator, share: float = 0.0, factor: float = 1.0
) -> Fleet:
    """For planning without data: a spread (of the logarithm), and a `share` of GPUs that take `factor` as long."""
    factors = np.exp(sd * rng.standard_normal(gpus))
    factors[rng.random(gpus) < share] *= factor
    nodes = [f"node{i // node}" for i in range(gpus)]
    return Fleet.of(factors, [f"{n}.{i % node}" for i, n in enumerate(nodes)], nodes)
