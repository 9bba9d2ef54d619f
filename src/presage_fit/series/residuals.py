"""The ordinary part of the residuals: how wide, of what shape, and how much of it goes with the step before.

Residuals are turned into normal scores; the scores are one part that goes with the step before (an AR(1) series) and
one that is new in each step. The two numbers of that, its share and its correlation, are known as weights on a grid
(exactly, by the Kalman filter, for all cells at once), which a prior can be multiplied into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from presage.noise.priors import SCORES

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
    """The bulk of residuals [runs, records] about a curve that goes along with a share `known` of the records' noise.

    With `few` records one width for all runs."""
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
    """Stretches of long runs, as runs of their own: enough to estimate the correlation."""
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
    """Restricted log likelihood by run and cell, from sums of products of (scores, constant, line); 0 if short."""
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
    if (share == 1).all():
        return kept.T
    return np.asarray((np.sqrt(share) * kept + np.sqrt(1 - share) * rng.standard_normal((steps, draws))).T)


# How far apart the levels of sister runs are: most are close, now and then one is slower as a whole.
#
# A run's level is its group's base, plus a Normal of standard deviation s, plus, with probability `odd`, a Gamma of
# shape 2 and mean `slower` (an odd run stands apart: hardly slower ones are the Normal's). Two runs that agree say that
# s is small; they say little about how likely an odd run is: that comes from other groups. All of it is known as
# weights on a grid of (base, s).

SDS = np.geomspace(2e-5, 4e-2, 20)
ODD = np.array([0.02, 0.06, 0.1, 0.14, 0.18, 0.22, 0.26, 0.3, 0.34])  # even steps: each share as likely beforehand
SLOWER = np.array([0.001, 0.002, 0.004, 0.008, 0.016, 0.032])
AROUND = np.linspace(-4, 4, 13)
ALIKE = 0.5  # what a group counts: several are of one machine, and machines have odd runs more or less often


def _usual() -> Floats:
    """About 0.15%, known within a factor of 3."""
    weight = np.exp(-0.5 * (np.log(SDS / 0.0015) / np.log(3.0)) ** 2)
    return np.asarray(weight / weight.sum())


def _any() -> Floats:
    """[s, odd, slower]: odd runs of any share and size."""
    return np.asarray(_usual()[:, None, None] * np.full((1, len(ODD), len(SLOWER)), 1 / (len(ODD) * len(SLOWER))))


@dataclass(frozen=True, eq=False)
class LevelPrior:
    weights: Floats = field(default_factory=_any)  # [s, odd, slower]: how likely each is


@dataclass(frozen=True, eq=False)
class Levels:
    """What is believed of a group: weights on (base, s, odd, slower)."""

    base: Floats
    sd: Floats
    odd: Floats
    slower: Floats
    weight: Floats

    def next_run(self, rng: np.random.Generator, draws: int) -> Floats:
        """Levels of further runs."""
        at = np.searchsorted(np.cumsum(self.weight), _even(rng, draws)).clip(max=len(self.weight) - 1)
        long = -self.slower[at] / 2 * (np.log1p(-_even(rng, draws)) + np.log1p(-_even(rng, draws)))
        late = np.where(_even(rng, draws) < self.odd[at], long, 0.0)
        return np.asarray(self.base[at] + self.sd[at] * rng.standard_normal(draws) + late)

    def spread(self) -> tuple[float, float, float]:
        """Standard deviation between runs, odd ones and all: the middle of what it may be, and its 90% interval."""
        sd = np.sqrt(self.sd**2 + self.odd * (1.5 - self.odd) * self.slower**2)
        order = np.argsort(sd)
        low, middle, high = np.interp((0.05, 0.5, 0.95), np.cumsum(self.weight[order]), sd[order])
        return float(middle), float(low), float(high)


def _even(rng: np.random.Generator, draws: int) -> Floats:
    """Uniform draws, one in each of as many equal parts, in random order: few of them give steady quantiles."""
    return np.asarray(rng.permutation((np.arange(draws) + rng.random(draws)) / draws))


def levels_of(levels: Floats, prior: LevelPrior) -> Levels:
    found = []
    for s, p in zip(SDS, prior.weights, strict=True):
        base, width = _bases(levels, s)
        weight = _likelihood(levels, base, s) + np.log(width)[:, None, None] + np.log(p + 1e-12)
        grid = np.meshgrid(base, ODD, SLOWER, indexing="ij")
        found.append(np.stack([grid[0], np.full(grid[0].shape, s), grid[1], grid[2], weight]).reshape(5, -1))
    base, sd, odd, slower, weight = np.concatenate(found, axis=1)
    weight = np.exp(weight - weight.max())
    return Levels(base, sd, odd, slower, weight / weight.sum())


def _bases(levels: Floats, s: float) -> tuple[Floats, Floats]:
    """Places where the base may be, and how wide each stands for: near the runs, and below all of them."""
    below = levels.min() - np.geomspace(s, max(0.05, 2 * s), 16)
    at = np.unique(np.concatenate([(levels[:, None] + s * AROUND).ravel(), below]))
    return at, np.maximum(np.gradient(at) if len(at) > 1 else np.ones(1), 1e-12)


def _likelihood(levels: Floats, base: Floats, s: float) -> Floats:
    """Log likelihood [base, odd, slower] of the runs' levels."""
    off = (levels[None, :] - base[:, None])[..., None]
    near = -0.5 * (off / s) ** 2 - np.log(s * np.sqrt(2 * np.pi))
    half = SLOWER / 2
    far = s**2 / (2 * half**2) - off / half + _log_above(off / s - s / half) + np.log(s / half**2)
    top = np.maximum(near, far.max(axis=2, keepdims=True))
    near, far = np.exp(near - top)[:, :, None], np.exp(far - top)[:, :, None]
    both = near * (1 - ODD)[:, None] + far * ODD[:, None]  # [base, run, odd, slower]
    return np.asarray(np.log(np.maximum(both, 1e-30)).sum(axis=1) + top.sum(axis=1)[..., None])


