"""The schema of job files: keys and types of each section, and errors for unknown ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from presage.errors import InputError, PresageError
from presage.files.decoding import convert_record
from presage.files.finite import check_finite

Section = TypeVar("Section", bound=msgspec.Struct)


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


class RecomputeConfig(msgspec.Struct):
    mode: str = "none"
    modules: list[str] = []
    share: float = 1.0
    offload: float = 0.0


class LoraConfig(msgspec.Struct):
    rank: int = 16
    targets: list[str] | None = None  # q, k, v, o
    base: str | None = None  # 16bit; qlora: nf4
    adapter_bits: int = 16
    dropout: bool = False
    residual_bits: int = 16


class TrainingConfig(msgspec.Struct):
    sequence: int | None = None
    micro_batch: int = 1
    global_batch: int | None = None
    microbatches: int | None = None  # the other way to say `global_batch`
    precision: str = "bf16"
    optimizer: str = "adam"
    recompute: str | RecomputeConfig = "none"
    lengths: str | list[int] | None = None  # of documents that sequences are packed of: a law, a file, or lengths
    scaling: str | None = None  # of fp8: delayed, tensor, row, block
    muon: str = "sharded"
    muon_steps: int = 5
    host_optimizer: float = 0.0
    host_overlap: bool = False
    tune: str | None = None  # full; lora where there is a [training.lora]
    lora: LoraConfig | None = None


class ParallelConfig(msgspec.Struct):
    gpus: int | None = None
    tp: int = 1
    sequence_parallel: bool | None = None  # where there is tp: as the framework does
    pp: int = 1
    virtual: int = 1
    schedule: str | None = None
    cp: int = 1
    cp_balance: str = "zigzag"  # or none
    ep: int = 1
    expert_tp: int = 1
    dispatcher: str | None = None  # as the framework does
    dp: int | None = None
    zero: int | None = None
    fsdp: bool = False
    shard: int | None = None
    replicate: int | None = None  # copies of what is sharded; the other way to say `shard`
    layers_as: list[int] = []
    ends_as_layers: bool = False


class OverlapConfig(msgspec.Struct):
    tensor: bool | None = None
    gradients: bool | None = None
    parameters: bool | None = None
    pipeline: bool | None = None
    context: bool | None = None
    experts: bool | None = None
    shared_experts: bool | None = None
    weight_gradients: bool | None = None


class FrameworkConfig(msgspec.Struct):
    name: str | None = None
    attention: str | None = None
    compiled: bool | None = None
    fused_norms: bool | None = None
    dropout: bool | None = None
    fused_loss: bool | None = None
    gradient_bytes: int | None = None
    reduce_bytes: int | None = None
    gather_bytes: int | None = None
    host: str | None = None
    bucket_MB: float | None = None
    dispatcher: str | None = None
    fused_adapters: bool | None = None
    graphs: list[str] | None = None
    flat_gathers: bool | None = None
    broadcasts: bool | None = None
    sequence: bool | None = None
    async_backward: bool | None = None
    fused_accumulation: bool | None = None
    attention_masks: bool | None = None
    grouped_experts: bool | None = None
    foreach: bool | None = None
    logit_bytes: float | None = None
    extra_bytes: float | None = None
    update_bytes: float | None = None
    forward_us: float | None = None
    backward_us: float | None = None


class ClusterConfig(msgspec.Struct):
    platform: str | None = None
    gpu: str | None = None
    per_node: int = 8
    network_Gbps: float | None = None
    fabric: str | None = None
    domain: int | None = None  # GPUs that share NVLink, where that is not a node
    host: str | None = None  # a known host's name, or the file of one
    power_W: float | None = None  # of a GPU at work; these three say what a job spends: see jobs/spend.py
    price_per_gpu_hour: float | None = None
    pue: float | None = None


class RunConfig(msgspec.Struct):
    """What `presage run` and the planning page ask of the whole run, where no option says otherwise."""

    tokens: str | None = None
    deadline: str | None = None
    noise: str | None = None
    failures: str | None = None
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None  # failures per 1,000 node-days
    restart_seconds: Annotated[float, msgspec.Meta(ge=0.001, le=1e9)] | None = None
    spares: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None  # nodes
    interval: str | None = None


class EngineConfig(msgspec.Struct):
    """The decoding engine of a reinforcement-learning step."""

    name: str = "vllm"
    gpus: int | None = None  # of its own; none: the trainer's
    tp: int = 1
    ep: int = 1
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float | None = None
    precision: str = "bf16"
    kv_cache_precision: str | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    prefix_caching: bool = True


class RlConfig(msgspec.Struct):
    """A reinforcement-learning step: rollout, rewards, log-probabilities, training, weights to the engine."""

    algorithm: str = "grpo"
    prompts: int | None = None  # a step
    samples: int = 1  # responses to a prompt
    prompt_length: float | None = None  # mean, tokens
    response_mean: float | None = None
    response_max: int | None = None
    response_sigma: float | None = None  # of the logarithm of a length
    response_lengths: str | list[float] | None = None  # lengths seen, or a file of them
    mini_batch: int | None = None  # responses of an update
    epochs: int = 1
    packing: str = "packed"
    microbatch_tokens: int | None = None
    old_log_probs: bool = True
    reference: bool | None = None
    critic: str | None = None  # a preset
    reward_model: str | None = None
    reward_seconds: float = 0.0
    placement: str | None = None
    staleness: int = 0
    in_flight: bool = False  # the next batch begins while the last responses of one go on
    offload: bool = True
    reference_offload: bool | None = None  # as the trainer's states
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)


class JobConfig(msgspec.Struct):
    name: str = ""
    arguments: str | None = None  # a Megatron script
    titan: str | None = None  # a TorchTitan file
    verl: str | None = None  # a script, overrides or YAML of verl
    nemo_rl: str | None = None  # a recipe of NeMo-RL
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    training: TrainingConfig = msgspec.field(default_factory=TrainingConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    overlap: OverlapConfig = msgspec.field(default_factory=OverlapConfig)
    framework: str | FrameworkConfig = "megatron-core"
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    run: RunConfig = msgspec.field(default_factory=RunConfig)
    rl: RlConfig | None = None


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig, "model.experts": ExpertConfig, "model.latent": LatentConfig, "model.mamba": MambaConfig,
    "model.linear": LinearConfig, "model.vision": VisionConfig, "training": TrainingConfig,
    "training.recompute": RecomputeConfig, "training.lora": LoraConfig, "parallel": ParallelConfig,
    "overlap": OverlapConfig, "framework": FrameworkConfig, "cluster": ClusterConfig, "run": RunConfig,
    "rl": RlConfig, "rl.engine": EngineConfig,
}  # fmt: skip


def convert_section(path: str | Path, table: Mapping[str, Any], kind: type[Section], section: str = "") -> Section:
    """A table as its section; keys, types and numbers that are none are named."""
    check_keys(path, table, kind, section)
    check_finite(path, table, section)
    try:
        return convert_record(dict(table), kind)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at `$")
        field = ".".join(p for p in (section, where.strip("`.")) if p)
        raise InputError(path, _wrong_type(what, table, where), field or None) from e


TYPES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
         "object": "a table"}  # fmt: skip


def _wrong_type(what: str, table: Mapping[str, Any], where: str) -> str:
    """msgspec's "Expected `int | null`, got `str`" in the words of job files."""
    found = re.fullmatch(r"Expected `([\w |]+)`, got `\w+`", what)
    if found is None:
        return what
    kinds = [TYPES.get(kind, kind) for kind in found[1].split(" | ") if kind != "null"]
    value = _given(table, where.strip("`.").split("."))
    return f"is {value!r}: it should be {' or '.join(kinds)}"


