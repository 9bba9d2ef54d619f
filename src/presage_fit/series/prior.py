"""What other groups of runs say about a group of which only two or three runs are known.

Split: a prior for a group is learned from other groups only (`learn`); the one that ships is learned from all groups of
MLPerf Training v5.0, single steps and block means apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.noise.priors import skewed_shape
from presage_fit.series.bulk import CELLS
from presage_fit.series.levels import LevelPrior, learn_levels

if TYPE_CHECKING:
    from presage_fit.series.model import SeriesFit

__all__ = ["Scale", "SeriesPrior", "learn"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """A standard deviation that is about `sd`, known as well as from `dof` deviations (scaled inverse chi-square)."""

    sd: float
    dof: float

    def variances(self, rng: np.random.Generator, squares: float, dof: float, draws: int) -> Floats:
        """Draws of the variance, after deviations whose squares sum up to `squares`."""
        return np.asarray((self.dof * self.sd**2 + squares) / rng.chisquare(self.dof + dof, draws))

    def estimate(self, squares: float, dof: float) -> float:
        return float(np.sqrt((self.dof * self.sd**2 + squares) / (self.dof + dof)))

    def interval(self, squares: float, dof: float) -> tuple[float, float]:
        from scipy.special import chdtri

        total = self.dof * self.sd**2 + squares
        return tuple(float(np.sqrt(total / chdtri(self.dof + dof, p))) for p in (0.05, 0.95))  # type: ignore[return-value]


def _flat() -> Floats:
    return np.full(len(CELLS), 1.0 / len(CELLS))


@dataclass(frozen=True, eq=False)
class SeriesPrior:
    levels: LevelPrior = field(default_factory=LevelPrior)  # of sister runs
    slope: Scale = Scale(0.001, 2.0)  # their own drifts
    bulk: Scale = Scale(0.001, 1.0)  # width of a group's residuals
    width: Scale = Scale(0.35, 4.0)  # of the logarithm of their residuals' widths
    event: Scale = Scale(0.25, 3.0)  # an event's excess in sister runs, of the excess
    cells: Floats = field(default_factory=_flat)
    shape: Floats = field(default_factory=skewed_shape)
    shape_weight: float = 40.0  # residuals it counts as
    stall_rate: float = 0.01  # a record
    stall_weight: float = 0.5  # records x rate it counts as
    dispersion: float = 0.8  # of stalls between runs: 1 / variance of the runs' rates over their mean
    stall_seconds: float = 1.0  # median
    stall_log_sd: float = 1.4
    stall_seconds_weight: float = 3.0  # stalls it counts as
    groups: int = 0  # learned from


def learn(fits: Sequence[SeriesFit]) -> SeriesPrior:
    """From other groups' fits."""
    start = SeriesPrior()
    if len(fits) < 3:
        return start
    rates = np.array([(f.stalls.counts.sum() + 0.3) / max(1, f.stalls.records.sum()) for f in fits])
    sizes = [np.log(f.stalls.seconds) for f in fits if len(f.stalls.seconds)]
    pooled = np.concatenate(sizes) if sizes else np.array([])
    return SeriesPrior(
        levels=learn_levels([f.level_evidence for f in fits if f.runs > 1]),
        slope=_scale([(f.slope_squares, f.runs - 1) for f in fits], start.slope),
        bulk=_scale([(f.bulk.dof * f.bulk.width**2, f.bulk.dof) for f in fits], start.bulk),
        width=_scale([(f.width_squares, f.runs - 1) for f in fits if not f.shared.few], start.width),
        event=_scale([(e.squares, e.dof) for f in fits for e in f.events.values()], start.event),
        cells=_cells([f.bulk.evidence for f in fits]),
        shape=np.mean([f.bulk.shape for f in fits if f.bulk.scored >= 20] or [start.shape], axis=0),
        stall_rate=float(np.exp(np.log(rates).mean() + np.log(rates).var() / 2)),
        stall_weight=float(np.clip(1 / max(float(np.log(rates).var()), 0.1), 0.2, 5.0)),
        dispersion=start.dispersion,
        stall_seconds=float(np.exp(np.median(pooled))) if len(pooled) >= 5 else start.stall_seconds,
        stall_log_sd=float(pooled.std()) if len(pooled) >= 5 else start.stall_log_sd,
        groups=len(fits),
    )


def _scale(seen: Sequence[tuple[float, float]], start: Scale) -> Scale:
    """The scale and its dof that make the groups' sums of squares likeliest (each over its dof is an F variable)."""
    from scipy.special import betaln

    pairs = [(s, d) for s, d in seen if d > 0 and s >= 0]
    if len(pairs) < 3:
        return start
    squares, dofs = (np.array(v, np.float64) for v in zip(*pairs, strict=True))
    squares = np.maximum(squares, 1e-18)
    middle = float(np.median(squares / dofs)) or start.sd**2
    best = (-np.inf, start)
    for dof in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0):
        for var in middle * np.exp(np.linspace(-2.5, 2.5, 51)):
            f = squares / (dof * var)
            fit = np.sum(dofs / 2 * np.log(f) - (dofs + dof) / 2 * np.log1p(f) - betaln(dofs / 2, dof / 2))
            best = max(best, (float(fit), Scale(float(np.sqrt(var)), dof)), key=lambda b: b[0])
    return best[1]


def _cells(evidence: Sequence[Floats]) -> Floats:
    """How often each cell is the case: from a flat start, five rounds of expectation and maximisation."""
    weights = _flat()
    each = np.array([np.exp(e - e.max()) for e in evidence])
    for _ in range(5):
        posterior = each * weights
        weights = (posterior / posterior.sum(axis=1, keepdims=True)).mean(axis=0)
    return np.asarray(0.9 * weights + 0.1 * _flat())
