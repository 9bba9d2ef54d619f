"""What one hot node costs by where it sits, whom to evict, what GPUs left out would cost; PlacementFindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.noise.sampling import Estimate
from presage.placement.fleet import GpuFleet
from presage.placement.place import Placement, PlacementOutcome, PlacementResult, place
from presage.placement.placement_score import PlacementScore, draw_placement
from presage.placement.placement_search import stage_responses
from presage.prediction.draws import step_model
from presage.prediction.draws.distribution import belief_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DAY_HOURS = 24.0
EVICTED = 8  # at most
LEAST = 0.002  # of the p95: speeds are not known better
CERTAIN = 2.0  # standard errors
DRAWS = 4_000
MS = 1e3
LEAST_SLOW = 1.02  # times as long: what counts as a slow GPU at the least


# ---- one hot node


@dataclass(frozen=True)
class HotNode:
    """A node's GPUs take `factor` as long, in each of the stages."""

    factor: float
    replicas: int  # that it is part of
    without: tuple[Estimate, Estimate]  # p50 and p95
    stages: tuple[tuple[Estimate, Estimate], ...]

    @property
    def costs(self) -> list[float]:
        """[stage]: of the p95, as a share."""
        return [p95.value / self.without[1].value - 1 for _, p95 in self.stages]

    def to_json(self) -> dict[str, Any]:
        pairs = zip(self.stages, self.costs, strict=True)
        stages = [{"stage": i, **_both_json(*both), "cost": cost} for i, (both, cost) in enumerate(pairs)]
        ends = {"least": min(self.costs), "most": max(self.costs)}
        return {"factor": self.factor, "without": _both_json(*self.without), "stages": stages, **ends}


