"""What one hot node costs by where it sits, whom to evict, and what GPUs that were left out would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.noise.estimate import Estimate
from presage.plan.place.drawn import drawn_steps
from presage.plan.place.fleet import Fleet
from presage.plan.place.judge import Judge
from presage.plan.place.place import Outcome, Placed, Placement

__all__ = ["Evicted", "Hot", "LeftOut", "evictions", "hot_node", "left_out"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DAY_HOURS = 24.0
EVICTED = 8  # at most
CERTAIN = 2.0  # standard errors


# ---- one hot node


@dataclass(frozen=True)
class Hot:
    """A node's GPUs take `factor` as long, in each of the stages."""

    factor: float
    replicas: int  # that it is part of
    without: tuple[Estimate, Estimate]  # p50 and p95
    stages: tuple[tuple[Estimate, Estimate], ...]

    @property
    def costs(self) -> list[float]:
        """[stage]: of the p95, as a share."""
        return [p95.value / self.without[1].value - 1 for _, p95 in self.stages]


def hot_node(judge: Judge, factors: Floats, factor: float, node: int, draws: int = 4_000) -> Hot:
    """In replicas [replica, stage] that are otherwise as they are; the hot node goes to the quickest of them."""
    count = int(np.clip(node // judge.pipeline.shape.together, 1, len(factors)))
    told = [_quantiles(judge, factors, draws)]
    for stage in range(factors.shape[1]):
        hot = factors.copy()
        hot[_quickest(judge, factors, stage, factor, count), stage] = np.maximum(factors[:, stage].max(), factor)
        told.append(_quantiles(judge, hot, draws))
    return Hot(factor, count, told[0], tuple(told[1:]))


def _quickest(judge: Judge, factors: Floats, stage: int, factor: float, count: int) -> Ints:
    """Replicas that are the quickest with such a stage."""
    hot = factors.copy()
    hot[:, stage] = np.maximum(hot[:, stage], factor)
    return np.argsort(judge.pipeline.quiet(hot), kind="stable")[:count]


def _quantiles(judge: Judge, factors: Floats, draws: int) -> tuple[Estimate, Estimate]:
    found = drawn_steps(judge.pipeline, factors, judge.seed, draws)
    return found.quantile(0.5), found.quantile(0.95)


# ---- whom to evict


@dataclass(frozen=True)
class Evicted:
    """A node (or a GPU, where no nodes are known), and what a usual one in its place would give."""

    name: str
    factor: float  # of its slowest GPU
    stage: int
    replica: int
    alone: float  # p95, seconds
    with_those_before: float
    gain: float  # of the p95, with those before, as a share
    gpu_hours: float  # a day


def evictions(placed: Placed, outcome: Outcome, most: int = EVICTED, draws: int = 10_000) -> list[Evicted]:
    """In the order to evict them; as long as more than the draws' error is gained. GPUs are not placed anew."""
    found: list[Evicted] = []
    before, p95 = outcome.placement, outcome.p95
    worth = 0
    for _ in range(most):
        name = _next(placed.judge, before)
        if name is None:
            break
        after = _usual(before, name)
        found.append(_evicted(placed, outcome, before, after, name, draws))
        if found[-1].gain > (found[worth - 1].gain if worth else 0.0) + CERTAIN * p95.error / p95.value:
            worth = len(found)
        before = after
    return found[:worth]


def _evicted(placed: Placed, of: Outcome, before: Placement, after: Placement, name: str, draws: int) -> Evicted:
    judge, was = placed.judge, of.p95.value
    both = _quantiles(judge, after.factors, draws)[1].value
    alone = _quantiles(judge, _usual(of.placement, name).factors, draws)[1].value
    gpu = _slowest_gpu(before, _members(before.fleet, name))
    replica, stage, _ = (int(x[0]) for x in np.nonzero(before.gpus == gpu))
    gain = 1 - both / was
    hours = gain * judge.pipeline.shape.job.gpus * DAY_HOURS
    return Evicted(name, float(before.fleet.factors[gpu]), stage, replica, alone, both, gain, hours)


def _next(judge: Judge, placement: Placement) -> str | None:
    """Of the slowest replica's stages, whose slowest node (or GPU) is best evicted."""
    row = int(judge.pipeline.quiet(placement.factors).argmax())
    fleet = placement.fleet
    gpus = placement.gpus[row]
    slowest = gpus[np.arange(len(gpus)), fleet.factors[gpus].argmax(axis=1)]
    names = sorted({_name(fleet, int(g)) for g in slowest if fleet.factors[g] > 1 + 1e-9})
    if not names:
        return None
    after = np.array([_usual(placement, n).factors[row] for n in names])
    return names[int(judge.pipeline.quiet(after).argmin())]


def _usual(placement: Placement, name: str) -> Placement:
    """The same with a node none of whose GPUs is slow."""
    factors = placement.fleet.factors.copy()
    members = _members(placement.fleet, name)
    factors[members] = np.minimum(factors[members], 1.0)
    return Placement(replace(placement.fleet, factors=factors), placement.gpus)


def _name(fleet: Fleet, gpu: int) -> str:
    return fleet.nodes[gpu] if fleet.known_nodes else fleet.gpus[gpu]


def _members(fleet: Fleet, name: str) -> Ints:
    return fleet.members[name] if fleet.known_nodes else np.array([fleet.gpus.index(name)])


def _slowest_gpu(placement: Placement, members: Ints) -> int:
    """Of a node's that work."""
    working = np.intersect1d(members, placement.gpus)
    return int(working[placement.fleet.factors[working].argmax()])


# ---- GPUs that were left out


@dataclass(frozen=True)
class LeftOut:
    """A GPU that is spare, and the p95 if it worked all the same, where it hurts least."""

    gpu: str
    node: str
    factor: float
    p95: float


def left_out(placed: Placed, most: int = 5, draws: int = 4_000) -> list[LeftOut]:
    """Of the slowest that were left out."""
    best, fleet = placed.best.placement, placed.fleet
    found = []
    for gpu in best.spares[:most]:
        factor = float(fleet.factors[gpu])
        factors = _least_hurt(placed.judge, best.factors, factor)
        p95 = _quantiles(placed.judge, factors, draws)[1].value
        found.append(LeftOut(fleet.gpus[gpu], fleet.nodes[gpu], factor, p95))
    return found


def _least_hurt(judge: Judge, factors: Floats, factor: float) -> Floats:
    """With one such group in the replica and the stage that take it best."""
    seconds = []
    for stage in range(factors.shape[1]):
        hot = factors.copy()
        hot[:, stage] = np.maximum(hot[:, stage], factor)
        seconds.append(judge.pipeline.quiet(hot))
    stage, replica = np.unravel_index(int(np.argmin(seconds)), (len(seconds), len(factors)))
    out = factors.copy()
    out[replica, stage] = max(factor, float(out[replica, stage]))
    return out
