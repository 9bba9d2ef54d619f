"""Sensitivity: what a step's distribution owes to each class of work, source of noise and pipeline stage.

Each is made steady (its variance removed) or 10% quicker, and the step drawn again with the same random numbers; what
the change is worth is the difference. How well it is known comes from leaving out an eighth of the runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from presage.jobs.draws.criticality import Critical, criticality, stage_criticality, stage_scaled
from presage.jobs.draws.draw import Draws, Kept, draw
from presage.jobs.draws.shape import Shape, scaled
from presage.jobs.draws.shapley import Shapley, shapley
from presage.jobs.draws.sources import active, only, steadied, without
from presage.noise.estimate import BATCHES, Estimate
from presage.noise.noise import NO_NOISE, Noise

__all__ = ["FASTER", "Change", "Row", "Sensitivity", "Shares", "sensitivity"]

Floats = NDArray[np.float64]
FASTER = 0.9  # of its seconds
DRAWS, FEW = 4_000, 2_000  # each time; of stages, of which there may be many
SLOWED = frozenset({"products", "attention"})  # by slow GPUs
MEAN, P50, P95, SD, VARIANCE, TAIL = range(6)  # what is told of draws
Drawn = Callable[[Shape, Noise], Draws]


@dataclass(frozen=True)
class Change:
    """What becomes of a step, in seconds: below 0 where it gets shorter."""

    p50: Estimate
    p95: Estimate
    sd: Estimate

    @staticmethod
    def of(before: Floats, after: Floats) -> Change:
        """Of what `_told` tells of draws with the same random numbers."""
        return Change(*(_sure(after[k] - before[k]) for k in (P50, P95, SD)))


@dataclass(frozen=True)
class Shares:
    """Of what noise does, a source's part by Shapley: of the variance, of p95 - p50, and of what the mean is more."""

    variance: Estimate
    tail: Estimate
    mean: Estimate


@dataclass(frozen=True)
class Row:
    """A class of work, a source of noise, or a stage."""

    group: str  # class, source, stage
    name: str
    steady: Change  # were it steady
    faster: Change | None = None  # were it 10% quicker
    critical: Critical | None = None
    shares: Shares | None = None


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Rows by group, and what they add up to."""

    shape: Shape
    draws: Draws
    calm: float  # seconds of a step with no noise at all
    all_steady: Change  # with no source left
    rows: tuple[Row, ...]
    exact: bool  # shares of all subsets, or of drawn orders

    def of(self, group: str) -> tuple[Row, ...]:
        """Rows of a group."""
        return tuple(r for r in self.rows if r.group == group)

    @property
    def one_by_one(self) -> float:
        """Seconds of p95 that the sources' single removals add up to; not what removing all of them does."""
        return sum(r.steady.p95.value for r in self.of("source"))


def sensitivity(shape: Shape, noise: Noise, seed: int = 0, draws: int = DRAWS) -> Sensitivity:
    """Of a job's step. The shape may be `calmed`, by this noise."""
    kept: Kept = {}

    def drawn(shape: Shape, noise: Noise, few: int = draws) -> Draws:
        return draw(shape, noise, seed, few, kept=kept)

    found, calm = drawn(shape, noise), drawn(shape, NO_NOISE)
    before = _told(found)
    sources, exact = _sources(shape, noise, drawn, before, seed)
    few = min(draws, FEW)
    rows = *_classes(shape, noise, drawn, before), *sources, *_stages(shape, noise, partial(drawn, few=few))
    steady = _told(drawn(shape, without(noise, [s.name for s in active(noise)])))
    return Sensitivity(shape, found, float(calm.seconds.flat[0]), Change.of(before, steady), rows, exact)


def _classes(shape: Shape, noise: Noise, drawn: Drawn, before: Floats) -> list[Row]:
    """Of work; what is steady minds neither slow GPUs nor the network."""
    out = []
    for kind, critical in criticality(shape).items():
        alone = replace(shape, across=shape.across - {kind}, immune=frozenset({kind} & SLOWED))
        steady = Change.of(before, _told(drawn(alone, steadied(noise, kind))))
        quick = replace(scaled(shape, kind, FASTER), calm=shape.calm)
        out.append(Row("class", kind, steady, Change.of(before, _told(drawn(quick, noise))), critical))
    return out


def _stages(shape: Shape, noise: Noise, drawn: Drawn) -> list[Row]:
    before, out = _told(drawn(shape, noise)), []
    for stage in range(shape.stages if shape.stages > 1 else 0):
        steady = Change.of(before, _told(drawn(replace(shape, still=frozenset([stage])), noise)))
        quick = Change.of(before, _told(drawn(stage_scaled(shape, stage, FASTER), noise)))
        out.append(Row("stage", str(stage), steady, quick, stage_criticality(shape, stage)))
    return out


def _sources(shape: Shape, noise: Noise, drawn: Drawn, before: Floats, seed: int) -> tuple[list[Row], bool]:
    names = [s.name for s in active(noise)]

    def value(some: frozenset[str]) -> Floats:
        return _told(drawn(shape, only(noise, some)))[[VARIANCE, TAIL, MEAN]]

    found = shapley(names, value, seed)
    steady = [Change.of(before, _told(drawn(shape, without(noise, [name])))) for name in names]
    shares = _shares(found) if names else []
    rows = [Row("source", n, s, shares=p) for n, s, p in zip(names, steady, shares, strict=True)]
    return rows, found.exact


def _shares(found: Shapley) -> list[Shares]:
    """Of [source, what, all draws and those without an eighth]; both errors together."""
    whole = found.added.sum(axis=0)
    some = np.where(np.abs(whole[:, :1]) > 0, whole, 1.0)
    share, error = found.added / some, found.error[..., 0] / np.abs(some[:, 0])
    pairs = [[_sure(x, float(e)) for x, e in zip(xs, es, strict=True)] for xs, es in zip(share, error, strict=True)]
    return [Shares(*row) for row in pairs]


def _told(draws: Draws) -> Floats:
    """[what, 1 + eighths]: of all draws, then of those without an eighth of the runs each."""
    runs = draws.seconds
    parts = np.array_split(np.arange(len(runs)), min(BATCHES, len(runs)))
    some = [runs, *(np.delete(runs, part, axis=0) for part in parts if len(parts) > 1)]
    return np.array([_measures(x) for x in some]).T


def _measures(x: Floats) -> tuple[float, ...]:
    p50, p95 = np.quantile(x, [0.5, 0.95])
    return float(x.mean()), float(p50), float(p95), float(x.std()), float(x.var()), float(p95 - p50)


def _sure(values: Floats, other: float = 0.0) -> Estimate:
    """Of a number and what it is without an eighth each (the jackknife), with an error of another kind added."""
    rest = values[1:]
    n = len(rest)
    own = float(np.sqrt((n - 1) / n * ((rest - rest.mean()) ** 2).sum())) if n > 1 else 0.0
    return Estimate(float(values[0]), float(np.hypot(own, other)))
