"""How near the GPU's limits each part of a layer runs: what it computes, what it moves, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from presage.configs.job import Job
from presage.prediction.jobs.block_cost import Pricer
from presage.prediction.jobs.efficiency import Efficiency, shipped
from presage.prediction.jobs.embedding_head import embedding_block, further_blocks, head_blocks
from presage.prediction.jobs.job_flops import peak_of
from presage.prediction.jobs.job_step import JobStep
from presage.prediction.jobs.ops import Attend, Block, Op, Product, Stream, Talk
from presage.prediction.jobs.stages import dealt, repeated
from presage.prediction.jobs.transformer_layer import layer_blocks

__all__ = ["KINDS", "Ran", "ran"]

KINDS = ("products", "attention", "streams")
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Ran:
    """Of one GPU in a step: all launches of one part of a layer in one phase and of one kind of work."""

    block: str
    phase: str  # forward, backward
    kind: str
    launches: float
    seconds: float
    flops: float
    moved: float  # bytes, each tensor once
    peak: float  # FLOP/s of what it runs on
    least: float  # seconds that the GPU's peaks allow


def ran(job: Job, step: JobStep, efficiency: Efficiency | None = None) -> tuple[Ran, ...]:
    """On the stage that works longest, the longest first; transfers are told of elsewhere. What is computed again is in
    the forward phase."""
    pricer = Pricer(job, efficiency or shipped())
    found: dict[Key, Ran] = {}
    for block, times, again in _blocks(job, int(np.argmax(step.pipeline.busy))):
        for op in block.forward:
            _add(found, pricer, step, (block.name, "forward"), op, times * (1.0 + again))
        for op in block.backward:
            _add(found, pricer, step, (block.name, "backward"), op, times)
    return tuple(sorted(found.values(), key=lambda r: -r.seconds))


def _blocks(job: Job, stage: int) -> Iterator[tuple[Block, float, float]]:
    """Of a stage, how often each runs in a step, and the share of it that is computed again: never of the ends."""
    d, m = dealt(job), job.model
    for (layers, first, last), count in zip(d.kinds, d.counts[stage].tolist(), strict=True):
        often = count * job.microbatches
        for number, times in layers:
            yield from _layer(job, number, times * often)
        if first:
            yield embedding_block(job), often, 0.0
        if last:
            yield from ((b, often * (1 + m.predicted), 0.0) for b in head_blocks(job))
        if last and m.predicted:
            yield from _layer(job, m.layers - 1, often * m.predicted)
            yield from ((b, often * m.predicted, 0.0) for b in further_blocks(job))


def _layer(job: Job, number: int, times: float) -> Iterator[tuple[Block, float, float]]:
    return ((b, times, repeated(job.recompute, b)) for b in layer_blocks(job, number))


def _add(found: dict[Key, Ran], pricer: Pricer, step: JobStep, where: tuple[str, str], op: Op, times: float) -> None:
    if isinstance(op, Talk) or not times:
        return
    one = _one(pricer, step, where, op)
    key = (*where, one.kind)
    r = found.get(key, replace(one, launches=0.0, seconds=0.0, flops=0.0, moved=0.0, least=0.0))
    found[key] = replace(
        r,
        launches=r.launches + one.launches * times,
        seconds=r.seconds + one.seconds * times,
        flops=r.flops + one.flops * times,
        moved=r.moved + one.moved * times,
        least=r.least + one.least * times,
    )


def _one(pricer: Pricer, step: JobStep, where: tuple[str, str], op: Product | Attend | Stream) -> Ran:
    """One launch."""
    gpu, cost = pricer.job.platform.gpu, pricer.one(op)
    if isinstance(op, Stream):
        return Ran(*where, "streams", op.launches, cost.stream, 0.0, op.nbytes, 0.0, op.nbytes / gpu.memory_bandwidth)
    if isinstance(op, Product):
        peak, back = peak_of(gpu, op.kind)[1], pricer.backward if where[1] == "backward" else 1.0
        least = max(cost.flops / peak, cost.nbytes / gpu.memory_bandwidth)
        return Ran(*where, "products", 1.0, cost.product * back * step.slowdown, cost.flops, cost.nbytes, peak, least)
    peak, moved = peak_of(gpu, "bf16")[1], _moved(op)
    least = max(cost.attention_flops / peak, moved / gpu.memory_bandwidth)
    return Ran(*where, "attention", 1.0, cost.attention * step.slowdown, cost.attention_flops, moved, peak, least)


def _moved(op: Attend) -> float:
    """Queries, keys, values and outputs once; backward their gradients as well. Two bytes a number."""
    rows = op.heads * op.queries + op.kv_heads * op.keys
    return 2.0 * op.batch * rows * (op.dim + op.value_dim) * (2.0 if op.backward else 1.0)
