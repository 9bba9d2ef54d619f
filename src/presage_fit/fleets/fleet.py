"""A fleet of GPUs, each timed on the same work: how far apart they are, how many are slow, and what the slowest costs.

A GPU's factor is the median of its times over that of the others' medians. Between GPUs (spatial) and within one
(temporal) are told apart; what stands out at the slow end is a part of its own (`tail`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.noise.distribution import Distribution, LogNormal, Mixture
from presage.noise.model import Belief, CredibleInterval, NoiseModel, SlowGpus, WorkSpread
from presage_fit.fleets.files import Measured
from presage_fit.fleets.prior import KnownFleet, without
from presage_fit.fleets.tail import MAD, Ranged, Tail, body_sd, fit_tail

__all__ = ["Fleet", "Variation", "fit_fleet"]

Floats = NDArray[np.float64]
FEWEST = 8  # GPUs that make a fleet
Z90 = 1.6448536269514722


@dataclass(frozen=True)
class Variation:
    """Standard deviations of log time: between GPUs, and run to run on one GPU (None: each was timed once)."""

    spatial: float
    temporal: float | None
    usual: float | None  # temporal, of most rows: a few bad ones do not count
    lasting: float  # share of the body's variance between GPUs that is found again in other runs of the same GPUs


@dataclass(frozen=True, eq=False)
class Fleet:
    """What per-GPU measurements tell."""

    name: str
    gpus: tuple[str, ...]
    factors: Floats  # of each, 1 for the median GPU
    rows: int
    variation: Variation
    tail: Tail
    skipped: tuple[tuple[str, str], ...] = ()

    @cached_property
    def distribution(self) -> Distribution:
        """Of a GPU's factor: body and slow part at their estimates."""
        found = self.tail.numbers()
        body, share = LogNormal(float(np.exp(self.tail.middle)), found["sd"].value), found["share"].value
        slow = LogNormal(found["factor"].value, found["width"].value)
        return Mixture((body, slow), (1 - share, share))

    def largest(self, n: int) -> Ranged:
        """The factor of the slowest of n GPUs, on average."""
        return self.tail.largest(n)

    def largest_quantile(self, n: int, p: float) -> Ranged:
        """What the slowest of n GPUs does not exceed with probability p."""
        return self.tail.largest_quantile(n, p)

    def quantile(self, p: float) -> Ranged:
        """The factor that a share p of GPUs does not exceed, p from a half on."""
        return self.tail.quantile(p)

    def rank_sd(self) -> Ranged:
        """Of the body, as far as it lasts from run to run."""
        found, lasting = self.tail.numbers()["sd"], float(np.sqrt(self.variation.lasting))
        return Ranged(found.value * lasting, found.low * lasting, found.high * lasting)

    def belief(self, kind: str = "products") -> Belief:
        """As noise of a class of work."""
        rank, found, own = self.rank_sd(), self.tail.numbers(), self.variation.usual or 0.0
        slow = SlowGpus(found["share"].value, LogNormal(found["factor"].value, found["width"].value))
        told = {f"spread.{kind}.rank": rank, "slow.share": found["share"]}
        told |= {"slow.factor.median": found["factor"], "slow.factor.log_sd": found["width"]}
        intervals = {p: CredibleInterval(e.low, e.high) for p, e in told.items()}
        if own:
            wide = np.exp(Z90 / np.sqrt(2 * max(self.rows - len(self.gpus), 1)))
            intervals[f"spread.{kind}.own"] = CredibleInterval(float(own / wide), float(own * wide))
        source = f"{self.name}: {len(self.gpus)} GPUs, {self.rows} rows"
        spread = WorkSpread(rank=rank.value, own=own)
        return Belief(NoiseModel({kind: spread}, slow), intervals, {f"spread.{kind}": source, "slow": source})


def fit_fleet(measured: Measured, fleets: Sequence[KnownFleet] | None = None) -> Fleet:
    """From a table, and what other fleets say of slow GPUs (those of other sites that come with presage)."""
    names, own = np.unique(np.array(measured.gpus), return_inverse=True)
    if len(names) < FEWEST:
        what = f"has {len(names)} GPUs: it takes {FEWEST} at least to tell how far apart they are"
        raise InputError(measured.name, what)
    logs = _relative(measured, own)
    factors = np.array([np.median(logs[own == g]) for g in range(len(names))])
    shift = float(np.median(factors))
    tail = fit_tail(factors - shift, without(measured.name) if fleets is None else fleets)
    variation = _variation(logs, own, factors)
    kept = tuple(str(n) for n in names)
    return Fleet(measured.name, kept, np.exp(factors - shift), len(logs), variation, tail, measured.skipped)


def _relative(measured: Measured, own: NDArray[np.int64]) -> Floats:
    """Log of each time over what is usual for its work."""
    logs = np.log(np.array(measured.times))
    works = np.array(measured.works)
    for work in np.unique(works):
        here = works == work
        each = [np.median(logs[here & (own == g)]) for g in np.unique(own[here])]
        logs[here] -= np.median(each)
    return np.asarray(logs)


def _variation(logs: Floats, own: NDArray[np.int64], factors: Floats) -> Variation:
    """Between GPUs by their medians, within them by sums of squares and by what is usual."""
    counts = np.bincount(own)
    spatial, free = float(factors.std(ddof=1)), len(logs) - len(counts)
    if not free:
        return Variation(spatial, None, None, 1.0)
    left = logs - (np.bincount(own, logs) / counts)[own]
    several = counts[own] > 1
    scale = np.sqrt(counts[own] / np.maximum(counts[own] - 1, 1))
    usual = float(np.median(np.abs(left * scale)[several])) / MAD
    return Variation(spatial, float(np.sqrt(np.sum(left**2) / free)), usual, _lasting(logs, own))


def _lasting(logs: Floats, own: NDArray[np.int64]) -> float:
    """Every other row of each GPU against the rest of its rows: what they share, of what is in their mean."""
    rows = [logs[own == g] for g in range(own.max() + 1)]
    halves = np.array([(np.median(r[::2]), np.median(r[1::2])) for r in rows if len(r) > 1])
    if len(halves) < FEWEST:
        return 1.0
    both, apart = body_sd(halves.sum(axis=1)), body_sd(halves[:, 0] - halves[:, 1])
    return max(0.0, 1 - (apart / both) ** 2)
