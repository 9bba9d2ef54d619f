"""`place(shape, fleet, noise) -> PlacementResult`: which GPU goes where so that the step's p95 is least."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.files import write_whole
from presage.noise.model import NoiseModel
from presage.noise.sampling import RandomStreams
from presage.placement.fleet import GpuFleet
from presage.placement.gpu_groups import GroupSizes, best_groups, given_groups, random_groups, worst_groups
from presage.placement.placement_score import PlacementScore, ReplicaTimes, draw_placement, without_gpu_spread
from presage.placement.placement_search import assign_groups, assign_groups_worst, p95_bound
from presage.prediction.draws.draw import Drawn, Draws, without_fitted_stragglers
from presage.prediction.draws.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
RANDOMS, RANDOM_DRAWS = 40, 2_000


@dataclass(frozen=True, eq=False)
class Placement:
    """gpus[replica, stage, GPU of the group]: indices of the fleet's."""

    fleet: GpuFleet
    gpus: Ints

    @cached_property
    def factors(self) -> Floats:
        """[replica, stage]: of the slowest GPU of each group."""
        return np.asarray(self.fleet.factors[self.gpus].max(axis=2))

    @property
    def by_rank(self) -> Ints:
        """The GPU of each rank, numbered as Megatron does: stage by stage, in it replica by replica."""
        return self.gpus.transpose(1, 0, 2).ravel()

    @property
    def spares(self) -> Ints:
        """GPUs that are left out, the slowest first."""
        left = np.setdiff1d(np.arange(len(self.fleet)), self.gpus)
        return left[np.argsort(-self.fleet.factors[left], kind="stable")]


@dataclass(frozen=True, eq=False)
class PlacementOutcome(Drawn):
    """A placement, and its steps."""

    placement: Placement
    draws: Draws


@dataclass(frozen=True, eq=False)
class RandomPlacements:
    """Medians and p95s of steps, one of each random placement."""

    p50s: Floats
    p95s: Floats

    @property
    def p50(self) -> float:
        return float(self.p50s.mean())

    @property
    def p95(self) -> float:
        return float(self.p95s.mean())

    @property
    def unlucky(self) -> float:
        """The p95 that one placement of twenty is worse than."""
        return float(np.quantile(self.p95s, 0.95))


@dataclass(frozen=True, eq=False)
class PlacementResult:
    """The best placement, beside the given, the worst and random ones."""

    judge: PlacementScore
    fleet: GpuFleet
    sizes: GroupSizes
    given: PlacementOutcome
    best: PlacementOutcome
    worst: PlacementOutcome
    randoms: RandomPlacements
    gap: float  # how much slower than the bound the slowest replica is in the best, at p95

    @property
    def shape(self) -> StepModel:
        return self.judge.pipeline.shape

    @property
    def bound(self) -> float:
        """No placement has a p95 below this: what the bound leaves of the slowest replica, the rest as it is."""
        replica = self.judge.p95(self.best.placement.factors) * self.shape.calm
        return self.best.p95.value - replica * self.gap / (1 + self.gap)


def place(
    shape: StepModel, fleet: GpuFleet, noise: NoiseModel, *, keep_nodes: bool = True, seed: int = 0,
    draws: int = 10_000, randoms: int = RANDOMS,
) -> PlacementResult:  # fmt: skip
    """Which GPU of a fleet should go where in a job, so that slow ones cost least; beside other orders of them.

    GPUs' own speeds are the fleet's; of the noise all else is drawn. The step without noise stays the predicted one
    where GPUs vary as they usually do (see `without_fitted_stragglers`).
    """
    sizes, alone = GroupSizes.of(shape, fleet, keep_nodes), without_gpu_spread(noise)
    shape = without_fitted_stragglers(shape, noise if np.ptp(fleet.factors) else alone)
    judge = PlacementScore(ReplicaTimes(shape, alone), shape.replicas, seed=seed)
    best, gap = _best(judge, fleet, sizes)
    given, worst = _in_order(shape, fleet, given_groups(sizes)), _worst(judge, fleet, sizes)
    outcomes = {
        name: PlacementOutcome(p, draw_placement(judge.pipeline, p.factors, seed, draws))
        for name, p in (("given", given), ("best", best), ("worst", worst))
    }
    return PlacementResult(judge, fleet, sizes, randoms=_randoms(judge, fleet, sizes, randoms), gap=gap, **outcomes)


def write_placement(placed: PlacementResult, path: Path) -> None:
    """Write the best placement as CSV: one row per rank, then the spares."""
    best, s, fleet, out = placed.best.placement, placed.shape, placed.fleet, StringIO()
    each, rows = s.replicas * s.together, csv.writer(out, lineterminator="\n")
    rows.writerow(("rank", "stage", "replica", "place", "gpu", "node", "factor"))
    ranks = [
        ((rank, rank // each, rank % each // s.together, rank % s.together), g) for rank, g in enumerate(best.by_rank)
    ]
    for where, g in [*ranks, *((("", "", "", "spare"), g) for g in best.spares)]:
        rows.writerow((*where, fleet.gpus[g], fleet.nodes[g], f"{fleet.factors[g]:.6g}"))
    write_whole(path, out.getvalue().encode())


def _in_order(shape: StepModel, fleet: GpuFleet, groups: Ints) -> Placement:
    return Placement(fleet, groups.reshape(shape.stages, shape.replicas, -1).transpose(1, 0, 2))


def _best(judge: PlacementScore, fleet: GpuFleet, sizes: GroupSizes) -> tuple[Placement, float]:
    groups = best_groups(fleet, sizes)
    values = fleet.factors[groups].max(axis=1)
    found = assign_groups(judge, values)
    gap = max(0.0, found.p95 / p95_bound(judge, values, values[found.groups]) - 1)
    return Placement(fleet, groups[found.groups]), gap


def _worst(judge: PlacementScore, fleet: GpuFleet, sizes: GroupSizes) -> Placement:
    groups = worst_groups(fleet, sizes)
    return Placement(fleet, groups[assign_groups_worst(judge, fleet.factors[groups].max(axis=1))])


def _randoms(judge: PlacementScore, fleet: GpuFleet, sizes: GroupSizes, count: int) -> RandomPlacements:
    rng, told = RandomStreams(judge.seed)("random placements"), []
    for _ in range(count):
        p = _in_order(judge.pipeline.shape, fleet, random_groups(fleet, sizes, rng))
        draws = draw_placement(judge.pipeline, p.factors, judge.seed, RANDOM_DRAWS).seconds
        told.append(np.quantile(draws, [0.5, 0.95]))
    return RandomPlacements(*np.array(told).reshape(-1, 2).T)
