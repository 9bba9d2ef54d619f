"""Studies of noise: which parallelism minds it most, what a slow node costs, what a hot rack or a slow uplink does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from presage.configs.check import problems
from presage.configs.job import Job
from presage.errors import PresageError
from presage.noise.model import NoiseModel
from presage.noise.sources import only_sources
from presage.placement.placement_score import ReplicaTimes, draw_placement, without_gpu_spread
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import Draws, draw, without_fitted_stragglers
from presage.prediction.draws.step_model import StepModel, step_model
from presage.prediction.jobs.job_prediction import JobResult, predict_job
from presage.studies.study_point import SETUP, SkippedPoint, Study, StudyPoint, StudySetup, draw_point

FACTORS = (1.02, 1.05, 1.1, 1.2, 1.35)
FEW = 4_000  # draws of each single source
CAUSES = {"gpus": ("rank", "slow"), "own": ("own", "load"), "network": ("network", "step"), "common": ("common", "run")}


def noise_study(job: Job, degree: int = 8, setup: StudySetup = SETUP) -> Study:
    """One kind of parallelism at a time on the same GPUs: all data parallel, then `degree` ranks of each other kind.

    All points have the noise that is believed of the job as it is, so that they differ by their plan alone.
    """
    if degree < 2:
        raise PresageError(f"--degree {degree}: a kind of parallelism needs 2 ranks or more")
    belief, source = belief_of(job, predict_job(job).seconds, setup.noise)
    found = [_plan_point(name, moved, belief.noise, setup) for name, moved in _plans(job, degree)]
    points = tuple(p for p in found if isinstance(p, StudyPoint))
    return Study("noise", job, points, tuple(p for p in found if isinstance(p, SkippedPoint)), source)


def _plans(job: Job, degree: int) -> list[tuple[str, Job]]:
    """The job in each pure plan: what is sharded stays sharded."""
    alone = replace(
        job.parallel, tp=1, pp=1, cp=1, ep=1, expert_tp=1, virtual=1, sequence_parallel=False, layers_as=(), shard=0
    )
    kinds: dict[str, dict[str, Any]] = {
        "DP": {},
        f"TP {degree}": {"tp": degree, "sequence_parallel": True},
        f"PP {degree}": {"pp": degree},
    }
    kinds |= {f"CP {degree}": {"cp": degree}} | ({f"EP {degree}": {"ep": degree}} if job.model.experts else {})
    return [(name, replace(job, parallel=replace(alone, **how))) for name, how in kinds.items()]


def _plan_point(name: str, job: Job, noise: NoiseModel, setup: StudySetup) -> StudyPoint | SkippedPoint:
    wrong = problems(job)
    if wrong:
        return SkippedPoint(name, wrong[0])
    found = replace(predict_job(job), drawn=False)
    shape = without_fitted_stragglers(step_model(job, found.job_step), noise)
    point = StudyPoint(name, found, shape, noise, draw_point(shape, noise, setup))
    few = min(FEW, setup.draws)
    alone = {
        cause: draw(shape, only_sources(noise, some), setup.seed, few).p95.value / point.quiet - 1
        for cause, some in CAUSES.items()
    }
    return point.with_more(**alone)


# ---- one slow node, a hot rack


@dataclass(frozen=True, eq=False)
class _Fleet:
    """A job whose GPUs are all alike, to be slowed here and there; all other noise stays."""

    found: JobResult
    shape: StepModel
    noise: NoiseModel
    source: str
    setup: StudySetup

    @staticmethod
    def of(job: Job, setup: StudySetup) -> _Fleet:
        found = replace(predict_job(job), drawn=False)
        belief, source = belief_of(job, found.seconds, setup.noise)
        alone = without_gpu_spread(belief.noise)
        shape = without_fitted_stragglers(step_model(job, found.job_step), alone)
        return _Fleet(found, shape, alone, source, setup)

    def drawn(self, slow: Sequence[tuple[int, int]], factor: float, uplink: float = 1.0) -> Draws:
        """Steps with groups (replica, stage) that take `factor` as long, and transfers between nodes `uplink`."""
        factors = np.ones((self.shape.replicas, self.shape.stages))
        for replica, stage in slow:
            factors[replica, stage] = factor
        found = draw_placement(ReplicaTimes(self.shape, self.noise), factors, self.setup.seed, self.setup.draws)
        late = sum(float(self.shape.later(k, np.array(uplink))) for k in self.shape.across if uplink != 1)
        return replace(found, seconds=found.seconds + late, lasting=found.lasting + late) if late else found

    def point(self, name: str, draws: Draws, **more: float) -> StudyPoint:
        return StudyPoint(name, self.found, self.shape, self.noise, draws).with_more(**more)


def slow_node_study(job: Job, factors: Sequence[float] = FACTORS, setup: StudySetup = SETUP) -> Study:
    """One node whose GPUs take some times as long, in the stage where that costs most and where it costs least."""
    _check(factors)
    fleet, count = _Fleet.of(job, setup), max(1, job.platform.domain)
    groups = max(1, min(fleet.shape.replicas, count // fleet.shape.together))
    base = fleet.drawn((), 1.0)
    points = [fleet.point("none", base, factor=1.0, least=0.0, most=0.0, stage=-1.0)]
    for factor in sorted(factors):
        by_stage = [fleet.drawn([(r, s) for r in range(groups)], factor) for s in range(fleet.shape.stages)]
        costs = [d.p95.value / base.p95.value - 1 for d in by_stage]
        worst = int(np.argmax(costs))
        more = {"factor": factor, "least": min(costs), "most": max(costs), "stage": float(worst)}
        points.append(fleet.point(f"x{factor:g}", by_stage[worst], **more))
    return Study("slow-node", job, tuple(points), (), fleet.source)


def hot_rack_study(
    job: Job, factor: float = 1.1, rack: int = 32, uplink: float = 1.0, setup: StudySetup = SETUP
) -> Study:
    """A rack whose GPUs take `factor` as long, and whose uplink `uplink`: laid along data parallel ranks (as ranks are
    numbered), along the stages of a pipeline, and scattered one group a replica over all stages."""
    _check((factor, uplink))
    fleet = _Fleet.of(job, setup)
    replicas, stages = fleet.shape.replicas, fleet.shape.stages
    many = max(1, round(rack / fleet.shape.together))
    if rack > job.gpus:
        raise PresageError(f"--rack {rack}: the job has {job.gpus} GPUs")
    last = stages - 1
    layouts = {
        "along DP, last stage": [(i % replicas, last - i // replicas) for i in range(many)],
        "along DP, first stage": [(i % replicas, i // replicas) for i in range(many)],
        "whole pipelines": [(i // stages, i % stages) for i in range(many)],
        "scattered": [(i * replicas // many if many <= replicas else i % replicas, i % stages) for i in range(many)],
    }
    base = fleet.drawn((), 1.0)
    points = [fleet.point("no hot rack", base, cost=0.0, groups=0.0)]
    for name, where in layouts.items():
        some = fleet.drawn(where, factor)
        points.append(fleet.point(name, some, cost=some.p95.value / base.p95.value - 1, groups=float(len(set(where)))))
    if uplink != 1:
        some = fleet.drawn((), 1.0, uplink)
        points.append(
            fleet.point(f"uplink x{uplink:g} alone", some, cost=some.p95.value / base.p95.value - 1, groups=0.0)
        )
    return Study("hot-rack", job, tuple(points), (), fleet.source)


def _check(factors: Sequence[float]) -> None:
    if not factors or min(factors) < 1 or max(factors) > 100:
        raise PresageError("slow GPUs and links take 1 to 100 times as long as usual")