def _log_above(z: Floats) -> Floats:
    """Log of the mean of a Normal about z, where what is below 0 counts as 0."""
    from scipy.special import log_ndtr

    bell = -0.5 * z**2 - np.log(np.sqrt(2 * np.pi))
    near = np.maximum(z, -8.0)
    exact = np.log(near * np.exp(log_ndtr(near)) + np.exp(-0.5 * near**2) / np.sqrt(2 * np.pi))
    return np.asarray(np.where(z > -8, exact, bell - 2 * np.log(np.maximum(-z, 1.0))))


def evidence(levels: Floats) -> Floats:
    """Log likelihood [s, odd, slower] of a group, over all bases: what `learn_levels` needs of it."""
    found = []
    for s in SDS:
        base, width = _bases(levels, s)
        found.append(np.logaddexp.reduce(_likelihood(levels, base, s) + np.log(width)[:, None, None], axis=0))
    return np.array(found)


def learn_levels(groups: Sequence[Floats]) -> LevelPrior:
    """How likely each (s, odd, slower) is for another group: s from its spread over groups, the two others shared."""
    if len(groups) < 3:
        return LevelPrior()
    logs = np.array(groups)  # [group, s, odd, slower]
    scale = logs.max(axis=1, keepdims=True)
    each, start = np.exp(logs - scale), _usual()[:, None, None]
    weights = np.broadcast_to(start, each.shape[1:]).copy()
    for _ in range(20):
        posterior = each * weights
        posterior /= posterior.sum(axis=1, keepdims=True)
        weights = (posterior.sum(axis=0) + 2 * start) / (len(groups) + 2)
    fit = (np.log((each * weights).sum(axis=1)) + scale[:, 0]).sum(axis=0)
    shared = np.exp(ALIKE * (fit - fit.max()))
    return LevelPrior(np.asarray(weights * (shared / shared.sum())))
