"""The ordinary part of the residuals: how wide, of what shape, and how much of it goes with the step before.

Residuals are turned into normal scores; the scores are one part that goes with the step before (an AR(1) series) and
one that is new in each step. The two numbers of that, its share and its correlation, are known as weights on a grid
(exactly, by the Kalman filter, for all cells at once), which a prior can be multiplied into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.noise.priors import SCORES

__all__ = ["CELLS", "LIMIT", "PHI", "SCORES", "SHARE", "Bulk", "bulk_of", "latent", "local_spread"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PHI = np.array([0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.985, 0.995])
SHARE = np.array([0.0, 0.08, 0.16, 0.25, 0.35, 0.5, 0.65, 0.8, 0.97])
CELLS = [(p, s) for p in PHI for s in SHARE]
LIMIT = 6.0  # robust standard deviations; what is longer is a stall
LONG = 4000  # records; of longer runs stretches are looked at
TINY = 1e-7  # of a step: a spread below it is none


@dataclass(frozen=True, eq=False)
class Bulk:
    widths: Floats  # [runs]: robust standard deviation, of the level
    spread: Floats  # [records]: how much wider than usual, shared by runs
    shape: Floats  # residuals in widths at each of SCORES
    evidence: Floats  # log likelihood of each cell of the grid
    scored: int  # records behind it
    stalls: Bools  # [runs, records]: records too long for it
    dof: float = 1.0  # records behind the widths, less what the curve took

    @property
    def width(self) -> float:
        """A typical run's."""
        return float(np.exp(np.log(np.maximum(self.widths, TINY)).mean()))


def bulk_of(left: Floats, plain: Bools, known: float, few: bool = False) -> Bulk:
    """Of residuals [runs, records] about a curve that goes along with a share `known` of the records' noise.

    Of `few` records one width for all runs."""
    lost = np.sqrt(max(0.25, 1 - known))
    each = [left[plain]] * len(left) if few else [row[ok] for row, ok in zip(left, plain, strict=True)]
    widths = np.array([_width(x) for x in each]) / lost
    units = left / np.maximum(widths, TINY)[:, None]
    spread = local_spread(np.where(plain, np.minimum(np.abs(units), 4.0), np.nan))
    units = units / spread
    stalls = plain & (units > LIMIT)
    body = plain & ~stalls & np.isfinite(units)
    shape, _ = _shape(np.where(body, units, np.nan))
    apart = _apart(np.where(body, left, np.nan), np.maximum(widths, TINY)) / spread
    scored = int(body.sum())
    return Bulk(
        widths, spread, shape, _evidence(_pieces(_shape(apart)[1])), scored, stalls, scored * max(0.1, 1 - known)
    )


def _apart(left: Floats, widths: Floats) -> Floats:
    """Each run less the next: the shared curve is in neither, however well it is known. One run: as it is."""
    if len(left) == 1:
        return left / widths[:, None]
    return (left[1:] - left[:-1]) / np.hypot(widths[1:], widths[:-1])[:, None]


def _width(x: Floats) -> float:
    return float(1.4826 * np.median(np.abs(x - np.median(x)))) if len(x) else 0.0


def local_spread(size: Floats, prior: float = 12.0) -> Floats:
    """How much wider residuals are at each place than over all, from |residuals| of all runs near it, leaning to 1."""
    n = size.shape[1]
    ok = np.isfinite(size)
    usual = float(size[ok].mean()) if ok.any() else 0.0
    if n < 40 or usual <= 0:
        return np.ones(n)
    total, seen = np.nan_to_num(size).sum(0), ok.sum(0).astype(np.float64)
    half = np.clip(5 + np.arange(n) / 3, 5, max(12, n / 10)).astype(np.int64)
    low, high = np.maximum(0, np.arange(n) - half), np.minimum(n, np.arange(n) + half + 1)
    sums, counts = np.append(0.0, np.cumsum(total)), np.append(0.0, np.cumsum(seen))
    near, many = sums[high] - sums[low], counts[high] - counts[low]
    return np.asarray((near / usual + prior) / (many + prior))


