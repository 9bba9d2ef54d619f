"""Times of collectives on a platform."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from presage.costs.collectives import evidence
from presage.costs.collectives.curve import GRID, Array, Correction, Corrections, TimeCurve, fit_curve
from presage.costs.collectives.evidence import TimeRange
from presage.costs.collectives.group import OPS, RankGroup, even_bytes, volume
from presage.costs.collectives.law import (
    TUNED,
    Coefficients,
    Laws,
    knots,
    law_seconds,
    least_seconds_per_byte,
    protocol_costs,
)
from presage.errors import PresageError
from presage.files.reading import DATA
from presage.hardware import Platform


class Collectives:
    """Collective times on one platform, by bytes and group. Curves are built on first use."""

    def __init__(self, platform: Platform, fitted: CollectiveParameters) -> None:
        self.platform, self.fitted = platform, fitted
        self._curves: dict[tuple[str, RankGroup], TimeCurve] = {}

    @classmethod
    def of(cls, platform: Platform) -> Collectives:
        """The model of a platform as it ships."""
        return _of(platform)

    @overload
    def seconds(self, op: str, nbytes: float, group: RankGroup) -> float: ...
    @overload
    def seconds(self, op: str, nbytes: npt.NDArray[Any], group: RankGroup) -> Array: ...
    def seconds(self, op: str, nbytes: Any, group: RankGroup) -> Any:
        """Seconds of an op; 0 for one rank or no bytes."""
        if group.ranks == 1:
            return 0.0 * nbytes
        curve = self._curves.get((op, group)) or self.curve(op, group)
        if isinstance(nbytes, np.ndarray):
            return np.where(nbytes > 0, curve.many(nbytes), 0.0)
        return curve.at(nbytes) if nbytes > 0 else 0.0

    def curve(self, op: str, group: RankGroup) -> TimeCurve:
        """The curve of an op in a group, made once."""
        if op not in OPS:
            raise PresageError(f"unknown collective {op!r}: choose from {', '.join(OPS)}")
        if (op, group) not in self._curves:
            self._check(group)
            self._curves[op, group] = self._make(op, group)
        return self._curves[op, group]

    def _check(self, group: RankGroup) -> None:
        here = self.platform
        if group.per_domain > here.domain:
            raise PresageError(f"{here.key} has {here.domain} GPUs in a domain, not {group.per_domain}")
        if group.domains * here.domain > here.links[-1].ranks:
            raise PresageError(f"{here.key} has {here.links[-1].ranks // here.domain} domains, not {group.domains}")

    def _make(self, op: str, group: RankGroup) -> TimeCurve:
        here, protocols = self.platform, protocol_costs(op, group, self.platform, self.fitted.laws)
        nbytes = knots(protocols, GRID)
        more = self.fitted.corrections.of(here.key, here.fabrics, op, group, nbytes)
        seconds = law_seconds(protocols, nbytes) * np.exp(more)
        for part in _parts(op, group):  # others to talk to make no part of a group quicker
            seconds = np.maximum(seconds, self.curve(op, part).many(nbytes))
        return TimeCurve.through(nbytes, seconds).at_least(least_seconds_per_byte(op, group, here))

    def busbw(self, op: str, nbytes: Any, group: RankGroup) -> Any:
        """Bus bandwidth in bytes/s, by the convention of nccl-tests."""
        took = self.seconds(op, nbytes, group)  # none for no bytes
        return volume(op, group.ranks) * nbytes / np.maximum(took, np.finfo(float).tiny)

    def all_to_all_v(self, sent: Any, group: RankGroup) -> float:
        """An uneven all-to-all: `sent` is bytes from rank to rank (n x n), or a pair of totals (sent, received).

        It takes as long as an even one in which every rank sends what the busiest sends or receives.
        """
        alike = even_bytes(np.asarray(sent, np.float64), group)
        return max(float(self.seconds("all_to_all", m, g)) for m, g in alike)

    def measured(self, op: str, group: RankGroup) -> bool:
        """Whether this curve was fitted from measured tables of this platform, not composed from link facts."""
        return (self.platform.key, op, group) in self.fitted.corrections.curves

    def origin(self, op: str, group: RankGroup) -> str:
        """Where a curve is from: measured on this platform, near to what was (other group sizes), or composed."""
        if self.measured(op, group):
            return "measured"
        return "near measured" if self.fitted.corrections.has(self.platform.key, op, group) else "composed"

    def time_range(self, op: str, group: RankGroup) -> TimeRange:
        """How much of the predicted time this op takes in nine of ten cases, by what was measured that is like it."""
        origin, corrections = self.origin(op, group), self.fitted.corrections
        if origin == "measured":
            return evidence.MEASURED
        if group.domains > 1:
            return evidence.NODES if group.domains <= evidence.SEEN_NODES else evidence.MORE_NODES
        if origin == "near measured":
            return evidence.NEAR
        alike = corrections.alike(self.platform.fabrics, op, group)
        return evidence.SAME_LINKS if alike else evidence.OTHER_LINKS


def _parts(op: str, group: RankGroup) -> list[RankGroup]:
    """Smaller groups that a group is never quicker than: one domain's part of it, a domain's first ranks."""
    if op == "send_recv":
        return []
    if group.domains > 1:
        return [RankGroup(group.per_domain, group.per_domain)] if group.per_domain > 1 else []
    return [RankGroup(TUNED, TUNED)] if group.ranks > TUNED else []


@cache
def _of(platform: Platform) -> Collectives:
    return Collectives(platform, with_measured(shipped_parameters(), platform))


# ---- fitted parameters as a file

SHIPPED = DATA / "collectives/nccl.json"


@dataclass(frozen=True)
class CollectiveParameters:
    """Fitted parameters: laws by fabric, corrections by curve."""

    laws: Laws
    corrections: Corrections


def load_parameters(path: Path) -> CollectiveParameters:
    """Fitted parameters from their file, as `presage_fit.collectives.save_parameters` writes it."""
    table: dict[str, Any] = json.loads(path.read_text())
    laws = {f: {p: Coefficients(*c) for p, c in law_seconds.items()} for f, law_seconds in table["laws"].items()}
    curves = {
        (c["platform"], c["op"], RankGroup(c["ranks"], c["per_domain"])): Correction(c["first"], tuple(c["values"]))
        for c in table["curves"]
    }
    return CollectiveParameters(laws, Corrections(curves, table["fabrics"]))


def with_measured(fitted: CollectiveParameters, here: Platform) -> CollectiveParameters:
    """Parameters with corrections from the curves in a platform's own file; these come before all others."""
    if not here.measured:
        return fitted
    curves = dict(fitted.corrections.curves)
    for c in here.measured:
        if c.op not in OPS:
            raise PresageError(f"{here.key}: unknown collective {c.op!r}: choose from {', '.join(OPS)}")
        group, nbytes = RankGroup(c.ranks, c.per_domain), np.array(c.nbytes)
        expected = law_seconds(protocol_costs(c.op, group, here, fitted.laws), nbytes)
        curves[here.key, c.op, group] = fit_curve(nbytes, np.log(np.array(c.seconds) / expected))
    fabrics = fitted.corrections.fabrics | {here.key: here.fabrics}
    return CollectiveParameters(fitted.laws, Corrections(curves, fabrics))


