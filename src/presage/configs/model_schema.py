"""Keys and types of a job file's [model]."""

from __future__ import annotations

import msgspec


class ExpertConfig(msgspec.Struct):
    experts: int
    top_k: int
    ffn: int | None = None  # the model's
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0
    imbalance: float = 1.0
    groups: int = 0
    group_top_k: int = 0
    latent: int = 0
    loads: list[float] | str | None = None  # tokens of each expert; or a file of them, or "zipf 0.5"


class LatentConfig(msgspec.Struct):
    key_rank: int
    query_rank: int = 0
    rope: int = 64
    nope: int = 128
    value: int = 128


class MambaConfig(msgspec.Struct):
    heads: int
    head_dim: int = 64
    state: int = 128
    groups: int = 8
    conv: int = 4
    chunk: int = 128


class LinearConfig(msgspec.Struct):
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv: int = 4
    chunk: int = 64
    kind: str = "gated-delta"


class VisionConfig(msgspec.Struct):
    layers: int
    hidden: int
    heads: int
    ffn: int
    patches: int
    images: float = 1.0
    merge: int = 1
    inputs: int = 588
    gated: bool = False
    window: int = 0
    full_every: int = 0
    extra: int = 0
    frozen: bool = True


class ModelConfig(msgspec.Struct):
    preset: str | None = None
    config: str | None = None  # a Hugging Face config.json
    name: str | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocab: int | None = None
    ffn: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    activation: str | None = None
    norm: str | None = None
    bias: bool | None = None
    tied: bool | None = None
    positions: str | None = None
    max_positions: int | None = None
    window: int | None = None
    window_every: int | None = None
    predicted: int | None = None
    causal: bool | None = None
    pattern: str | None = None  # layers by letter, as Megatron's --hybrid-override-pattern
    layer_types: list[str] | None = None  # or by name, as Hugging Face's configurations
    gated_attention: bool | None = None
    chunked: bool | None = None
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    mamba: MambaConfig | None = None
    linear: LinearConfig | None = None
    vision: VisionConfig | None = None
