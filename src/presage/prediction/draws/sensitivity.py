"""Sensitivity: what a step's distribution owes to each class of work, source of noise and pipeline stage.

Each is made steady (its variance removed) or 10% quicker, and the step drawn again with the same random numbers; what
the change is worth is the difference. How well it is known comes from leaving out an eighth of the runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.noise.estimate import BATCHES, Estimate
from presage.noise.noise import NO_NOISE, Noise
from presage.pool.pool import BESIDE, Pool
from presage.prediction.draws.criticality import Critical, criticality, stage_criticality, stage_scaled
from presage.prediction.draws.draw import Draws
from presage.prediction.draws.draw_request import Asked, draw, draw_all
from presage.prediction.draws.noise_sources import active, only, steadied, without
from presage.prediction.draws.shapley import Shapley, shapley, subsets
from presage.prediction.draws.step_model import Shape, scaled

__all__ = ["FASTER", "Change", "Row", "Sensitivity", "Shares", "sensitivity"]

Floats = NDArray[np.float64]
FASTER = 0.9  # of its seconds
DRAWS, FEW = 4_000, 2_000  # each time; of stages, of which there may be many
SLOWED = frozenset({"products", "attention"})  # by slow GPUs
MEAN, P50, P95, SD, VARIANCE, TAIL = range(6)  # what is told of draws
Told = Callable[[object], Floats]  # what is told of the draws of a case, by its key
Cases = dict[object, Asked]  # by key


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


def sensitivity(shape: Shape, noise: Noise, seed: int = 0, draws: int = DRAWS, pool: Pool = BESIDE) -> Sensitivity:
    """Of a job's step. The shape may be `calmed`, by this noise."""
    found, calm = draw(shape, noise, seed, draws, pool=pool), draw(shape, NO_NOISE, seed, 2)
    names, critical = [s.name for s in active(noise)], criticality(shape)
    cases = {
        **_class_cases(shape, noise, critical, draws),
        **_source_cases(shape, noise, names, seed, draws),
        **_stage_cases(shape, noise, min(draws, FEW)),
    }
    known = _told_all(cases, seed, pool)
    before = _told(found)
    sources, exact = _sources(names, known.__getitem__, before, seed)
    rows = *_classes(critical, known.__getitem__, before), *sources, *_stages(shape, known.__getitem__)
    steady = Change.of(before, known["no source"])
    return Sensitivity(shape, found, float(calm.seconds.flat[0]), steady, rows, exact)


def _told_all(cases: Cases, seed: int, pool: Pool) -> dict[object, Floats]:
    keys = list(cases)
    return {keys[i]: _told(draws) for i, draws in draw_all(list(cases.values()), seed, pool)}


# ---- classes of work


def _class_cases(shape: Shape, noise: Noise, kinds: Iterable[str], draws: int) -> Cases:
    """What is steady minds neither slow GPUs nor the network."""
    out: Cases = {}
    for kind in kinds:
        alone = shape.but(across=shape.across - {kind}, immune=frozenset({kind} & SLOWED))
        out["class", kind, "steady"] = Asked(alone, steadied(noise, kind), draws)
        out["class", kind, "quick"] = Asked(scaled(shape, kind, FASTER).but(calm=shape.calm), noise, draws)
    return out


def _classes(kinds: dict[str, Critical], told: Told, before: Floats) -> list[Row]:
    out = []
    for kind, critical in kinds.items():
        steady, quick = (Change.of(before, told(("class", kind, how))) for how in ("steady", "quick"))
        out.append(Row("class", kind, steady, quick, critical))
    return out


# ---- pipeline stages


def _stage_cases(shape: Shape, noise: Noise, draws: int) -> Cases:
    out: Cases = {("stage", "as it is"): Asked(shape, noise, draws)}
    for stage in _several(shape):
        out["stage", stage, "steady"] = Asked(shape.but(still=frozenset([stage])), noise, draws)
        out["stage", stage, "quick"] = Asked(stage_scaled(shape, stage, FASTER), noise, draws)
    return out


def _stages(shape: Shape, told: Told) -> list[Row]:
    before, out = told(("stage", "as it is")), []
    for stage in _several(shape):
        steady, quick = (Change.of(before, told(("stage", stage, how))) for how in ("steady", "quick"))
        out.append(Row("stage", str(stage), steady, quick, stage_criticality(shape, stage)))
    return out


def _several(shape: Shape) -> range:
    return range(shape.stages if shape.stages > 1 else 0)


# ---- sources of noise


def _source_cases(shape: Shape, noise: Noise, names: Sequence[str], seed: int, draws: int) -> Cases:
    out: Cases = {some: Asked(shape, only(noise, some), draws) for some in subsets(names, seed)}
    out |= {("source", name): Asked(shape, without(noise, [name]), draws) for name in names}
    return out | {"no source": Asked(shape, without(noise, names), draws)}


def _sources(names: Sequence[str], told: Told, before: Floats, seed: int) -> tuple[list[Row], bool]:
    found = shapley(names, lambda some: told(some)[[VARIANCE, TAIL, MEAN]], seed)
    steady = [Change.of(before, told(("source", name))) for name in names]
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
