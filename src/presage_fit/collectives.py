"""Fitting the laws and the corrections on measured tables.

A row belongs to the protocol that NCCL's tuner takes for it, so each protocol's coefficients are a least-squares
problem of five numbers, none negative, in relative errors; measurements far off count little. They lean on starting
values where rows are few: a fabric's on those of any fabric, and those on NCCL's own constants.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.curve import Corrections, fit_curve
from presage.costs.collectives.group import RankGroup
from presage.costs.collectives.law import (
    ANY,
    PROTOCOLS,
    US,
    Coefficients,
    Laws,
    ProtocolCost,
    clock_turn,
    law_seconds,
    protocol_costs,
    terms,
)
from presage.costs.collectives.model import CollectiveParameters
from presage.costs.collectives.paths import paths, tier_sizes
from presage.files import write_whole
from presage.hardware import Platform

Array = npt.NDArray[np.float64]
START = {
    "ll": Coefficients(6.6, 1.0, 2.0, 0.0, 0.0),
    "ll128": Coefficients(14.0, 3.2, 1.1, 0.0, 0.0),
    "simple": Coefficients(8.4, 5.7, 1.1, 0.0, 0.0),
    "nvls": Coefficients(25.0, 0.0, 1.4, 0.0, 0.0),
    "direct_ll": Coefficients(6.6, 0.5, 2.0, 50.0, 0.0),
    "direct": Coefficients(8.4, 0.5, 1.1, 0.0, 0.0),
}
SCALES = Coefficients(5.0, 2.0, 1.0, 1.0, 3.0)  # by how much coefficients differ between machines
ONE_PEER = {"direct_ll": replace(SCALES, own=50.0)}  # it sends to each peer by one slow channel
LEAN = 0.1  # a coefficient one scale off its starting value weighs as one row that is so far off
OUTLIER = 0.03


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One row of a table."""

    platform: Platform
    op: str
    group: RankGroup
    nbytes: float
    seconds: float


def fit(rows: Sequence[MeasuredCollective]) -> CollectiveParameters:
    """Laws from rows within one domain, then corrections from all rows."""
    near = [r for r in rows if r.group.domains == 1]
    any_law = _fabric(near, START)
    laws = {ANY: any_law}
    for fabric in dict.fromkeys(r.platform.links[0].fabric for r in near):
        laws[fabric] = _fabric([r for r in near if r.platform.links[0].fabric == fabric], any_law)
    return CollectiveParameters(laws, _corrections(rows, laws))


def _fabric(rows: Iterable[MeasuredCollective], start: dict[str, Coefficients]) -> dict[str, Coefficients]:
    by_protocol: dict[str, list[list[float]]] = {p: [] for p in start}
    for r in rows:
        protocol, row = _row(r)
        by_protocol[protocol].append(row)
    return {
        p: _solve(np.array(found).reshape(-1, 5), start[p], ONE_PEER.get(p, SCALES)) for p, found in by_protocol.items()
    }


def _row(r: MeasuredCollective) -> tuple[str, list[float]]:
    """The protocol a row was made by, and its terms as shares of its time."""
    links, sizes = r.platform.links, tier_sizes(r.platform.links, r.group)
    found = [(p, k) for p in paths(r.op, r.group, links) for k in PROTOCOLS[p.algorithm]]
    nominal = {links[0].fabric: START, ANY: START}
    taken = _taken(protocol_costs(r.op, r.group, r.platform, nominal), r.nbytes)
    path, protocol = found[taken]
    hops, wire, own, root = terms(path, links, sizes, r.op)
    turn = clock_turn(r.platform)
    scaled = [US * turn, hops * turn, wire * r.nbytes, own * r.nbytes, root * r.nbytes**0.5]
    return protocol, [v / r.seconds for v in scaled]


def _taken(found: Sequence[ProtocolCost], nbytes: float) -> int:
    """Which way the tuner takes; the nominally fastest where its mind is not known."""
    estimates = [w.tuner for w in found]
    if any(t is None for t in estimates):
        return int(np.argmin([w.seconds(np.array([nbytes]))[0] for w in found]))
    return int(np.argmin([t.latency + t.per_byte * nbytes for t in estimates if t is not None]))


def _solve(rows: Array, start: Coefficients, scales: Coefficients) -> Coefficients:
    """rows x coefficients = 1, nearly; and coefficients near their start, none negative."""
    from scipy.optimize import nnls

    strength = LEAN / np.array(astuple(scales))
    lean, goal = np.diag(strength), strength * np.array(astuple(start))
    weight = np.ones(len(rows))
    for _ in range(8):
        a = np.concatenate([rows * weight[:, None], lean])
        found = nnls(a, np.concatenate([weight, goal]))[0]
        weight = np.sqrt(1 / np.maximum(np.abs(rows @ found - 1) / OUTLIER, 1.0))
    return Coefficients(*(float(v) for v in found))


def _typical(seconds: list[float]) -> float:
    """The median, the lower of two: what disturbs a measurement makes it longer."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _corrections(rows: Sequence[MeasuredCollective], laws: Laws) -> Corrections:
    curves: dict[tuple[str, str, RankGroup], list[MeasuredCollective]] = {}
    for r in rows:
        curves.setdefault((r.platform.key, r.op, r.group), []).append(r)
    found = {}
    for key, of in curves.items():
        nbytes = np.unique([r.nbytes for r in of])
        seconds = np.array([_typical([r.seconds for r in of if r.nbytes == m]) for m in nbytes])
        expected = law_seconds(protocol_costs(of[0].op, of[0].group, of[0].platform, laws), nbytes)
        found[key] = fit_curve(nbytes, np.log(seconds / expected))
    return Corrections(found, {r.platform.key: r.platform.fabrics for r in rows})


def save_parameters(fitted: CollectiveParameters, path: Path) -> None:
    """Write fitted parameters as JSON: laws by fabric, corrections by curve."""
    laws = {f: {p: [round(v, 5) for v in astuple(c)] for p, c in law.items()} for f, law in fitted.laws.items()}
    curves = [
        {
            "platform": platform,
            "op": op,
            "ranks": group.ranks,
            "per_domain": group.per_domain,
            "first": c.first,
            "values": [round(v, 4) for v in c.values],
        }
        for (platform, op, group), c in fitted.corrections.curves.items()
    ]
    text = json.dumps({"laws": laws, "fabrics": fitted.corrections.fabrics, "curves": curves}, indent=1)
    write_whole(path, text.encode())
