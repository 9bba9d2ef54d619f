"""Guarantee: quantiles of a job's step and run, and how sure they are where the noise is not known exactly.

The draws' own error shrinks with their number; what the noise is believed to be does not. So the noise is drawn too,
`sets` times, each with the same random numbers, and the middle 90% of what comes out is the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from presage.noise.model import Belief
from presage.noise.sampling import Estimate
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.draw import Draws, transfers_vary, without_fitted_stragglers
from presage.prediction.draws.draw_request import DrawRequest, draw_all
from presage.prediction.draws.step_model import StepModel

__all__ = ["QUANTILES", "Guarantee", "guarantee"]

QUANTILES = (0.05, 0.5, 0.9, 0.95, 0.99)
SETS = 16
FEWEST = 2_000


@dataclass(frozen=True, eq=False)
class Guarantee:
    """A job's step as a distribution; `others` are draws with what the noise may be as well."""

    draws: Draws
    others: tuple[Draws, ...] = ()

    def quantile(self, p: float) -> Estimate:
        """Of a step."""
        return self._with_interval(lambda d: d.quantile(p))

    def run_quantile(self, p: float) -> Estimate:
        """Of a run's mean step."""
        return self._with_interval(lambda d: d.run_quantile(p))

    def exceeds(self, seconds: float) -> Estimate:
        """The probability that a step takes longer."""
        return self._with_interval(lambda d: d.exceeds(seconds))

    @property
    def mean(self) -> Estimate:
        return self._with_interval(lambda d: d.mean)

    def _with_interval(self, told: Callable[[Draws], Estimate]) -> Estimate:
        value = told(self.draws)
        if not self.others:
            return value
        low, high = np.quantile([told(d).value for d in self.others], [0.05, 0.95])
        return replace(value, low=float(min(low, value.value)), high=float(max(high, value.value)))


def guarantee(
    shape: StepModel, belief: Belief, seed: int = 0, count: int = 10_000, sets: int = SETS, pool: Pool = THREADS_2
) -> Guarantee:
    """With `sets` = 0 the noise is taken as it is believed to be."""
    rng = np.random.default_rng((seed, 1))
    may_be = [belief.drawn(rng) for _ in range(sets if belief.intervals else 0)]
    if transfers_vary(belief.noise):
        shape.curves  # noqa: B018 - which all of them share
    asked = [DrawRequest(without_fitted_stragglers(shape, belief.noise), belief.noise, count)]
    asked += [DrawRequest(without_fitted_stragglers(shape, noise), noise, min(count, FEWEST)) for noise in may_be]
    found = dict(draw_all(asked, seed, pool))
    return Guarantee(found[0], tuple(found[i] for i in range(1, len(asked))))
