"""Distributions as small values: a mean, quantiles, draws; they add, scale, mix, and take the largest of many.

`a + b` is the sum of two independent draws, `2 * a` and `a + 1` are plain, `a.largest(n)` is the largest of n
independent ones. What is shared between draws must be drawn first and only the rest taken to a power: see `largest`.
"""

from presage.noise.distribution.composed import Largest, Mixture, Scaled, Spliced, Sum
from presage.noise.distribution.families import Distribution, Empirical, Fixed, Gamma, LogNormal, Normal, Pareto

__all__ = [
    "Distribution", "Empirical", "Fixed", "Gamma", "Largest", "LogNormal", "Mixture", "Normal", "Pareto", "Scaled",
    "Spliced", "Sum",
]  # fmt: skip
