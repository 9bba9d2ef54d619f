"""The step of a job: chunks through the pipeline, transfers between replicas, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.costs.layer_host import LayerHost
from presage.engine import exposed_after, exposed_before
from presage.parallel.orders import Route
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import PipelineStep, run_pipeline
from presage.parallel.plan import LAYER_AXES, Axis
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.chunk_time import ChunkTimes, chunk_times
from presage.prediction.jobs.efficiency import Efficiency, shipped_efficiency
from presage.prediction.jobs.job_host import layer_host_of
from presage.prediction.jobs.optimizer_step import optimizer_seconds
from presage.prediction.jobs.replica_traffic import exchange
from presage.prediction.jobs.stages import Chunk, Stages, chunks
from presage.prediction.jobs.weights import Weights, trained_weights
from presage.prediction.jobs.work_pace import EVEN, WorkPaces

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class JobStep:
    """A simulated step of a job at one GPU clock."""

    seconds: float
    pipeline: PipelineStep
    slowdown: float  # of tensor-core kernels, by the power limit
    forward: Floats  # [stage, chunk] seconds of a microbatch
    backward: Floats
    plan: Stages  # the chunks of each stage
    passes: ChunkTimes  # by kind of chunk
    replicas: float  # seconds of exposed communication between replicas
    update: float  # seconds of the optimizer
    through: int  # microbatches that go through each chunk

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by kind of work on the busiest stage; the bubble is the rest of the pipeline's time."""
        stage = int(np.argmax(self.pipeline.busy))
        parts = _parts(self.plan, stage, self.passes, self.slowdown, self.through)
        bubble = max(0.0, self.pipeline.total - sum(parts.values()))
        return parts | {"bubble": bubble, "dp": self.replicas, "optimizer": self.update}


def job_step(job: Job, efficiency: Efficiency | None = None, paces: WorkPaces = EVEN) -> JobStep:
    """Simulate a step: at full clock, and again at the clock that the power limit allows."""
    pricer = BlockCostModel(job, efficiency or shipped_efficiency(), paces)
    setting = StepInputs.of(job, pricer)
    first = step_at_clock(setting, 1.0)
    slow = slowdown(job, pricer, setting.plan, first.seconds)
    return first if slow == 1.0 else step_at_clock(setting, slow)


def slowdown(job: Job, pricer: BlockCostModel, plan: Stages, seconds: float) -> float:
    """Slowdown of tensor-core kernels by the power limit, on the stage that computes most."""
    if job.precision == "fp32":
        return 1.0  # no tensor cores
    ahead, back = plan.busiest
    n, both = job.passes, ahead + back
    tensor = (both.product + both.attention) * n
    flops = {
        job.precision: both.flops * n,
        "attention": ahead.attention_flops * n,
        "attention_backward": back.attention_flops * n,
    }
    power = pricer.kernels.power
    return power.slowdown(power.energy(flops, both.nbytes * n), tensor, max(0.0, seconds - tensor))


class DpTraffic(NamedTuple):
    """Communication between replicas by kind of chunk: seconds for gradients and parameters, and number of buckets."""

    reduce: Floats
    gather: Floats
    parts: Floats


class StepInputs(NamedTuple):
    """Everything of a step that does not depend on the clock."""

    job: Job
    pricer: BlockCostModel
    plan: Stages
    host: LayerHost
    schedule: Schedule
    send: float  # seconds of activations from a stage to the next
    sent: DpTraffic | None  # between replicas after the last pass; None where each pass sends its own
    tied: float  # seconds of gradients of weights that two stages have
    update: float  # seconds of the optimizer

    @staticmethod
    def of(job: Job, pricer: BlockCostModel) -> StepInputs:
        p, plan, host = job.parallel, chunks(job, pricer), layer_host_of(job, pricer.efficiency)
        schedule = Schedule.of(p.pipeline_kind.name, p.pp, job.microbatches, p.virtual)
        sent = None if _by_layer(job) else _dp_traffic(job, pricer, plan)
        update = _update(job, pricer, plan, host)
        tied = _tied(job, pricer) + _copies(job, pricer, plan)
        return StepInputs(job, pricer, plan, host, schedule, _send(job, pricer), sent, tied, update)