def check_keys(path: str | Path, table: Mapping[str, Any], kind: type[msgspec.Struct], section: str) -> None:
    """Every key is one of the section's, in tables within it too."""
    keys = kind.__struct_fields__
    for key, value in table.items():
        here = f"{section}.{key}" if section else key
        if key not in keys:
            raise InputError(path, f"is unknown{_hint(key, keys, section)}", here)
        if isinstance(value, Mapping) and here in SECTIONS:
            check_keys(path, value, SECTIONS[here], here)


def _hint(key: str, keys: tuple[str, ...], section: str) -> str:
    """The nearest key of the section, or the section that has the key, or all keys."""
    near = get_close_matches(key, keys, 1, 0.7)
    if near:
        return f": did you mean {near[0]!r}?"
    homes = [name for name, kind in SECTIONS.items() if key in kind.__struct_fields__ and name != section]
    if homes:
        return f": it belongs in [{homes[0]}]"
    return f": choose from {', '.join(keys)}"


def merge_sections(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables on tables, key by key; a text or a number replaces what was there."""
    out = dict(base)
    for key, value in over.items():
        before = out.get(key)
        out[key] = (
            merge_sections(before, value) if isinstance(value, Mapping) and isinstance(before, Mapping) else value
        )
    return out


def given_fields(words: msgspec.Struct) -> dict[str, Any]:
    """The fields a section gives, without those it leaves open."""
    values = {name: getattr(words, name) for name in words.__struct_fields__}
    return {k: given_fields(v) if isinstance(v, msgspec.Struct) else v for k, v in values.items() if v is not None}


# ---- overrides of keys of a job file: `parallel.tp=8` on the command line

# Sections that a file may also give as one word, and the key which that word stands for.
SHORT_FORMS = {"framework": "name", "training.recompute": "mode"}


def parse_overrides(pairs: Iterable[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """KEY=VALUE pairs as sections that go over those of a file."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not all(key.split(".")):
            raise PresageError(f"--set {pair}: should be KEY=VALUE with a key of the job file, such as parallel.tp=8")
        value = _value(text)
        if key in SECTIONS and key not in SHORT_FORMS and not isinstance(value, Mapping):
            raise PresageError(f"--set {pair}: {key} is a section: say one of its keys, such as parallel.tp=8")
        _put(out, key, value, table)
    return out


def _value(text: str) -> Any:
    """As TOML has it; what is none is a text, so that nobody has to quote twice."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _put(out: dict[str, Any], key: str, value: Any, table: Mapping[str, Any]) -> None:
    *sections, last = key.split(".")
    here: Any = out
    for i, section in enumerate(sections):
        given = _given(table, sections[: i + 1])
        whole = (
            {SHORT_FORMS[name]: given}
            if isinstance(given, str) and (name := ".".join(sections[: i + 1])) in SHORT_FORMS
            else {}
        )
        here = here.setdefault(section, whole)
        if not isinstance(here, dict):
            raise PresageError(f"--set {key}: {'.'.join(sections[: i + 1])} is not a section")
    here[last] = value


def _given(table: Mapping[str, Any], sections: list[str]) -> Any:
    value: Any = table
    for section in sections:
        value = value.get(section) if isinstance(value, Mapping) else None
    return value
