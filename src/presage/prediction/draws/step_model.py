"""StepModel: what draws need of a job's step: pipeline, seconds by class of work, and synchronization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.noise.model import CLASSES, COMMUNICATION
from presage.parallel.pipeline_run import PipelineStep
from presage.parallel.plan import LAYER_AXES, Axis
from presage.prediction.jobs.block_cost import communicators
from presage.prediction.jobs.chunk_time import ChunkTimes
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_step import JobStep, job_step
from presage.prediction.jobs.stages import Chunk
from presage.prediction.jobs.work_pace import EVEN, WorkPaces

Floats = NDArray[np.float64]
NODE = 8  # GPUs: rates of failures and stalls are told by nodes of eight
PASSES = ("forward", "backward", "weight")
TIMES = (0.5, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 10.0, 20.0)  # as long as usual: points of a transfer's curve


@dataclass(frozen=True, eq=False)
class StepModel:
    """A job's step reduced to what draws need."""

    job: Job
    seconds: float  # with no noise
    pipeline: PipelineStep
    work: Floats  # [class, pass, stage, chunk]: seconds of a microbatch; passes are forward, backward, weight
    replicas: int  # that meet only at the end of a step
    together: int  # GPUs of a stage that wait for each other in every layer
    nodes: float
    across: frozenset[str]  # classes of transfers that leave a node
    efficiency: Efficiency | None = None
    calm: float = 1.0  # what is left of the pipeline's seconds when nothing varies: `without_fitted_stragglers`
    paces: WorkPaces = EVEN  # that it was priced at
    still: frozenset[int] = frozenset()  # stages whose GPUs are all alike, and whose work takes no noise of its own
    immune: frozenset[str] = frozenset()  # classes of work that slow GPUs are not slow at
    held: frozenset[str] = frozenset()  # collectives that take their usual time whatever the network does

    @property
    def stages(self) -> int:
        return self.pipeline.schedule.stages

    @cached_property
    def curves(self) -> dict[str, Floats]:
        """What a step takes more (seconds) when transfers of a class take `TIMES` as long: of those that matter."""
        present = [k for k in COMMUNICATION if k in self._sent]
        return {k: np.array([self._at(k, t) - self.seconds for t in TIMES]) for k in present}

    def later(self, kind: str, times: Floats) -> Floats:
        """What a step takes more when transfers of a class take so many times as long; straight on beyond the curve."""
        curve = self.curves.get(kind)
        if curve is None:
            return np.zeros(times.shape)
        slope = (curve[-1] - curve[-2]) / (TIMES[-1] - TIMES[-2])
        return np.asarray(np.interp(times, TIMES, curve) + slope * np.maximum(times - TIMES[-1], 0.0))

    def _at(self, kind: str, times: float) -> float:
        paces = self.paces._replace(held=self.held, **{kind: getattr(self.paces, kind) * times})
        return job_step(self.job, self.efficiency, paces).seconds

    def changed(self, **changes: Any) -> StepModel:
        """With other `calm`, `across`, `still` or `immune`, which curves have no part in."""
        made = replace(self, **changes)
        made.__dict__.update((k, v) for k, v in self.__dict__.items() if k == "curves")
        return made

    @property
    def _sent(self) -> set[str]:
        """Classes of transfers that the job has."""
        p, job = self.job.parallel, self.job
        by_layer = p.zero >= 2 or p.fsdp
        alone = {axis.value: getattr(p, axis.value) for axis in LAYER_AXES}
        alone |= {"send": p.pp, "sharding": job.dp if by_layer else 1}
        replicas = job.dp * p.cp if not by_layer or p.shard else 1
        return {k for k, ranks in (*alone.items(), ("dp", replicas)) if ranks > 1}


def step_model(job: Job, found: JobStep | None = None, efficiency: Efficiency | None = None) -> StepModel:
    """The step model of a job."""
    s = found or job_step(job, efficiency)
    replicas, together = _together(job)
    nodes = job.gpus / NODE
    return StepModel(job, s.seconds, s.pipeline, _work(s), replicas, together, nodes, _across(job), efficiency)


def _together(job: Job) -> tuple[int, int]:
    """How many replicas there are that meet only at the end, and how many GPUs of a stage meet in every layer: those
    that share its tensors, its sequences, its experts, or its parameters where these are sharded."""
    p = job.parallel
    meet = p.tp * p.cp
    if p.ep > 1:
        meet = max(meet, p.ep * p.expert_tp)
    if p.zero == 3 or p.fsdp:
        meet = max(meet, p.tp * min(job.sharding, job.dp * p.cp))
    meet = min(meet, job.gpus // p.pp)
    return max(1, job.gpus // (p.pp * meet)), meet


def _across(job: Job) -> frozenset[str]:
    g = communicators(job)
    by = {axis.value: g[axis] for axis in LAYER_AXES}
    by |= {"send": g[Axis.PP], "dp": g[Axis.DP], "sharding": g[Axis.SHARD]}
    return frozenset(k for k, group in by.items() if group.domains > 1)


def _work(s: JobStep) -> Floats:
    """Seconds of each class in each pass; those of all classes add up to the pass."""
    split = s.pipeline.schedule.splits_backward
    kinds = np.array([_passes(c, s.passes, i, s.slowdown, split) for i, c in enumerate(s.plan.kinds)])
    return np.moveaxis(kinds[s.plan.at], (2, 3), (0, 1))


def _passes(c: Chunk, times: ChunkTimes, number: int, slow: float, split: bool) -> Floats:
    """[class, pass] of one kind of chunk."""
    forward, backward, weight, waits, host = (float(x[number]) for x in times[:5])
    out = np.zeros((len(CLASSES), len(PASSES)))
    for i, (cost, total) in enumerate(((c.passes.forward, forward), (c.passes.backward + c.passes.again, backward))):
        own = {"products": cost.product * slow, "attention": cost.attention * slow, "streams": cost.stream}
        own |= {axis.value: getattr(cost, axis.value) for axis in LAYER_AXES}
        rest = total - sum(own.values())
        own["ep"] += min(0.0, rest)  # hidden beside compute
        late = host / (host + waits) if host + waits > 0 else 1.0
        own |= {"host": max(0.0, rest) * late, "sharding": max(0.0, rest) * (1 - late)}
        for name, value in own.items():
            out[CLASSES.index(name), i] = value
    if split:
        at = CLASSES.index("products")
        out[at, 2] = weight
        out[at, 1] -= weight
    return np.maximum(out, 0.0)


def scale_class(shape: StepModel, kind: str, times: float) -> StepModel:
    """The same step with a class of work that takes so many times as long, through the job's laws."""
    paces = shape.paces._replace(**{kind: getattr(shape.paces, kind) * times})
    made = step_model(shape.job, job_step(shape.job, shape.efficiency, paces), shape.efficiency)
    return replace(made, paces=paces)
