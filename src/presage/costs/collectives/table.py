"""Bus bandwidths of a platform, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from presage.costs.collectives.group import Group
from presage.costs.collectives.model import Collectives
from presage.hardware import Platform

__all__ = ["SIZES", "Bus", "bus_table"]

SIZES = tuple(2.0**k for k in (10, 16, 20, 24, 28, 32))
SHOWN = ("all_reduce", "all_gather", "all_to_all")


@dataclass(frozen=True, slots=True)
class Bus:
    """One op in one group over sizes."""

    op: str
    group: Group
    origin: str
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    busbw: tuple[float, ...]  # bytes/s, as nccl-tests counts it


def bus_table(platform: Platform) -> list[Bus]:
    """Within a domain, and across as many as make two and sixteen of them."""
    sizes = dict.fromkeys([platform.domain, *(n * platform.domain for n in (2, 16))])
    reached = [n for n in sizes if n <= platform.links[-1].ranks]
    return [_bus(Collectives.of(platform), op, Group.of(platform, n)) for op in SHOWN for n in reached]


def _bus(model: Collectives, op: str, group: Group) -> Bus:
    nbytes = np.array(SIZES)
    seconds, bus = model.seconds(op, nbytes, group), model.busbw(op, nbytes, group)
    return Bus(op, group, model.origin(op, group), SIZES, tuple(seconds.tolist()), tuple(bus.tolist()))
