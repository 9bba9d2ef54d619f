"""The distribution of GPUs' factors: a Normal body of the logarithm and a few slow ones, as far as a sample tells.

Of a slow GPU the logarithm of its factor is Normal, `size` on average and `size * width` wide. Where 50 GPUs show no
slow one there may still be some: how many comes from other fleets (`prior`), how slow from nothing but wide
limits. All combinations of body, share, size and width on a grid are weighed by how well they explain the sample, and
what is asked for (a quantile, the expected largest of n) is told for each: its median is the estimate, its middle 90%
the range. GPUs faster than the median say nothing of the slow ones: only how many they are counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from presage_fit.fleets.prior import KnownFleet, share_weights

__all__ = ["Ranged", "Tail", "body_sd", "fit_tail"]

Floats = NDArray[np.float64]
MAD = 0.6744897501960817  # median absolute deviation of a standard Normal
SHARES = np.geomspace(2e-4, 0.4, 28)
LEAST_SIZE, LARGEST_SIZE, SIZES = 3.0, 60.0, 160  # in standard deviations of the body, and how many are tried
WIDTHS = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5])
BODIES = np.linspace(-2.8, 2.8, 7)  # log of the body's sd about its first estimate, over the root of the GPUs
KEPT = 400  # combinations, drawn evenly by weight
POINTS = 150  # GPUs above the median that are taken one by one; more are put in bins
GOLDEN = 0.6180339887498949
FLAT = -600.0  # log of the density of the body, at least


@dataclass(frozen=True)
class Ranged:
    """A number and the middle 90% of what it may be."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Tail:
    """Combinations that explain a sample, each as likely as the next; logarithms."""

    middle: float
    sd: Floats
    share: Floats
    size: Floats  # of slow GPUs, in standard deviations of the body
    width: Floats  # of sizes, as a share of them

    def largest(self, n: int) -> Ranged:
        """The factor that the slowest of n GPUs has on average."""
        steps = self._steps()
        below = self._cdf(steps) ** n
        factor = np.exp(self.middle + self.sd[:, None] * steps)
        return _estimate(factor[:, 0] + np.sum((1 - (below[:, 1:] + below[:, :-1]) / 2) * np.diff(factor), axis=1))

    def quantile(self, p: float) -> Ranged:
        """The factor that a share p of GPUs does not exceed, p from a half on."""
        steps = self._steps()
        at = np.array([np.interp(p, row, steps) for row in self._cdf(steps)])
        return _estimate(np.exp(self.middle + self.sd * at))

    def largest_quantile(self, n: int, p: float) -> Ranged:
        """What the slowest of n GPUs does not exceed with probability p."""
        return self.quantile(p ** (1 / n))

    def _steps(self) -> Floats:
        """Where distributions are evaluated, in standard deviations of the body."""
        top = max(160.0, 2.7 * float(self.size.max()))
        return np.concatenate([np.linspace(-1, 6, 120), np.geomspace(6.05, top, 260)])

    def _cdf(self, steps: Floats) -> Floats:
        from scipy.special import ndtr

        share, size = self.share[:, None], self.size[:, None]
        slow = ndtr((steps - size) / (self.width[:, None] * size))
        return np.asarray((1 - share) * ndtr(steps) + share * slow)

    def numbers(self) -> dict[str, Ranged]:
        """The body's sd, the share of slow GPUs, their median factor, and the sd of its logarithm."""
        return {
            "sd": _estimate(self.sd),
            "share": _estimate(self.share),
            "factor": _estimate(np.exp(self.sd * self.size)),
            "width": _estimate(self.sd * self.size * self.width),
        }


def body_sd(logs: Floats) -> float:
    """Of most of a sample: half of it is nearer to its median than 0.67 of this. Where half are the same, of more."""
    low, high = np.quantile(logs, (0.16, 0.84))
    tried = (np.median(np.abs(logs - np.median(logs))) / MAD, (high - low) / 2, np.std(logs))
    return float(next((x for x in tried if x > 1e-6), 1e-6))


def fit_tail(logs: Floats, fleets: Sequence[KnownFleet]) -> Tail:
    """From the logarithms of GPUs' factors, and other fleets."""
    middle, first = float(np.median(logs)), body_sd(logs)
    over, counts = _binned((logs - middle) / first)
    under = len(logs) - counts.sum()
    sds = np.exp(BODIES / np.sqrt(len(logs)))
    start = (_log_shares(tuple(fleets)) + under * np.log1p(-SHARES))[:, None, None]
    sizes = np.geomspace(LEAST_SIZE, max(LARGEST_SIZE, 1.2 * over.max(initial=0.0)), SIZES)
    weights = np.array([start + _likelihood(over / s, counts, sizes) - counts.sum() * np.log(s) for s in sds])
    total = np.cumsum(np.exp(weights - weights.max()).ravel())
    picked = np.searchsorted(total, (np.arange(KEPT) + 0.5) / KEPT * total[-1])
    sd, share, width, size = np.unravel_index(picked, weights.shape)
    wide, other = _spread_out(sds), _spread_out(SHARES)  # but slow GPUs stay as slow as they are
    return Tail(middle, first * sds[sd] * wide, SHARES[share] * other, sizes[size] / wide, WIDTHS[width])


@cache
def _log_shares(fleets: tuple[KnownFleet, ...]) -> Floats:
    return np.asarray(np.log(share_weights(SHARES, fleets)))


def _binned(z: Floats) -> tuple[Floats, Floats]:
    """Those above the median, and how many each stands for."""
    over = z[z > 0]
    if len(over) <= POINTS:
        return over, np.ones(len(over))
    ends = np.concatenate([np.linspace(0, 6, POINTS), np.geomspace(6.04, max(6.1, over.max() * 1.001), POINTS)])
    counts, _ = np.histogram(over, ends)
    sums, _ = np.histogram(over, ends, weights=over)
    some = counts > 0
    return sums[some] / counts[some], counts[some].astype(np.float64)


def _likelihood(z: Floats, counts: Floats, sizes: Floats) -> Floats:
    """[share, width, size]: log of the density at all points."""
    body = np.maximum(-0.5 * z**2, FLAT)
    wide = WIDTHS[:, None] * sizes
    slow = -0.5 * ((z - sizes[:, None]) / wide[..., None]) ** 2 - np.log(wide)[..., None]
    ratio = np.exp(np.clip(slow - body, -700, 700))
    return np.asarray([np.log1p(s * (ratio - 1)) @ counts for s in SHARES]) + float(body @ counts)


def _spread_out(grid: Floats) -> Floats:
    """Factors that spread what is picked of a grid of equal ratios evenly over the cells its points stand for."""
    return np.asarray((grid[1] / grid[0]) ** ((GOLDEN * np.arange(KEPT)) % 1 - 0.5))


def _estimate(values: Floats) -> Ranged:
    low, middle, high = (float(x) for x in np.quantile(values, (0.05, 0.5, 0.95)))
    return Ranged(middle, low, high)
