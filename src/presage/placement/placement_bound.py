"""What no placement of these groups can be below: so that it can be told how far from the best one is.

Two arguments, the larger counts. Of the (j-1) R + 1 slowest groups some replica of R has at least j: wherever they are
in it and however quick its other groups, that replica alone takes so long. And the logarithm of a replica's seconds is
convex in those of its stages' factors (a longest path of sums), so that replicas all alike, each stage with the mean of
its groups, would be at least as good; of a convex function any tangent is a bound, and of tangents the least over all
placements is known: the quickest groups to the stages that weigh most.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from presage.placement.placement_score import Judge, Moments, level

__all__ = ["bound"]

Floats = NDArray[np.float64]
SUBSETS = 5000  # of stages, looked at
NOISY = 24  # of them with noise
TANGENTS = (24, 8)  # without noise, and with it: it rounds corners off
AROUND, STEP = 2e-3, 1e-6


def bound(judge: Judge, values: Floats, factors: Floats) -> float:
    """Seconds of the slowest replica at p95; `factors`[replica, stage] is a good placement of `values`."""
    return max(_alone(judge, np.sort(values)[::-1]), _together(judge, values, factors))


def _alone(judge: Judge, slowest: Floats) -> float:
    """From the replica that has j of the slowest groups."""
    stages, found = judge.pipeline.shape.stages, 0.0
    for j in range(1, stages + 1):
        value = slowest[(j - 1) * judge.replicas]
        if comb(stages, j) <= SUBSETS and value > slowest[-1]:
            found = max(found, _least(judge, _subsets(stages, j, float(value), float(slowest[-1]))))
    return found


def _subsets(stages: int, j: int, slow: float, quick: float) -> Floats:
    """[subset, stage]: factors of a replica whose j slow groups are in any j stages."""
    chosen = np.array(list(combinations(range(stages), j)))
    factors = np.full((len(chosen), stages), quick)
    np.put_along_axis(factors, chosen, slow, axis=1)
    return factors


def _least(judge: Judge, factors: Floats) -> float:
    """The least p95 of these replicas. Noise makes none quicker, so that few have to be looked at with it."""
    quiet = judge.pipeline.quiet(factors)
    order = np.argsort(quiet, kind="stable")
    seen = judge.moments(factors[order[:NOISY]])
    least = min(level(_one(seen, i)) for i in range(len(seen.mean)))
    return min(least, float(quiet[order[NOISY]])) if len(order) > NOISY else least


def _one(m: Moments, i: int) -> Moments:
    return Moments(m.mean[i : i + 1], m.sd[i : i + 1], m.quiet[i : i + 1])


def _together(judge: Judge, values: Floats, factors: Floats) -> float:
    """From replicas all alike, by tangents around the mean of a good placement."""
    center = np.log(factors).mean(axis=0)
    rng = np.random.default_rng(judge.seed)
    points = center + AROUND * rng.standard_normal((TANGENTS[judge.pipeline.varies], len(center)))
    slopes, height = _tangents(judge, points)
    sd = min(float(judge.moments(np.exp(center)[None]).sd[0]), float(judge.moments(factors).sd.min()))
    at = float((height - (slopes * points).sum(axis=1)).mean())
    return float(np.exp(at + _dealt(slopes.mean(axis=0), np.log(values), judge.replicas) + judge.wide * sd))


def _tangents(judge: Judge, points: Floats) -> tuple[Floats, Floats]:
    """[point, stage]: slopes of the mean of the logarithm, and [point]: its height."""
    count, stages = points.shape
    moved = points[:, None, :] + STEP * np.vstack([np.zeros(stages), np.eye(stages)])
    mean = judge.moments(np.exp(moved).reshape(-1, stages)).mean.reshape(count, -1)
    return (mean[:, 1:] - mean[:, :1]) / STEP, mean[:, 0]


def _dealt(slopes: Floats, logs: Floats, replicas: int) -> float:
    """The least that the stages' means, weighed by the slopes, can add up to."""
    means = np.sort(logs).reshape(-1, replicas).mean(axis=1)
    return float((np.sort(slopes)[::-1] * means).sum())
