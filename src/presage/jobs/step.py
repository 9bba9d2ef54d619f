"""The step of a job: chunks through the pipeline, transfers between replicas, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from presage.costs.layer_host import LayerHost, layer_host
from presage.jobs.cost import Cost, Pricer
from presage.jobs.efficiency import Efficiency
from presage.jobs.job import Job
from presage.jobs.layer import softmax_fused
from presage.jobs.sharded import chunk_time
from presage.jobs.stages import Chunk, chunks
from presage.jobs.traffic import exchange, exposed_gathers, exposed_reductions
from presage.jobs.weights import weights
from presage.parallel.pipeline import Run, Schedule, run

__all__ = ["Step", "step"]

# Bytes a parameter: gradient twice, moments and master copy read and written, the copy for the next step.
UPDATE_BYTES = {"adam": 46.0, "adamw": 46.0, "sgd": 22.0, "none": 0.0}


@dataclass(frozen=True)
class Step:
    """A step's seconds, and where they go on the stage that takes longest."""

    seconds: float
    parts: dict[str, float]
    pipeline: Run
    slowdown: float  # of tensor-core kernels, by the power limit
    forward: np.ndarray  # [stage, chunk] seconds of a microbatch
    backward: np.ndarray


def step(job: Job, efficiency: Efficiency | None = None) -> Step:
    """Twice: at the full clock, and with what the power limit leaves of it."""
    pricer = Pricer(job, efficiency or Efficiency())
    plan = chunks(job, pricer)
    host = layer_host_of(job)
    first = composed(job, pricer, plan, host, 1.0)
    slow = slowdown(job, pricer, plan, first.seconds)
    return first if slow == 1.0 else composed(job, pricer, plan, host, slow)


def slowdown(job: Job, pricer: Pricer, plan: list[list[Chunk]], seconds: float) -> float:
    """By the power limit, of the stage that computes most; the rest of the step is other work and waiting."""
    ahead, back = max((_work(row) for row in plan), key=lambda w: w[0].compute + w[1].compute)
    if job.precision == "fp32":
        return 1.0  # no tensor cores
    n, both = job.microbatches, ahead + back
    tensor = (both.product + both.attention) * n
    flops = {
        job.precision: both.flops * n,
        "attention": ahead.attention_flops * n,
        "attention_backward": back.attention_flops * n,
    }
    return pricer.chip.slowdown(tensor, max(0.0, seconds - tensor), flops, both.nbytes * n)


def _work(row: list[Chunk]) -> tuple[Cost, Cost]:
    """Of a microbatch, forward (repeated parts too) and backward."""
    ahead = back = Cost()
    for c in row:
        ahead, back = ahead + c.passes.forward + c.passes.again, back + c.passes.backward
    return ahead, back


def layer_host_of(job: Job) -> LayerHost:
    era = "a100" if job.platform.gpu.architecture in ("Volta", "Ampere", "Turing", "Pascal") else "h100"
    f, p = job.framework, job.parallel
    fused = f.attention not in ("unfused", "fused-softmax")
    return layer_host(f.host, era, p.tp, p.sequence, job.model.experts is not None, fused, softmax_fused(job))


def composed(job: Job, pricer: Pricer, plan: list[list[Chunk]], host: LayerHost, slow: float) -> Step:
    p = job.parallel
    passes = [[chunk_time(job, pricer, c, host, slow) for c in row] for row in plan]
    forward = np.array([[x.forward for x in row] for row in passes])
    backward = np.array([[x.backward for x in row] for row in passes])
    kind = "interleaved" if p.virtual > 1 else p.schedule
    weight = np.array([[x.weight for x in row] for row in passes]) if kind == "zero-bubble" else None
    if weight is not None:
        backward = backward - weight
    send = _send(job, pricer)
    done = run(Schedule.of(kind, p.pp, job.microbatches, p.virtual), forward, backward, weight, send, job.overlap.pipeline)
    reduced, gathered = _replicas(job, pricer, plan, done, forward, backward)
    update = _update(job, pricer, plan, host)
    seconds = done.total + reduced + gathered + update
    worst = int(np.argmax(done.busy))
    parts = _parts(plan[worst], passes[worst], slow, job.microbatches)
    parts |= {"bubble": max(0.0, done.total - sum(parts.values())), "dp": reduced + gathered, "optimizer": update}
    return Step(seconds, parts, done, slow, forward, backward)


def _send(job: Job, pricer: Pricer) -> float:
    """Activations from a stage to the next: each tensor-parallel rank sends its part."""
    p = job.parallel
    if p.pp == 1:
        return 0.0
    width = 4 if job.precision in ("fp32", "tf32") else 2
    nbytes = job.rank_tokens * job.model.hidden * width / p.tp
    took = pricer.talk_seconds("send_recv", nbytes, "neighbour")
    if p.tp > 1 and not p.sequence:  # and gathers what it got
        took += pricer.talk_seconds("all_gather", nbytes * p.tp, "tp")
    return took


def _replicas(job, pricer, plan, done, forward, backward) -> tuple[float, float]:
    """Exposed seconds of gradients and of parameters."""
    if job.parallel.zero == 3 or job.parallel.fsdp:
        return 0.0, 0.0  # sent by layer, in each pass
    reduced = gathered = 0.0
    for s, row in enumerate(plan):
        sent = [exchange(job, pricer, weights(job, c.layers, c.expert_layers, c.first, c.last)) for c in row]
        reduced = max(reduced, exposed_reductions(sent, done.last_backward[s], backward[s], done.total, job.overlap.gradients))
        gathered = max(gathered, exposed_gathers(sent, done.first_forward[s], forward[s], job.overlap.parameters))
    m = job.model
    if m.tied and job.parallel.pp > 1:
        nbytes = m.vocab * m.hidden / job.parallel.tp * job.framework.reduce_bytes
        reduced += pricer.talk_seconds("all_reduce", nbytes, "neighbour")
    return reduced, gathered


def _update(job: Job, pricer: Pricer, plan: list[list[Chunk]], host: LayerHost) -> float:
    """The optimizer, on the rank with most parameters of its own."""
    if job.optimizer == "none":
        return 0.0
    most = 0.0
    for row in plan:
        shared = experts = 0.0
        for c in row:
            w = weights(job, c.layers, c.expert_layers, c.first, c.last)
            shared, experts = shared + w.shared, experts + w.experts
        if job.parallel.zero:
            shared, experts = shared / job.sharding, experts / max(1, job.expert_dp)
        most = max(most, shared + experts)
    layers = max(sum(c.layers for c in row) for row in plan)
    launched = (host.optimizer + layers * host.optimizer_layer)
    return max(pricer.chip.stream(UPDATE_BYTES.get(job.optimizer, 46.0) * most, 1, "optimizer"), launched)


def _parts(row, passes, slow: float, microbatches: int) -> dict[str, float]:
    """Seconds of a stage by kind of work."""
    c = sum((x.passes.forward + x.passes.backward + x.passes.again for x in row), Cost()) * microbatches
    waits = sum(x.waits for x in passes) * microbatches
    host = sum(x.host for x in passes) * microbatches
    return {
        "products": c.product * slow, "attention": c.attention * slow, "streams": c.stream,
        "tp": c.tp, "cp": c.cp, "ep": c.ep, "sharding": waits, "host": host,
    }  # fmt: skip
