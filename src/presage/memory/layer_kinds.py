"""Memory of layers other than attention with a feed-forward block, and of layers whose weights are frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.configs.tuning import BASES, block_adapters, mean_adapter_parameters

if TYPE_CHECKING:
    from presage.memory.activations import LayerActivations

Size = TypeVar("Size", float, NDArray[np.float64])  # of one stage, or of many
MIXING = ("norm_in", "norm_out", "latent", "heads", "core", "out")
FEEDING = ("mlp_in", "mlp_norm", "router", "sorted", "up", "act", "expert_up", "expert_act")
# What is kept for the gradient of a weight alone, and the block whose weight it is: frozen, only adapters need it.
INPUTS = {"norm_out": "qkv", "mlp_norm": "mlp_up", "act": "mlp_down"}


def narrowed(job: Job, k: LayerActivations, mixer: str, feeds: bool, number: float) -> LayerActivations:
    """The parts of a layer without one of its blocks, or with another mixer than attention; `number`: bytes of one."""
    drop = (() if mixer else MIXING) + (() if feeds else FEEDING)
    k = k._replace(**dict.fromkeys(drop, 0.0))
    if mixer not in ("mamba", "linear"):
        return k
    return k._replace(latent=0.0, heads=0.0, core=0.0, out=number * _scanned(job, mixer) / job.parallel.tp)


def _scanned(job: Job, mixer: str) -> float:
    """Numbers a token that a scan keeps. mamba_ssm's kernel keeps the input projection's output and the scan's, and
    computes the convolution again; flash-linear-attention's keeps what is convolved, too, and a square a chunk."""
    z, a = job.model.mamba, job.model.linear
    if mixer == "mamba":
        assert z is not None
        return z.width + z.convolved + z.heads + 2 * z.width
    assert a is not None
    return 2 * (2 * a.keys + a.values) + a.gates + a.chunk * a.value_heads + 2 * a.values


def without_frozen(job: Job, k: LayerActivations) -> LayerActivations:
    """What is left of the parts where weights are frozen: a GEMM's input is kept for adapters beside it alone."""
    t, m = job.tuning, job.model
    if not t.frozen:
        return k
    eager = job.framework.host == "torch" and m.gated
    left = {"act": k.act / 2} if eager else {}  # of SiLU and its product with the other half, the first
    gone = {part: left.get(part, 0.0) for part, block in INPUTS.items() if not block_adapters(t, m, block)}
    found = [a for block in ("qkv", "proj", "mlp_up", "mlp_down") for a in block_adapters(t, m, block)]
    # PEFT's adapters in fp32 each have an input of their own in fp32
    beside = 2.0 * t.rank * len(found) + (4.0 * sum(a.inputs for a in found) if t.adapter_bits == 32 else 0.0)
    return k._replace(**gone, sorted=0.0, expert_act=0.0)._replace(core=k.core + beside)


class FrozenBytes(NamedTuple, Generic[Size]):
    """Bytes of a stage whose model's weights are frozen, on one rank."""

    weights: Size
    gradients: Size
    optimizer: Size


def frozen_bytes(job: Job, layers: Size, inner: Size, experts: Size, ends: Size) -> FrozenBytes[Size]:
    """Frozen weights of `inner` layer parameters, experts and ends, and adapters of so many layers with gradients and
    Adam's state. PEFT keeps adapters in fp32 (no copy is then needed)."""
    t, p = job.tuning, job.parallel
    trained = mean_adapter_parameters(t, job.model, p.tp) * layers
    cut, cut_experts = (max(1, job.sharding), max(1, job.expert_dp)) if p.zero == 3 else (1, 1)
    base = BASES[t.base]
    frozen = (base * inner + 2.0 * ends) / cut + base * experts / cut_experts
    own, copy = (4.0, 0.0) if t.adapter_bits == 32 else (2.0, 0.0 if job.optimizer == "adam-16bit" else 4.0)
    moments = 4.0 if job.optimizer == "adam-16bit" else 8.0 if job.optimizer.startswith("adam") else 4.0
    shards = max(1, job.sharding) if p.zero else 1
    gradients = own * trained / (shards if p.zero >= 2 else 1)
    return FrozenBytes(frozen + own * trained / cut, gradients, (moments + copy) * trained / shards)


def adam_of_ends(job: Job, ends: float) -> float:
    """Muon leaves embedding and head to Adam, whose second moment they have beside."""
    return 4.0 * ends / (max(1, job.sharding) if job.parallel.zero else 1) if job.optimizer == "muon" else 0.0


def host_share(job: Job) -> float:
    """The share of the optimizer's state that the GPU keeps."""
    return 1.0 - job.recipe.host_optimizer


def frozen_tower(job: Job) -> float:
    """Bytes of the frozen weights of an encoder of images."""
    m = job.model
    return 2.0 * (m.vision_parameters - m.trained_vision_parameters) / job.parallel.tp


def tower_activations(job: Job) -> float:
    """Bytes that a trained encoder of images keeps of a microbatch: 34 numbers of 16 bits a patch and layer as in
    Korthikanti et al., without dropout; of a frozen one, what its projector reads."""
    v = job.model.vision
    if v is None:
        return 0.0
    rows = v.patches * v.images * job.micro_batch / job.parallel.tp
    if v.frozen or job.recompute.mode == "full":
        return 2.0 * rows * v.hidden * (1 if v.frozen else v.layers)
    return rows * v.layers * (10.0 * v.hidden + 2.0 * (3 if v.gated else 2) * v.ffn)