def _shape(units: Floats) -> tuple[Floats, Floats]:
    """Residuals at each of SCORES, and each residual's own score."""
    from scipy.special import ndtri

    ok = np.isfinite(units)
    n = int(ok.sum())
    if n == 0:
        return np.zeros(len(SCORES)), np.full(units.shape, np.nan)
    scores = np.full(units.shape, np.nan)
    order = np.empty(n)
    order[np.argsort(units[ok], kind="stable")] = ndtri((np.arange(n) + 0.5) / n)
    scores[ok] = order
    return np.interp(SCORES, np.sort(order), np.sort(units[ok])), scores


def _pieces(scores: Floats) -> Floats:
    """Of long runs some stretches, as runs of their own: they tell as much as is needed."""
    if scores.shape[1] <= LONG:
        return scores
    starts = np.linspace(0, scores.shape[1] - LONG // 4, 4).astype(np.int64)
    return np.concatenate([scores[:, k : k + LONG // 4] for k in starts])


def _evidence(scores: Floats) -> Floats:
    """Log likelihood of all runs' scores [runs, records] for each cell, whatever their levels and slopes are.

    A NaN is a step not seen. The filter runs over the scores, a constant and a line at once; what the latter two can
    explain is taken out (restricted likelihood: a fitted line would look like less correlation).
    """
    phi, share = (np.array(v)[None, :, None] for v in zip(*CELLS, strict=True))
    mean = np.zeros((len(scores), len(CELLS), 3))
    var = np.broadcast_to(share[..., 0], mean.shape[:2]).copy()
    logs, squares = np.zeros(var.shape), np.zeros((*var.shape, 3, 3))
    for y, place in zip(scores.T, np.linspace(-1, 1, scores.shape[1]), strict=True):
        seen = np.isfinite(y)
        width = var + 1 - share[..., 0]
        given = np.stack([np.where(seen, y, 0.0), np.ones(len(y)), np.full(len(y), place)], axis=1)
        off = np.where(seen[:, None, None], given[:, None] - mean, 0.0)
        logs += np.where(seen[:, None], np.log(width), 0.0)
        squares += off[..., :, None] * (off / width[..., None])[..., None, :]
        gain = np.where(seen[:, None], var / width, 0.0)
        mean = phi * (mean + gain[..., None] * off)
        var = phi[..., 0] ** 2 * var * (1 - gain) + (share * (1 - phi**2))[..., 0]
    return np.asarray(_restricted(logs, squares, np.isfinite(scores).sum(axis=1)).sum(axis=0))


def _restricted(logs: Floats, squares: Floats, seen: NDArray[np.int64]) -> Floats:
    """Of each run and cell, from sums of products of (scores, constant, line); nothing from runs of a few records."""
    lines = squares[..., 1:, 1:] + 1e-9 * np.eye(2)
    both = squares[..., 1:, 0]
    explained = (both * np.linalg.solve(lines, both[..., None])[..., 0]).sum(axis=-1)
    fit = -0.5 * (logs + squares[..., 0, 0] - explained + np.linalg.slogdet(lines)[1])
    return np.where(seen[:, None] > 8, fit, 0.0)


def latent(rng: np.random.Generator, phi: Floats, share: Floats, steps: int) -> Floats:
    """[draws, steps]: standard normal series, each with its own correlation and share."""
    draws = len(phi)
    kept, state = np.empty((steps, draws)), rng.standard_normal(draws)
    fresh = np.sqrt(1 - phi**2)
    for k, shock in enumerate(rng.standard_normal((steps, draws))):
        state = phi * state + fresh * shock if k else state
        kept[k] = state
    return np.asarray((np.sqrt(share) * kept + np.sqrt(1 - share) * rng.standard_normal((steps, draws))).T)
