"""Roofline points of a job: FLOPs, bytes and seconds of each block of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from presage.configs.job import Job
from presage.costs.closed_form.op_shapes import number_kind
from presage.graph.graph import Op, argument
from presage.graph.work import bytes_moved
from presage.prediction.breakdown import RooflinePoint
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel
from presage.prediction.jobs.efficiency import Efficiency, shipped_efficiency
from presage.prediction.jobs.embedding_head import embedding_graph, further_graph, head_graph
from presage.prediction.jobs.job_flops import peak_of
from presage.prediction.jobs.job_step import JobStep
from presage.prediction.jobs.layer_graph import LayerGraph
from presage.prediction.jobs.stages import assign_layers, recomputed_share
from presage.prediction.jobs.transformer_layer import layer_graph

KINDS = ("products", "attention", "streams")
Key = tuple[str, str, str]


def job_roofline(job: Job, step: JobStep, efficiency: Efficiency | None = None) -> tuple[RooflinePoint, ...]:
    """Kernels of one GPU of the busiest stage by block, phase and kind of work, longest first; without collectives.
    Recomputation counts as forward."""
    model = BlockCostModel(job, efficiency or shipped_efficiency())
    found: dict[Key, RooflinePoint] = {}
    for layer, times, recomputed in _layers(job, int(np.argmax(step.pipeline.busy))):
        costs, ops = model.op_costs(layer), layer.graph.ops
        for block in layer.blocks:
            again = recomputed_share(job.recompute, block.name, block.has_gemm) if recomputed else 0.0
            for places, often in ((block.forward, 1.0 + again), (block.backward, 1.0)):
                for i in places:
                    if not ops[i].group and times * often:
                        one = _one(model, step, layer, ops[i], costs[i])
                        _add(found, one, times * often)
    return tuple(sorted(found.values(), key=lambda r: -r.seconds))


def _layers(job: Job, stage: int) -> Iterator[tuple[LayerGraph, float, bool]]:
    """The graphs of a stage, how often each runs in a step, and whether it may be recomputed: never the ends."""
    d, m = assign_layers(job), job.model
    for (layers, first, last), count in zip(d.kinds, d.counts[stage].tolist(), strict=True):
        often = count * job.microbatches
        for number, times in layers:
            yield layer_graph(job, number), times * often, True
        if first:
            yield embedding_graph(job), often, False
        if last:
            yield head_graph(job), often, False
        if last and m.predicted:
            yield layer_graph(job, m.layers - 1), often * m.predicted, True
            yield further_graph(job), often * m.predicted, False


def _add(found: dict[Key, RooflinePoint], one: RooflinePoint, times: float) -> None:
    key = (one.name, one.phase, one.family)
    r = found.get(key, replace(one, calls=0.0, seconds=0.0, flops=0.0, moved=0.0, least=0.0))
    found[key] = replace(
        r,
        calls=r.calls + one.calls * times,
        seconds=r.seconds + one.seconds * times,
        flops=r.flops + one.flops * times,
        moved=r.moved + one.moved * times,
        least=r.least + one.least * times,
    )


def _one(model: BlockCostModel, step: JobStep, layer: LayerGraph, op: Op, cost: BlockCost) -> RooflinePoint:
    """The point of a single op."""
    gpu = model.job.platform.gpu
    if cost.stream:
        launches = argument(op, "launches")
        assert isinstance(launches, int)
        least = cost.nbytes / gpu.memory_bandwidth
        return RooflinePoint(op.module, "", op.phase, "streams", launches, cost.stream, 0.0, cost.nbytes, least, 0.0)
    if cost.product:
        factor = model.backward if op.phase == "backward" else 1.0
        peak = peak_of(gpu, number_kind(layer.graph, op, layer.graph.inputs_of(op)[-1]))[1]
        kind, seconds, flops, nbytes = "products", cost.product * factor, cost.flops, cost.nbytes
    else:
        peak, nbytes = peak_of(gpu, "bf16")[1], float(bytes_moved(layer.graph, op).total)
        kind, seconds, flops = "attention", cost.attention, cost.attention_flops
    least = max(flops / peak, nbytes / gpu.memory_bandwidth)
    return RooflinePoint(op.module, "", op.phase, kind, 1.0, seconds * step.slowdown, flops, nbytes, least, peak)
