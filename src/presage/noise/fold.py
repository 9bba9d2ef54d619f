"""The slowest of many replicas, drawn without simulating each: by order statistics, given what they share.

A replica takes `steady` seconds, which stay for the whole run, times `lively`, drawn anew in every step. Of all
replicas of a run, how many fall into each part of the steady distribution is drawn, then of each part the largest
lively factor: the largest of n independent draws is the quantile of U**(1/n). Parts become finer towards the top, so
the work does not grow with the number of replicas. Whatever all replicas share must be applied to the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Distribution

__all__ = ["Replicas", "slowest"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rng = np.random.Generator
USUAL = (0.0, 0.5, 0.9, 0.99, 0.999)  # of strata, cut at whether there are any or not: the same draws either way
EVEN = 64  # parts of equal probability; the last is cut further
PER_HALVING, HALVINGS = 2, 24  # into so many for each halving of the probability above


@dataclass(frozen=True)
class Replicas:
    """Replicas of a kind. What varies from step to step depends on how slow the rest is (a replica with one slow stage
    waits for that stage alone), so there is a distribution of it for each part of the steady one."""

    steady: Distribution
    lively: tuple[Distribution, ...]  # of each stratum
    strata: tuple[float, ...] = (0.0,)  # where each begins, as a share of replicas
    share: float = 1.0  # of all replicas, those of this kind


def slowest(kinds: tuple[Replicas, ...], count: int, runs: int, steps: int, by_run: Rng, by_step: Rng) -> Floats:
    """[runs, steps]: the largest of steady x lively over `count` replicas; who is slow stays so within a run."""
    counts = by_run.multinomial(count, [k.share for k in kinds], runs)
    rngs = zip(by_run.spawn(len(kinds)), by_step.spawn(len(kinds)), strict=True)  # a kind less moves no other
    each = [_slowest(kind, n, steps, *two) for kind, n, two in zip(kinds, counts.T, rngs, strict=True)]
    return np.asarray(np.max(each, axis=0))


def _slowest(r: Replicas, count: Ints, steps: int, by_run: Rng, by_step: Rng) -> Floats:
    """Of one kind, of which each run has so many."""
    edges = _edges(int(count.max()), r.strata)
    counts = by_run.multinomial(count, np.diff(edges))
    power = 1 / np.maximum(counts, 1)
    place = edges[:-1] + np.diff(edges) * by_run.random(counts.shape)
    level = np.where(counts > 0, r.steady.quantile(place), 0.0)
    stratum = np.searchsorted(r.strata, edges[:-1], side="right") - 1
    out = np.zeros((len(count), steps))
    for k in range(steps):
        u = by_step.random(counts.shape) ** power
        for s, lively in enumerate(r.lively):
            at = stratum == s
            np.maximum(out[:, k], (level[:, at] * lively.quantile(u[:, at])).max(axis=1, initial=0.0), out=out[:, k])
    return out


def _edges(count: int, strata: tuple[float, ...]) -> Floats:
    """From 0 to 1, with every stratum's; a single replica needs no others."""
    even, above = np.arange(EVEN) / EVEN, 0.5 ** (np.arange(PER_HALVING * HALVINGS + 1) / PER_HALVING)
    fine = np.concatenate([even, 1 - above[above < 1 / EVEN]]) if count > 1 else np.zeros(1)
    return np.unique(np.concatenate([fine, USUAL, strata, [1.0]]))