def step_at_clock(s: StepInputs, slow: float) -> JobStep:
    """Simulate the step with tensor-core kernels slowed down by this factor."""
    job, at = s.job, s.plan.at
    passes = chunk_times(job, s.pricer, s.plan.kinds, s.host, slow)
    forward, backward = passes.forward[at], passes.backward[at]
    weight = passes.weight[at] if s.schedule.splits_backward else None
    if weight is not None:
        backward = backward - weight
    done = run_pipeline(s.schedule, forward, backward, weight, s.send, job.overlap.pipeline)
    replicas = s.tied
    if s.sent:
        reduce, gather, parts = (x[at] for x in s.sent)
        replicas += exposed_after(reduce, parts, done.last_backward, backward, done.total, job.overlap.gradients)
        replicas += exposed_before(gather, parts, done.first_forward, forward, job.overlap.parameters)
    seconds = done.total + replicas + s.update
    return JobStep(seconds, done, slow, forward, backward, s.plan, passes, replicas, s.update, job.passes)


def _send(job: Job, pricer: BlockCostModel) -> float:
    """Activations from a stage to the next: each tensor-parallel rank sends its part."""
    p = job.parallel
    if p.pp == 1:
        return 0.0
    width = 4 if job.precision in ("fp32", "tf32") else 2
    nbytes = job.rank_tokens * job.model.hidden * width / p.tp
    took = pricer.collective_seconds("send_recv", nbytes, Axis.PP)
    if p.tp > 1 and not p.sequence_parallel:  # and gathers what it got
        took += pricer.collective_seconds("all_gather", nbytes * p.tp, Axis.TP)
    return took


def _by_layer(job: Job) -> bool:
    """Whether parameters and gradients are sent by layer, in each pass."""
    return job.parallel.by_layer


def _dp_traffic(job: Job, pricer: BlockCostModel, plan: Stages) -> DpTraffic:
    sent = [exchange(job, pricer, _weights(job, pricer, c)) for c in plan.kinds]
    return DpTraffic(*(np.array([float(getattr(x, name)) for x in sent]) for name in DpTraffic._fields))


def _tied(job: Job, pricer: BlockCostModel) -> float:
    """Gradients of weights that both ends use."""
    m, p = job.model, job.parallel
    if not m.tied or p.pp == 1 or _by_layer(job) or p.pipeline_kind.route is not Route.LOOP or job.tuning.frozen:
        return 0.0
    nbytes = m.vocab * m.hidden / p.tp * job.framework.reduce_bytes
    return pricer.collective_seconds("all_reduce", nbytes, Axis.PP)


def _copies(job: Job, pricer: BlockCostModel, plan: Stages) -> float:
    """Gradients of layers that two stages have (DualPipe), summed up between them; each rank's share of them where the
    optimizer is sharded."""
    if job.parallel.pipeline_kind.route is not Route.BOTH_WAYS or _by_layer(job):
        return 0.0
    parameters = np.array([_weights(job, pricer, c) for c in plan.kinds])
    if job.parallel.zero:
        parameters = parameters / (job.sharding, max(1, job.expert_dp))
    most = float((plan.counts @ parameters.sum(axis=1)).max())
    return pricer.collective_seconds("all_reduce", most * job.framework.reduce_bytes, Axis.PP)


def _update(job: Job, pricer: BlockCostModel, plan: Stages, host: LayerHost) -> float:
    """The optimizer, on the rank with most parameters of its own."""
    if job.optimizer == "none":
        return 0.0
    parameters = np.array([_weights(job, pricer, c) for c in plan.kinds])
    if job.parallel.zero:
        parameters = parameters / (job.sharding, max(1, job.expert_dp))
    most = float((plan.counts @ parameters.sum(axis=1)).max())
    layers = float((plan.counts @ [c.layers for c in plan.kinds]).max())
    launched = (host.optimizer + layers * host.optimizer_layer) * pricer.paces.host
    return max(float(optimizer_seconds(job, pricer, most, layers)), launched)


def _weights(job: Job, pricer: BlockCostModel, c: Chunk) -> Weights[float]:
    """Trained parameters of a chunk; worked out once for all plans that have it."""
    p, kind = job.parallel, (c.dealt, c.first, c.last)
    key = ("weights", p.tp, p.ep, p.expert_tp, p.pp * p.virtual > 1, kind)
    return pricer.known.get(key, lambda: trained_weights(job, *kind))


def _parts(plan: Stages, stage: int, passes: ChunkTimes, slow: float, microbatches: int) -> dict[str, float]:
    """Seconds of a stage by kind of work."""
    ahead, back = plan.work(stage)
    c = (ahead + back) * microbatches
    counts = plan.counts[stage] * microbatches
    transfers = {axis.value: getattr(c, axis.value) for axis in LAYER_AXES}
    transfers[Axis.EP.value] -= float(counts @ passes.hidden)
    return {
        "products": c.product * slow,
        "attention": c.attention * slow,
        "streams": c.stream,
        **transfers,
        "sharding": float(counts @ passes.waits),
        "host": float(counts @ passes.host),
    }
