"""A Framework: what the software around a model does, as far as it costs time or memory. Facts, as TOML files."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Framework", "Overlap"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which transfers run beside compute."""

    tensor: bool = False  # TP collectives, cut up beside the products they feed
    gradients: bool = True  # DP reductions beside the backward pass
    parameters: bool = True  # DP gathers beside the forward pass
    pipeline: bool = True  # sends between stages
    context: bool = True  # keys and values beside attention
    experts: bool = False  # all-to-alls beside other compute


@dataclass(frozen=True, slots=True)
class Framework:
    """Switches of the training software; the default is Megatron-Core with Transformer Engine as of 2024."""

    key: str = "megatron-core"
    name: str = "Megatron-Core with Transformer Engine"
    attention: str = "flash2"  # unfused, fused-softmax (Megatron's kernel), flash1, flash2, flash3 (cuDNN since Hopper)
    compiled: bool = False  # pointwise chains are one kernel each (torch.compile, XLA)
    fused_norms: bool = True  # one kernel a normalisation
    dropout: bool = False  # of attention and of the residual stream
    fused_loss: bool = True  # cross entropy without copies of the logits in fp32
    gradient_bytes: int = 4  # what gradients are kept in
    reduce_bytes: int = 4  # and sent in
    gather_bytes: int = 2  # what parameters are gathered in
    host: str = "megatron-core"  # whose launches: one of HOSTS in frameworks.py
    bucket_bytes: float = 40e6 * 4  # of gradients that are reduced at once
    two_step_dispatch: bool = True  # tokens cross the network once a domain (DeepEP and its like)
    fused_dispatch: bool = False  # and are sorted by expert as they arrive
    sequence: bool = True  # sequence parallelism wherever there is tensor parallelism
    async_backward: bool = True  # of TP, what the backward pass sends for an input runs beside the weights' gradient
    overlap: Overlap = field(default_factory=Overlap)  # unless a job says otherwise
    source: str = ""