def hot_node_cost(judge: PlacementScore, factors: Floats, factor: float, node: int, draws: int = DRAWS) -> HotNode:
    """In replicas [replica, stage] that are otherwise as they are; the hot node goes to the quickest of them."""
    count = int(np.clip(node // judge.pipeline.shape.together, 1, len(factors)))
    told = [_quantiles(judge, factors, draws)]
    for stage in range(factors.shape[1]):
        hot = factors.copy()
        rows = _quickest(judge, factors, stage, factor, count)
        hot[rows, stage] = np.maximum(factors[rows, stage], factor)
        told.append(_quantiles(judge, hot, draws))
    return HotNode(factor, count, told[0], tuple(told[1:]))


def hot_node(placed: PlacementResult, fleet: GpuFleet, factor: float, node: str = "") -> HotNode:
    """The cost of a node of the fleet (or any of its size) that is hot, in each stage of the best placement."""
    sizes = [len(m) for name, m in fleet.members.items() if name]
    size = int(np.median(sizes)) if fleet.known_nodes else placed.shape.job.platform.domain
    own = float(fleet.factors[fleet.members[node]].max()) if node else 1.0
    return hot_node_cost(placed.judge, Placement(fleet, placed.best.placement.gpus).factors, own * factor, size)


def _quickest(judge: PlacementScore, factors: Floats, stage: int, factor: float, count: int) -> Ints:
    """Replicas that are the quickest with such a stage."""
    hot = factors.copy()
    hot[:, stage] = np.maximum(hot[:, stage], factor)
    return np.argsort(judge.pipeline.quiet(hot), kind="stable")[:count]


def _quantiles(judge: PlacementScore, factors: Floats, draws: int) -> tuple[Estimate, Estimate]:
    found = draw_placement(judge.pipeline, factors, judge.seed, draws)
    return found.p50, found.p95


# ---- whom to evict


@dataclass(frozen=True)
class Eviction:
    """A node (or a GPU, where no nodes are known), and what a usual one in its place would give."""

    name: str
    factor: float  # of its slowest GPU
    stage: int
    replica: int
    alone: float  # gain of the p95, as a share
    gain: float  # with those before it
    p95: float  # then
    gpu_hours: float  # a day

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "factor": self.factor, "stage": self.stage, "replica": self.replica,
            "gain_alone": self.alone, "gain": self.gain, "p95_ms": self.p95 * MS, "gpu_hours_a_day": self.gpu_hours,
        }  # fmt: skip


def suggest_evictions(
    placed: PlacementResult, outcome: PlacementOutcome, most: int = EVICTED, draws: int = DRAWS
) -> list[Eviction]:
    """In the order to evict them, as long as each further one gains enough on average. GPUs are not placed anew."""
    found: list[Eviction] = []
    before, was = outcome.placement, _quantiles(placed.judge, outcome.placement.factors, draws)[1]
    least, worth = max(LEAST, CERTAIN * was.error / was.value), 0
    while len(found) < most and (name := _next_to_evict(placed.judge, before)) is not None:
        after = _usual(before, name)
        found.append(_evicted(placed.judge, outcome.placement, after, name, was.value, draws))
        if found[-1].gain - (found[worth - 1].gain if worth else 0.0) > least * (len(found) - worth):
            worth = len(found)
        before = after
    return found[:worth]


def _evicted(judge: PlacementScore, given: Placement, after: Placement, name: str, was: float, draws: int) -> Eviction:
    both, alone = (_quantiles(judge, p.factors, draws)[1].value for p in (after, _usual(given, name)))
    gpu = _slowest_gpu(given, given.fleet.of_unit(name))
    replica, stage, _ = (int(x[0]) for x in np.nonzero(given.gpus == gpu))
    hours = (1 - both / was) * judge.pipeline.shape.job.gpus * DAY_HOURS
    gains = max(0.0, 1 - alone / was), 1 - both / was
    return Eviction(name, float(given.fleet.factors[gpu]), stage, replica, *gains, both, hours)


def _next_to_evict(judge: PlacementScore, placement: Placement) -> str | None:
    """The node (or GPU) of the slowest replica that is best evicted: the slowest of one of its stages."""
    row = int(judge.pipeline.quiet(placement.factors).argmax())
    fleet = placement.fleet
    gpus = placement.gpus[row]
    slowest = gpus[np.arange(len(gpus)), fleet.factors[gpus].argmax(axis=1)]
    names = sorted({fleet.unit(int(g)) for g in slowest if fleet.factors[g] > 1 + 1e-9})
    if not names:
        return None
    after = np.array([_usual(placement, n).factors[row] for n in names])
    return names[int(judge.pipeline.quiet(after).argmin())]


def _usual(placement: Placement, name: str) -> Placement:
    """The same with a node none of whose GPUs is slow."""
    factors = placement.fleet.factors.copy()
    members = placement.fleet.of_unit(name)
    factors[members] = np.minimum(factors[members], 1.0)
    return Placement(replace(placement.fleet, factors=factors), placement.gpus)


def _slowest_gpu(placement: Placement, members: Ints) -> int:
    """The slowest of a node's GPUs that work."""
    working = np.intersect1d(members, placement.gpus)
    return int(working[placement.fleet.factors[working].argmax()])


# ---- GPUs that were left out


@dataclass(frozen=True)
class SpareGpu:
    """A GPU that is spare, and the p95 if it worked all the same, where it hurts least."""

    gpu: str
    node: str
    factor: float
    p95: float


def spare_gpus(placed: PlacementResult, most: int = 5, draws: int = DRAWS) -> list[SpareGpu]:
    """What the slowest GPUs that were left out would cost."""
    best, fleet = placed.best.placement, placed.fleet
    found = []
    for gpu in best.spares[:most]:
        factor = float(fleet.factors[gpu])
        factors = _least_hurt(placed.judge, best.factors, factor)
        p95 = _quantiles(placed.judge, factors, draws)[1].value
        found.append(SpareGpu(fleet.gpus[gpu], fleet.nodes[gpu], factor, p95))
    return found


def _least_hurt(judge: PlacementScore, factors: Floats, factor: float) -> Floats:
    """With one such group in the replica and the stage that take it best."""
    seconds = []
    for stage in range(factors.shape[1]):
        hot = factors.copy()
        hot[:, stage] = np.maximum(hot[:, stage], factor)
        seconds.append(judge.pipeline.quiet(hot))
    stage, replica = divmod(int(np.argmin(seconds)), len(factors))
    out = factors.copy()
    out[replica, stage] = max(factor, float(out[replica, stage]))
    return out


# ---- everything about a placement


@dataclass(frozen=True, eq=False)
class PlacementFindings:
    """A placement with what was worked out from it; `responses`: the step's response to a slow GPU in each stage."""

    placed: PlacementResult
    source: str  # of the noise
    responses: Sequence[float] = ()
    slow: float = LEAST_SLOW  # the slow GPU's factor
    evicted: Mapping[str, list[Eviction]] = field(default_factory=dict)
    left: Sequence[SpareGpu] = ()
    hot: HotNode | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        p, s, best = self.placed, self.placed.shape, self.placed.best.placement
        return {
            "kind": "place",
            "name": s.job.name,
            "gpus": s.job.gpus,
            "fleet": len(p.fleet),
            "replicas": s.replicas, "stages": s.stages, "together": s.together, "within_node": p.sizes.part,
            "noise": self.source, "seed": p.judge.seed, "draws": int(p.best.draws.seconds.size),
            "predicted_ms": s.seconds * MS,
            **{k: _both_json(o.p50, o.p95) for k, o in (("given", p.given), ("best", p.best), ("worst", p.worst))},
            "random": {
                "placements": len(p.randoms.p95s), "p50_ms": p.randoms.p50 * MS, "p95_ms": p.randoms.p95 * MS,
                "unlucky_p95_ms": p.randoms.unlucky * MS,
            },
            "bound_p95_ms": p.bound * MS, "gap": p.gap,
            "factors": best.factors.tolist(),
            "ranks": [p.fleet.gpus[g] for g in best.by_rank],
            "spares": [p.fleet.gpus[g] for g in best.spares],
            "left_out": [{"gpu": x.gpu, "node": x.node, "factor": x.factor, "p95_ms": x.p95 * MS} for x in self.left],
            "evict": {name: [e.to_json() for e in rows] for name, rows in self.evicted.items()},
            "hot": None if self.hot is None else self.hot.to_json(),
            "notes": list(p.fleet.notes),
        }  # fmt: skip


def _both_json(p50: Estimate, p95: Estimate) -> dict[str, Any]:
    return {"p50_ms": p50.to_json(MS), "p95_ms": p95.to_json(MS)}


def place_job(
    job: Job,
    fleet: GpuFleet,
    noise: str | None = None,
    *,
    hot: tuple[float, str] | None = None,
    evict: int = EVICTED,
    **how: Any,
) -> PlacementFindings:
    """Place a job's GPUs, and work out what follows from it.

    `noise`: a file or a preset, as in `predict_distribution`. `hot`: the factor of a hot node, and its name or "".
    `how` goes to `place`: keep_nodes, seed, draws, randoms.
    """
    shape = step_model(job)
    belief, source = belief_of(job, shape.seconds, noise)
    given = fleet if hot is None or not hot[1] else fleet.hot(hot[1], hot[0])
    placed = place(shape, given, belief.noise, **how)
    return placement_findings(placed, source, evict, None if hot is None else hot_node(placed, fleet, *hot))


def placement_findings(placed: PlacementResult, source: str, evict: int, hot: HotNode | None) -> PlacementFindings:
    """Responses of the stages, whom to evict (at most `evict`), and what the spares would cost."""
    slow = max(LEAST_SLOW, float(placed.best.placement.factors.max()))
    outcomes = {"given": placed.given, "best": placed.best}
    evicted = {k: suggest_evictions(placed, o, evict) for k, o in outcomes.items()}
    responses = list(stage_responses(placed.judge, slow))
    return PlacementFindings(placed, source, responses, slow, evicted, spare_gpus(placed), hot)
