"""The encoder of images before a decoder, priced as a stack of layers of its own on the first stage."""

from __future__ import annotations

from dataclasses import replace

from presage.configs.job import Job
from presage.configs.transformer import Transformer
from presage.configs.tuning import FULL
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel, Passes
from presage.prediction.jobs.layer_blocks import RankSizes, builder, linear
from presage.prediction.jobs.layer_graph import LayerGraph
from presage.prediction.jobs.transformer_layer import layer_graph

NOTHING = Passes(BlockCost(), BlockCost(), BlockCost())


def tower_job(job: Job) -> Job:
    """The tower as a job: an image a sample, on the tensor-parallel ranks of the first stage."""
    v = job.model.vision
    assert v is not None
    letters = ["a" if v.full_every and (i + 1) % v.full_every == 0 else "w" for i in range(v.layers)]
    model = Transformer(
        v.hidden, v.layers, v.heads, 1, v.ffn, v.heads, v.hidden // v.heads, norm="rmsnorm" if v.gated else "layernorm",
        activation="swiglu" if v.gated else "gelu", bias=True, positions="none", causal=False, window=v.window,
        chunked=True, pattern="".join(letters) if v.window else "", name="vision",
    )  # fmt: skip
    samples = max(1, round(job.micro_batch * v.images))
    plan = ParallelPlan(tp=job.parallel.tp, sequence_parallel=job.parallel.sequence_parallel)
    one = replace(job, model=model, gpus=job.parallel.tp, parallel=plan, tuning=FULL, lengths=())
    return replace(one, sequence=v.patches, micro_batch=samples, global_batch=samples)


def tower_passes(job: Job, pricer: BlockCostModel) -> Passes:
    """One microbatch's images through the tower and the projector; a frozen tower has no backward pass."""
    v = job.model.vision
    if v is None or not v.images:
        return NOTHING
    own = tower_job(job)
    costs = BlockCostModel(own, pricer.efficiency, pricer.paces)
    kinds = [own.model.kind(i) for i in range(v.layers)]
    total = NOTHING
    for kind in dict.fromkeys(kinds):
        for _, one in costs.block_costs(layer_graph(own, kinds.index(kind))):
            total += one * kinds.count(kind)
    again = total.forward * (job.recompute.share if job.recompute.mode == "full" else 0.0)
    if v.frozen:
        total, again = Passes(total.forward, BlockCost(), BlockCost()), BlockCost()
    for _, one in costs.block_costs(_projector(job, own)):
        total += one
    return Passes(total.forward, total.backward, total.again + again)


def _projector(job: Job, own: Job) -> LayerGraph:
    """Two linear layers from merged patches to the decoder's width."""
    v, b, s = job.model.vision, builder(job), RankSizes.of(own)
    assert v is not None
    wide = v.hidden * v.merge
    inner, rows = wide if v.merge > 1 else job.model.hidden, max(1, s.tokens // v.merge)
    linear(b, own, s, "projector", (rows, inner, wide))
    linear(b, own, s, "projector", (rows, job.model.hidden, inner))
    return b.layer()
