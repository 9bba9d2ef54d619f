"""Scores of a predicted distribution against what came: quantile errors, Wasserstein, CRPS, coverage, KS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from presage.noise.distribution import Distribution

__all__ = [
    "EVEN",
    "Forecast",
    "best_family",
    "crps",
    "forecast",
    "ks_critical",
    "ks_distance",
    "ks_floor",
    "of_sample",
    "wasserstein",
]

Floats = NDArray[np.float64]
LEVELS = (0.5, 0.95, 0.99)
BINS = 10
EVEN = (np.arange(1000) + 0.5) / 1000  # probabilities that stand for a distribution


@dataclass(frozen=True)
class Forecast:
    """How one run compares with what was predicted of it; errors are fractions."""

    n: int
    p50_error: float
    p95_error: float
    p99_error: float
    w1_over_mean: float
    crps: float  # of the mean step
    covered_95: int  # steps not above their own predicted 95% quantile
    ks: float
    ks_floor: float
    pit: tuple[int, ...]  # steps in each tenth of their predicted distributions


def forecast(draws: Floats, seen: Floats, pool: Floats | None = None) -> Forecast:
    """Of draws [draws, records] against records. `pool`: the predicted distribution of the run's steps, sorted."""
    pool, mean = own_distribution(draws) if pool is None else pool, float(seen.mean())
    errors = [float(np.quantile(pool, p) / np.quantile(seen, p) - 1) for p in LEVELS]
    below = (draws < seen).mean(axis=0) + (draws == seen).mean(axis=0) / 2
    tenths = np.bincount(np.minimum((below * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return Forecast(
        n=len(seen),
        p50_error=errors[0],
        p95_error=errors[1],
        p99_error=errors[2],
        w1_over_mean=wasserstein(pool, seen) / mean,
        crps=float(crps(draws, seen).mean()) / mean,
        covered_95=int((seen <= np.quantile(draws, 0.95, axis=0)).sum()),
        ks=ks_distance(pool, seen),
        ks_floor=ks_floor(len(seen)),
        pit=tuple(int(t) for t in tenths),
    )


def own_distribution(draws: Floats) -> Floats:
    """The distribution of a run's own steps, sorted: for each quantile the middle one of the drawn runs'."""
    return np.asarray(np.sort(np.median(np.sort(draws, axis=1), axis=0)))


def of_sample(times: Floats, n: int, p: float) -> float:
    """The quantile that n steps show, in the middle of many such samples: few steps show less of a tail than there is,
    or one step makes all of it."""
    count = max(1, len(times) // n)
    mixed = np.random.default_rng(0).permutation(times)[: count * n]
    return float(np.median(np.quantile(mixed.reshape(count, -1), p, axis=1)))


def crps(draws: Floats, seen: Floats) -> Floats:
    """Continuous ranked probability score of each record, E|X - y| - E|X - X'| / 2, from draws [draws, records]."""
    ordered = np.sort(draws, axis=0)
    n = len(ordered)
    rank = (2 * np.arange(1, n + 1) - n - 1) / n**2
    return np.asarray(np.abs(draws - seen).mean(axis=0) - rank @ ordered)


def ks_floor(n: int) -> float:
    """Expected Kolmogorov-Smirnov distance of n independent draws from their own distribution."""
    return 0.869 / float(np.sqrt(n))


def ks_critical(n: int) -> float:
    """Exceeded by such n draws in 5% of cases."""
    return 1.358 / float(np.sqrt(n))


def ks_distance(pool: Floats, seen: Floats) -> float:
    """Largest distance between the predicted distribution (sorted draws) and that of the records."""
    y = np.sort(seen)
    n = len(y)
    upper = np.searchsorted(pool, y, "right") / len(pool)
    lower = np.searchsorted(pool, y, "left") / len(pool)
    return float(max(np.max(np.arange(1, n + 1) / n - lower), np.max(upper - np.arange(n) / n), 0.0))


def wasserstein(pool: Floats, seen: Floats) -> float:
    """Area between the two quantile functions."""
    p = (np.arange(20_000) + 0.5) / 20_000
    mine = pool[(p * len(pool)).astype(np.int64)]
    theirs = np.sort(seen)[(p * len(seen)).astype(np.int64)]
    return float(np.abs(mine - theirs).mean())


def best_family(train: Floats) -> tuple[str, Distribution]:
    """Normal, Gamma or LogNormal with the records' moments: whichever has the least KS distance to them."""
    from presage.noise.distribution import Gamma, LogNormal, Normal

    mean, sd, logs = float(train.mean()), float(train.std()), np.log(train)
    sd = max(sd, 1e-9 * mean)
    families: dict[str, Distribution] = {
        "Normal": Normal(mean, sd),
        "Gamma": Gamma(mean, sd / mean),
        "LogNormal": LogNormal(float(np.exp(logs.mean())), max(float(logs.std()), 1e-9)),
    }
    best = min(families, key=lambda name: ks_distance(families[name].quantile(EVEN), train))
    return best, families[best]
