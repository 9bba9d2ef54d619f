"""What a layer does on one rank, as values: products, attention, passes over memory, talks between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from presage.parallel.plan import Axis

__all__ = ["Attend", "Block", "Op", "Product", "Stream", "Talk"]


class Product(NamedTuple):
    """y[m, n] = x[m, k] w[k, n], `groups` times in one launch."""

    m: int
    n: int
    k: int
    kind: str
    groups: int = 1  # an expert each
    batch: int = 1  # a head each
    sums: bool = False  # the weights' gradient, added to what is there
    along: bool = True  # the weights lie along k, as a linear layer has them


class Attend(NamedTuple):
    """Fused attention, forward or backward."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    causal: bool
    window: int
    backward: bool
    style: str


class Stream(NamedTuple):
    """Passes over memory, in so many kernels."""

    nbytes: float
    launches: int = 1
    kind: str = "pointwise"  # how much of the bandwidth such kernels reach: see costs/chip


class Talk(NamedTuple):
    """A collective of one of the job's groups: tp, cp, ep."""

    op: str
    nbytes: float
    over: Axis
    beside: Product | Attend | None = None  # what it may hide behind, where the framework does so
    whole: bool = False  # beside another product than its own, so as a whole: on a stream of its own is enough


Op = Product | Attend | Stream | Talk


class Block(NamedTuple):
    """A part of a layer that is kept or recomputed as one."""

    name: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]

    @staticmethod
    def of(name: str, forward: Iterable[Op | None], backward: Iterable[Op | None]) -> Block:
        return Block(name, tuple(o for o in forward if o), tuple(o for o in backward if o))
