"""Seconds of a job's optimizer: memory-bound updates on the GPU, Muon's products, or steps of the host's cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from presage.configs.job import Job
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.closed_form.kernels import Bytes
from presage.costs.families.gemm import GemmShape
from presage.parallel.plan import Axis
from presage.prediction.jobs.block_cost import BlockCostModel

# Bytes a parameter: gradient twice, moments and master copy read and written, the copy for the next step.
UPDATE_BYTES = {"adam": 46.0, "adamw": 46.0, "adam-16bit": 14.0, "sgd": 30.0, "none": 0.0}
ONE_MOMENT = 38.0  # momentum, lion, muon, adagrad
# Host: seconds of PyTorch's fused AdamW for 1e9 parameters on 16 cores of the H200's host (an eighth of it, as each GPU
# has), and bytes/s that pinned copies reach of PCIe 5.0's 64 GB/s (data/h200_packed/host_step.json).
LAUNCHES, LAUNCH = 8, 13e-6  # of an iteration of Newton-Schulz: kernels, and the host's seconds for each (same file)
HOST_STEP, PINNED = 0.257e-9, 0.863


def update_bytes(job: Job) -> float:
    """Bytes that the optimizer moves for a parameter."""
    return job.framework.update_bytes or UPDATE_BYTES.get(job.optimizer, ONE_MOMENT)


def optimizer_seconds(job: Job, pricer: BlockCostModel, own: Bytes, layers: Bytes) -> Bytes:
    """Seconds for a rank's `own` parameters; its stage has so many layers."""
    away = job.recipe.host_optimizer
    kernels, moved = ClosedFormKernels.of(job.platform.gpu), update_bytes(job) * own * (1 - away)
    took: Any = kernels.memory_bound(moved, 1, "optimizer") * pricer.paces.optimizer
    if job.optimizer == "muon":
        took += muon_seconds(job, pricer, layers) * pricer.paces.products
    found: Bytes = took + (host_seconds(job, own * away) if away else 0.0)
    return found


def host_seconds(job: Job, parameters: Bytes) -> Bytes:
    """Gradients to the host, a step of its cores, parameters back; one after the other, or beside each other."""
    link = PINNED * job.platform.gpu.pcie
    sent = parameters * job.framework.gradient_bytes / link, parameters * job.framework.gather_bytes / link
    step = HOST_STEP * parameters
    took: Bytes = np.maximum(step, np.maximum(*sent)) if job.recipe.host_overlap else step + sent[0] + sent[1]
    return took


def muon_seconds(job: Job, pricer: BlockCostModel, layers: Bytes) -> Bytes:
    """Newton-Schulz iterations (Muon; arXiv 2502.16982) of the matrices of so many layers, as tensor-parallel ranks
    have them. Sharded: replicas take a part of the matrices each, as Megatron-Core's layer-wise optimizer; gathered:
    each orthogonalises all of its matrices, whose gradients it gathers."""
    shapes = layer_matrices(job)
    share = max(1, job.sharding) if job.parallel.zero and job.recipe.muon == "sharded" else 1
    whole = sum(count * iteration_seconds(pricer, m, n, job.recipe.muon_steps) for (m, n), count in shapes)
    largest = max(iteration_seconds(pricer, m, n, job.recipe.muon_steps) for (m, n), _ in shapes)
    took: Bytes = np.maximum(whole * layers / share, largest)
    if job.parallel.zero and job.recipe.muon == "gathered":
        numbers = sum(count * m * n for (m, n), count in shapes) * layers
        took += pricer.collective_seconds("all_gather", 2.0 * numbers, Axis.SHARD)
    return took


def iteration_seconds(pricer: BlockCostModel, m: int, n: int, steps: int) -> float:
    """Seconds of one matrix: X X', its square, their product with X; sums between them are memory-bound. Small ones
    wait for the host's launches."""
    m, n = min(m, n), max(m, n)
    kernels = ClosedFormKernels.of(pricer.job.platform.gpu)
    products = [GemmShape(m, m, n), GemmShape(m, m, m), GemmShape(m, n, m)]
    moved = 14.0 * m * m + 10.0 * m * n
    pace = pricer.efficiency.product
    once = pace * sum(kernels.gemm(s, "bf16") for s in products) + kernels.memory_bound(moved, 5)
    return steps * max(once, LAUNCHES * LAUNCH)


def layer_matrices(job: Job) -> list[tuple[tuple[int, int], float]]:
    """Sizes of a usual layer's matrices on one tensor-parallel rank, and how many there are of each."""
    m, p, e = job.model, job.parallel, job.model.experts
    attention = sum(m.mixer(i) == "attention" for i in range(m.layers)) / m.layers
    other, routed = (
        sum(m.mixer(i) in ("mamba", "linear") for i in range(m.layers)) / m.layers,
        m.expert_layers / m.layers,
    )
    dense = m.feed_layers / m.layers - routed
    keys, up = max(1, m.kv_heads // p.tp) * m.head_dim, 2 if m.gated else 1
    out = [((m.hidden, m.query_width // p.tp), attention), ((m.hidden, keys), 2 * attention)]
    out += [((m.value_width // p.tp, m.hidden), attention), ((m.hidden, max(1, m.ffn // p.tp)), (up + 1) * dense)]
    if other:
        width = m.mamba.width if m.mamba else m.linear.values if m.linear else m.hidden
        out += [((m.hidden, max(1, width // p.tp)), 3 * other)]
    if e:
        out += [((m.hidden, max(1, e.ffn // p.expert_tp)), (up + 1) * routed * e.experts / p.ep)]
    return [(size, count) for size, count in out if count]
