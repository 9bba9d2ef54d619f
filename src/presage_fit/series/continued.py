"""A long series goes on: what its next records look like, from those seen so far.

A card under power control does not repeat a smooth curve: it steps between clocks, each for hundreds of kernels, and
how often it sits at which one changes as it warms up. So the future is drawn as blocks of the past, whole stretches
in their own order, later ones more often; what comes before the series has settled is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCKS", "continued", "settled", "slow_share"]

Floats = NDArray[np.float64]
PARTS = 40  # stretches that are compared to find where a series has settled
BLOCKS = 20  # a drawn block is this part of the settled series
HALF_LIFE = 0.5  # of the settled series: blocks this much older are half as likely


def settled(values: Floats) -> int:
    """Where a series has settled: stretches from there on have medians and p95s like those of its later half."""
    parts = np.array_split(np.arange(len(values)), min(PARTS, max(2, len(values) // 5)))
    seen = np.array([np.quantile(values[p], [0.5, 0.95]) for p in parts])
    late = seen[len(parts) // 2 :]
    margin = np.ptp(late, axis=0) / 4 + 2e-4 * late[:, 0].mean()
    like = ((seen >= late.min(axis=0) - margin) & (seen <= late.max(axis=0) + margin)).all(axis=1)
    return int(parts[int(np.argmax(like))][0])


def continued(values: Floats, records: int, rng: np.random.Generator, draws: int = 200) -> Floats:
    """[draws, records]: what may come next."""
    past = values[settled(values) :]
    size = max(1, len(past) // BLOCKS)
    starts = np.arange(len(past) - size + 1)
    weight = np.exp2(starts / (HALF_LIFE * len(past)))
    chosen = rng.choice(starts, (draws, -(-records // size)), p=weight / weight.sum())
    at = (chosen[..., None] + np.arange(size)).reshape(draws, -1)[:, :records]
    return np.asarray(past[at])


def slow_share(values: Floats, size: int = 25) -> float:
    """How much of the variance stays in means of `size` neighbours: 1 if they are alike, 1/size if unrelated."""
    clipped = np.clip(values, *np.quantile(values, [0.005, 0.995]))
    whole = clipped[: len(clipped) // size * size]
    total = float(whole.var())
    return float(whole.reshape(-1, size).mean(axis=1).var()) / total if total > 0 and len(whole) else 0.0
