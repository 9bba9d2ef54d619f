"""Lower bounds of the steps of many plans at once: of a family of plans whose layers cost the same.

A bound is the work of a stage at the full clock, between the first forward pass that reaches it and the last backward
pass that leaves it, and the optimizer's. Work is summed up from units: a layer of each kind, the embedding, the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.costs.layer_host import LayerHost
from presage.parallel.orders import Route
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.chunk_time import (
    ChunkWork,
    exchange_loss,
    hidden_share,
    hooked,
    launches,
    meets_host,
    offload_seconds,
    pass_times,
    recomputed_whole,
    sends_each_pass,
    transfers,
)
from presage.prediction.jobs.efficiency import Efficiency, shipped_efficiency
from presage.prediction.jobs.job_host import layer_host_of
from presage.prediction.jobs.layer_graph import LayerGraph
from presage.prediction.jobs.optimizer_step import optimizer_seconds
from presage.prediction.jobs.stages import (
    SHARED,
    Kind,
    PartKey,
    Priced,
    dealt_layers,
    end_part,
    layer_parts,
    recomputed_share,
)
from presage.prediction.jobs.transformer_layer import embedding_graph, further_graph, head_graph
from presage.prediction.jobs.vision_tower import tower_passes
from presage.prediction.jobs.weights import Weights, gathered_bytes, trained_weights

Floats = NDArray[np.float64]
FIRST, LAST = -2, -1  # units beside the kinds of layers: embedding, head
ROUNDING = 1e-12  # of a bound: sums in another order than a step's


def plan_lower_bounds(
    job: Job, sizes: Sequence[int], splits: tuple[ParallelPlan, ...], shardings: tuple[ParallelPlan, ...],
    recomputes: tuple[Recompute, ...], efficiency: Efficiency | None = None,
) -> Floats:  # fmt: skip
    """[size, split, sharding, recomputation]: seconds that no step of these plans is below. The plans differ from the
    job's in the size of microbatches, in how layers are assigned to stages and run (`splits`), in what replicas share
    (`shardings`) and in what is recomputed."""
    sized = [job.changed(micro_batch=size, parallel=shardings[0]) for size in sizes]
    first = BlockCostModel(sized[0], efficiency or shipped_efficiency())
    pricers, known = [first.of_plan(j) for j in sized], first.known
    shape = known.get(("shape", job.gpus, splits, shardings), lambda: _shape(pricers[0], splits, shardings))
    jobs = [[j.changed(parallel=p) for p in splits] for j in sized]
    hosts = [_hosts(some, pricer) for some, pricer in zip(jobs, pricers, strict=True)]
    whole = len(sizes), len(shardings), len(recomputes), len(shape.split)
    forward, backward = (np.broadcast_to(x, whole) for x in _times(shape, jobs, hosts, recomputes, pricers))
    found = np.empty((len(splits), *whole[:3]))
    for i, own in enumerate(shape.slices):
        copies = splits[i].pipeline_kind.route.copies
        passes = np.array([j.microbatches // copies for j in sized])
        found[i] = _longest(passes, splits[i], shape.at[i], shape.counts[i], forward[..., own], backward[..., own])
        if job.optimizer != "none":
            launched = [h[i].optimizer + shape.most_layers[i] * h[i].optimizer_layer for h in hosts]
            found[i] += np.maximum(shape.update[i], np.array(launched)[:, None])[:, :, None]
    return np.moveaxis(found, 0, 1) * (1 - ROUNDING)


def _longest(
    passes: NDArray[np.int64], p: ParallelPlan, at: NDArray[np.int64], counts: Floats, forward: Floats, backward: Floats
) -> Floats:
    """The longest stage, from the first pass that reaches it to the last that leaves it; [size, ..., chunk] in."""
    busy = passes[:, None, None, None] * ((forward + backward) @ counts.T)  # [..., stage]
    kind = p.pipeline_kind
    if kind.route is Route.BOTH_WAYS:  # any stage may be the first
        return np.asarray(busy.max(axis=-1))
    way = forward[..., at[:, 0]]
    if not kind.splits_backward:  # where weight gradients may come last, nothing need follow them
        way = way + backward[..., at].min(axis=-1)
    busy[..., 1:] += np.cumsum(way, axis=-1)[..., :-1]
    return np.asarray(busy.max(axis=-1))


# ---- what does not go with the size of microbatches


class _Shape(NamedTuple):
    """The kinds of chunks of several ways to split a model, one after the other; parameters and gradients between
    replicas, and the optimizer."""

    split: NDArray[np.int64]  # which way a chunk belongs to
    slices: list[slice]  # and the chunks of each
    units: Floats  # [chunk, unit]: layers of each kind, embedding, head
    at: list[NDArray[np.int64]]  # by split, as in `LayerAssignment`
    counts: list[Floats]
    layers: Floats
    ends: Floats  # 1 for chunks with the embedding or the head
    gather: Floats  # [sharding, 1, chunk]: seconds of parameters before a pass
    gather_again: Floats  # before a backward pass
    reduce: Floats  # of gradients
    update: Floats  # [split, sharding]: seconds of the optimizer, on the rank with most parameters of its own
    most_layers: Floats  # [split]: of a stage
    hooks: Floats  # [sharding, 1, 1]


def _shape(pricer: BlockCostModel, splits: Sequence[ParallelPlan], shardings: Sequence[ParallelPlan]) -> _Shape:
    dealt = [dealt_layers(pricer.job.model, p, pricer) for p in splits]
    each = [_units(d.kinds, _layer_numbers(pricer)) for d in dealt]
    begin = np.cumsum([0, *map(len, each)])
    slices = [slice(*pair) for pair in pairwise(begin.tolist())]
    units, split = np.concatenate(each), np.repeat(np.arange(len(splits)), np.diff(begin))
    layers, ends = units[:, :FIRST].sum(axis=1), units[:, FIRST:].max(axis=1)
    counts = [d.counts for d in dealt]
    most_layers = np.array([(c @ layers[own]).max() for c, own in zip(counts, slices, strict=True)])
    trained, gathered = _parameters(pricer, units)
    hooks = np.array([hooked(pricer.job, p) for p in shardings])[:, None, None]
    sent, update = np.zeros((3, len(shardings), 1, len(units))), np.zeros((len(splits), len(shardings)))
    for z, p in enumerate(shardings):
        own = pricer.of_plan(pricer.job.changed(parallel=p))
        if sends_each_pass(p):
            sent[::2, z, 0] = transfers(own.job, own, Weights(*trained.T), Weights(*gathered.T), np.maximum(1, layers))
            sent[1, z] = sent[0, z] * (p.zero == 3)
        if own.job.optimizer != "none":
            cut = (own.job.sharding, max(1, own.job.expert_dp)) if p.zero else (1, 1)
            held = (trained / cut).sum(axis=1)
            most = np.array([(c @ held[some]).max() for c, some in zip(counts, slices, strict=True)])
            update[:, z] = optimizer_seconds(own.job, own, most, most_layers)
    return _Shape(
        split,
        slices,
        units,
        [d.at for d in dealt],
        counts,
        layers,
        ends,
        sent[0],
        sent[1],
        sent[2],
        update,
        most_layers,
        hooks,
    )


def _layer_numbers(pricer: BlockCostModel) -> tuple[int, ...]:
    """Numbers of layers, the first of each kind."""
    m = pricer.job.model
    return pricer.known.get(("numbers",), lambda: tuple({m.kind(i): i for i in reversed(range(m.layers))}.values()))


@lru_cache(4096)
def _units(kinds: tuple[Kind, ...], numbers: tuple[int, ...]) -> Floats:
    out = np.zeros((len(kinds), len(numbers) + 2))
    for row, (layers, first, last) in zip(out, kinds, strict=True):
        for number, count in layers:
            row[numbers.index(number)] = count
        row[FIRST], row[LAST] = first, last
    return out


def _parameters(pricer: BlockCostModel, units: Floats) -> tuple[Floats, Floats]:
    """[chunk, (shared, experts)]: trained parameters, and bytes of those that are gathered."""
    job = pricer.job
    asked = [*((((n, 1),), False, False) for n in _layer_numbers(pricer)), ((), True, False), ((), False, True)]
    trained, gathered = (np.array([f(job, *one) for one in asked]) for f in (trained_weights, gathered_bytes))
    return units @ trained, units @ gathered


# ---- seconds of a microbatch

SECONDS, EXPERTS, BACK, BACK_EXPERTS, WEIGHT, AGAIN = range(6)  # columns of a unit; then, by recomputation, two each


def _times(
    shape: _Shape, jobs: Sequence[Sequence[Job]], hosts: Sequence[Sequence[LayerHost]],
    recomputes: tuple[Recompute, ...], pricers: Sequence[BlockCostModel],
) -> tuple[Floats, Floats]:  # fmt: skip
    """[size, sharding, recomputation, chunk]: seconds of both passes of a microbatch."""
    pricer, count = pricers[0], len(recomputes)
    units = np.array([_unit_costs(some[0], recomputes, p) for some, p in zip(jobs, pricers, strict=True)])
    cost = (shape.units @ units).transpose(2, 0, 1)[:, :, None, None, :]  # [column, size, 1, 1, chunk]
    again, again_experts = (np.moveaxis(cost[i : i + count, :, :, 0], 0, 2) for i in (AGAIN, AGAIN + count))
    whole = np.array([recomputed_whole(r) for r in recomputes])[:, None]
    host = _by_chunk(shape, hosts)
    launch, launch_back = launches(pricer.job, host, shape.layers, shape.ends, whole, shape.hooks)
    asked = ([[f(j) for j in some] for some in jobs] for f in (hidden_share, meets_host))
    paired, meets = (np.array(found)[:, None, None, shape.split] for found in asked)
    return pass_times(
        ChunkWork(
            cost[SECONDS], cost[BACK] + again, cost[EXPERTS], cost[BACK_EXPERTS] + again_experts, cost[WEIGHT],
            paired, exchange_loss(pricer.job, pricer), meets, shape.layers, shape.gather, shape.gather_again,
            shape.reduce, launch, launch_back, _offloads(shape, jobs, recomputes, pricer),
            pricer.job.overlap.weight_gradients, pricer.held,
        )
    )[:2]  # fmt: skip


def _hosts(jobs: Sequence[Job], pricer: BlockCostModel) -> list[LayerHost]:
    """Host times by split: they go with the schedule."""
    found = {j.hides_dispatch: j for j in jobs}
    each = {hides: layer_host_of(j, pricer.efficiency) for hides, j in found.items()}
    return [each[j.hides_dispatch] for j in jobs]


def _by_chunk(shape: _Shape, hosts: Sequence[Sequence[LayerHost]]) -> LayerHost:
    one = hosts[0][0]
    if all(h == one for some in hosts for h in some):
        return one
    names = LayerHost.__slots__
    each = (np.array([[getattr(h, name) for h in some] for some in hosts]) for name in names)
    return LayerHost(*(x[:, None, None, shape.split] for x in each))  # type: ignore[arg-type]


def _unit_costs(job: Job, recomputes: tuple[Recompute, ...], pricer: BlockCostModel) -> Floats:
    """[unit, column]"""

    def unit(part: tuple[PartKey, Priced], asked: tuple[Recompute, ...] = recomputes) -> Floats:
        return pricer.known.get(("unit", part[0], asked), lambda: _unit(job, pricer, part[1], asked))

    def layer(number: int) -> Floats:
        mixing, feeding = layer_parts(job, pricer, number)
        return unit(mixing) + unit(feeding)

    def end(graph: Callable[[Job], LayerGraph]) -> Floats:
        return unit(end_part(job, pricer, graph), (Recompute(),) * len(recomputes))

    first, last = end(embedding_graph), end(head_graph)
    if job.model.vision:
        first = first + _tower(job, recomputes, pricer)
    if job.model.predicted:
        last = last + job.model.predicted * (layer(job.model.layers - 1) + end(further_graph))
    return np.array([*map(layer, _layer_numbers(pricer)), first, last])


def _unit(job: Job, pricer: BlockCostModel, priced: Priced, recomputes: tuple[Recompute, ...]) -> Floats:
    each = [(b.forward, b.backward) for _, b in priced]
    ahead = np.array([(f.seconds(), f.ep) for f, _ in each]).reshape(-1, 2)
    back = np.array([(b.seconds(), b.ep, b.weight) for _, b in each]).reshape(-1, 3)
    shares = _shares(recomputes, tuple((block.name, block.has_gemm) for block, _ in priced))
    total, total_back = ahead.sum(axis=0), back.sum(axis=0)
    if job.overlap.shared_experts:
        shared = [(p.forward.compute, p.backward.compute) for block, p in priced if block.name in SHARED]
        for cost, compute in zip((total, total_back), np.array(shared).reshape(-1, 2).sum(axis=0), strict=True):
            cost[:2] -= min(cost[EXPERTS], compute) * (1 - pricer.held)
    return np.concatenate([total, total_back, (shares @ ahead).T.ravel()])


@lru_cache(4096)
def _shares(recomputes: tuple[Recompute, ...], blocks: tuple[tuple[str, bool], ...]) -> Floats:
    """[recomputation, block]: the share that is computed again."""
    found = [[recomputed_share(r, *block) for block in blocks] for r in recomputes]
    return np.array(found).reshape(len(recomputes), -1)


def _tower(job: Job, recomputes: Sequence[Recompute], pricer: BlockCostModel) -> Floats:
    """The encoder of images, before the embedding."""
    passes = [tower_passes(replace(job, recompute=r), pricer) for r in recomputes]
    f, b = passes[0].forward, passes[0].backward
    repeated = [p.again.seconds() for p in passes] + [p.again.ep for p in passes]
    return np.array([f.seconds(), f.ep, b.seconds(), b.ep, b.weight, *repeated])


def _offloads(
    shape: _Shape, jobs: Sequence[Sequence[Job]], recomputes: Sequence[Recompute], pricer: BlockCostModel
) -> Floats:
    """[size, 1, recomputation, chunk]: seconds of activations on their way to the host's memory."""
    if not any(r.offload for r in recomputes):
        return np.zeros(1)
    layers = [
        [[offload_seconds(some[0].changed(recompute=r), ((n, 1),)) for n in _layer_numbers(pricer)] for r in recomputes]
        for some in jobs
    ]
    return (np.array(layers) @ shape.units[:, :FIRST].T)[:, None]
