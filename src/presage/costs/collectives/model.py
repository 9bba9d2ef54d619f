"""Times of collectives on a platform."""

from __future__ import annotations

from functools import cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.curve import GRID, Curve
from presage.costs.collectives.group import OPS, Group, volume
from presage.costs.collectives.law import floor, knots, law, ways
from presage.costs.collectives.store import CollectiveParameters, shipped_parameters
from presage.costs.collectives.uneven import even_bytes
from presage.errors import PresageError
from presage.hardware import Platform

__all__ = ["Collectives"]

Array = npt.NDArray[np.float64]


class Collectives:
    """What each collective takes on one platform, by bytes and group. Curves are made when first asked for."""

    def __init__(self, platform: Platform, fitted: CollectiveParameters) -> None:
        self.platform, self.fitted = platform, fitted
        self._curves: dict[tuple[str, Group], Curve] = {}

    @classmethod
    def of(cls, platform: Platform) -> Collectives:
        """The model of a platform as it ships."""
        return _of(platform)

    @overload
    def seconds(self, op: str, nbytes: float, group: Group) -> float: ...
    @overload
    def seconds(self, op: str, nbytes: npt.NDArray[Any], group: Group) -> Array: ...
    def seconds(self, op: str, nbytes: Any, group: Group) -> Any:
        """Seconds of an op. One rank costs nothing, and so do no bytes."""
        if group.ranks == 1:
            return 0.0 * nbytes
        curve = self._curves.get((op, group)) or self.curve(op, group)
        if isinstance(nbytes, np.ndarray):
            return np.where(nbytes > 0, curve.many(nbytes), 0.0)
        return curve.at(nbytes) if nbytes > 0 else 0.0

    def curve(self, op: str, group: Group) -> Curve:
        """The curve of an op in a group, made once."""
        if op not in OPS:
            raise PresageError(f"unknown collective {op!r}: choose from {', '.join(OPS)}")
        if (op, group) not in self._curves:
            self._check(group)
            self._curves[op, group] = self._make(op, group)
        return self._curves[op, group]

    def _check(self, group: Group) -> None:
        here = self.platform
        if group.per_domain > here.domain:
            raise PresageError(f"{here.key} has {here.domain} GPUs in a domain, not {group.per_domain}")
        if group.domains * here.domain > here.links[-1].ranks:
            raise PresageError(f"{here.key} has {here.links[-1].ranks // here.domain} domains, not {group.domains}")

    def _make(self, op: str, group: Group) -> Curve:
        here, found = self.platform, ways(op, group, self.platform, self.fitted.laws)
        nbytes = knots(found, GRID)
        more = self.fitted.corrections.of(here.key, here.fabrics, op, group, nbytes)
        seconds = law(found, nbytes) * np.exp(more)
        if op != "send_recv" and group.domains > 1 < group.per_domain:  # others to talk to make no domain quicker
            within = Group(group.per_domain, group.per_domain)
            seconds = np.maximum(seconds, self.curve(op, within).many(nbytes))
        return Curve.through(nbytes, seconds).at_least(floor(op, group, here))

    def busbw(self, op: str, nbytes: Any, group: Group) -> Any:
        """Bus bandwidth in bytes/s, by the convention of nccl-tests."""
        return volume(op, group.ranks) * nbytes / self.seconds(op, nbytes, group)

    def all_to_all_v(self, sent: Any, group: Group) -> float:
        """An uneven all-to-all: `sent` is bytes from rank to rank (n x n), or a pair of totals (sent, received).

        It takes as long as an even one that gives every rank what the busiest has to send or receive.
        """
        alike = even_bytes(np.asarray(sent, np.float64), group)
        return max(float(self.seconds("all_to_all", m, g)) for m, g in alike)

    def measured(self, op: str, group: Group) -> bool:
        """Whether this curve was fitted from measured tables of this platform, not composed from link facts."""
        return (self.platform.key, op, group) in self.fitted.corrections.curves

    def origin(self, op: str, group: Group) -> str:
        """Where a curve is from: measured on this platform, near to what was (other group sizes), or composed."""
        if self.measured(op, group):
            return "measured"
        return "near measured" if self.fitted.corrections.has(self.platform.key, op, group) else "composed"


@cache
def _of(platform: Platform) -> Collectives:
    return Collectives(platform, shipped_parameters())