@cache
def shipped_parameters() -> CollectiveParameters:
    """The parameters that ship with presage."""
    return load_parameters(SHIPPED)


# ---- bus bandwidths of a platform

SIZES = tuple(2.0**k for k in (10, 16, 20, 24, 28, 32))
SHOWN = ("all_reduce", "all_gather", "all_to_all")


@dataclass(frozen=True, slots=True)
class BusBandwidth:
    """Bus bandwidth of one op in one group, by size."""

    op: str
    group: RankGroup
    origin: str
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    busbw: tuple[float, ...]  # bytes/s, as nccl-tests counts it
    range: TimeRange


def bus_table(platform: Platform) -> list[BusBandwidth]:
    """Bus bandwidths within one domain and across two and sixteen."""
    sizes = dict.fromkeys([platform.domain, *(n * platform.domain for n in (2, 16))])
    reached = [n for n in sizes if n <= platform.links[-1].ranks]
    return [_bus(Collectives.of(platform), op, RankGroup.of(platform, n)) for op in SHOWN for n in reached]


def _bus(model: Collectives, op: str, group: RankGroup) -> BusBandwidth:
    nbytes = np.array(SIZES)
    seconds, bus = model.seconds(op, nbytes, group), model.busbw(op, nbytes, group)
    return BusBandwidth(
        op,
        group,
        model.origin(op, group),
        SIZES,
        tuple(seconds.tolist()),
        tuple(bus.tolist()),
        model.time_range(op, group),
    )
