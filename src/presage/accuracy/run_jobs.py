"""A row of the table of public runs as a Job. What a row does not say is what its framework does by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from presage.accuracy.public_table import platform_of_run
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.jobs.framework import Framework
from presage.jobs.frameworks import framework, overlap_of
from presage.jobs.job import Job, Overlap, Parallel, Recompute
from presage.jobs.models import transformer_of
from presage.jobs.presets import preset_named, preset_words
from presage.jobs.transformer import Experts, Transformer

__all__ = ["job_of_run", "run_seconds"]

Row = Mapping[str, str]

# What the table calls a framework, and the one it is taken for: the first that fits.
FRAMEWORKS = (
    (r"deepspeed", "megatron-deepspeed"),
    (r"accelerate|eager hf|hugging", "hf-accelerate"),
    (r"megatron-lm$|megatron-lm \(?(v?[12]\.|20(19|20|21|22))", "megatron-2021"),
    (r"nemo|bridge", "nemo"),
    (r"megatron|mcore|primus|transformer engine", "megatron-core"),
    (r"composer|foundry|mosaic", "composer-fsdp"),
    (r"titan.*eager", "torchtitan-eager"),
    (r"titan", "torchtitan"),
    (r"internevo|internlm", "internevo"),
    (r"jax|maxtext|pax", "maxtext"),
    (r"fsdp|pytorch|torch", "torchtitan-eager"),
)
ACTIVATIONS = {"relu2": "relu2", "relu": "relu", "gelu": "gelu", "swiglu": "swiglu", "geglu": "geglu", "silu": "swiglu"}


def run_seconds(row: Row) -> float:
    try:
        return float(row["step_time_s"] or row["step_time_s_derived"])
    except ValueError:
        raise PresageError("no step time") from None


def job_of_run(row: Row) -> Job:
    """The job a row tells of."""
    if row["complete"].startswith("missing"):
        raise PresageError(f"its configuration is not complete ({row['complete']})")
    platform = platform_of_run(row["gpu"], _whole(row, "gpus_per_node", 8), row["interconnect"])
    software = framework_of(row, platform.gpu)
    model = model_of(row)
    parallel = parallel_of(row, software, model)
    gpus = _whole(row, "n_gpus")
    micro = _whole(row, "micro_batch", 0)
    whole = _whole(row, "global_batch")
    made = Job(
        model=model,
        platform=platform,
        gpus=gpus,
        sequence=_whole(row, "seq_len"),
        micro_batch=micro or max(1, whole * parallel.tp * parallel.pp * parallel.cp // gpus),
        global_batch=whole,
        parallel=parallel,
        precision=precision_of(row["precision"]),
        recompute=recompute_of(row["recompute"], software),
        overlap=overlap_of_run(row, software, parallel),
        framework=replace(software, host="graph") if _summed(row) else software,
        optimizer="none" if _summed(row) else "adam",
        name=row["model"],
    )
    if made.dp < 1:
        raise PresageError(f"gpus = tp x pp x cp x dp: {gpus} is less than {parallel.tp} x {parallel.pp} x {parallel.cp}")
    if made.microbatches < 1:
        raise PresageError(f"global_batch = micro_batch x dp x microbatches: {whole} is less than {micro} x {made.dp}")
    return made


def _summed(row: Row) -> bool:
    """Whether its time is a sum over ops: without an optimizer, and without waiting for the host."""
    return "sum of per-op" in row["notes"] and row["n_gpus"] == "1"


def _whole(row: Row, column: str, default: int | None = None) -> int:
    text = row.get(column, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(float(text))
    except ValueError:
        raise PresageError(f"{column} is {text!r}, not a number") from None


# ---- model


@cache
def known(name: str) -> Transformer | None:
    """A model by its name, where it has one that says which it is."""
    return transformer_of(preset_words(name)) if preset_named(name) else None


def model_of(row: Row) -> Transformer:
    if "mamba" in row["mlp_type"]:
        raise PresageError("state-space layers (Mamba) are not modelled")
    like = known(row["model"])  # what a table of sizes does not say: head width, tied weights, shared experts
    hidden, heads = _whole(row, "hidden"), _whole(row, "heads")
    latent = row["kv_heads"].strip().upper() == "MLA"
    if latent and (like is None or like.latent is None):
        raise PresageError(f"latent attention, but the sizes of {row['model']} are not known")
    dim = like.head_dim if like and like.heads == heads else hidden // heads
    activation = ACTIVATIONS.get(row["mlp_type"].split("+")[0], "gelu")
    usual = like or Transformer(hidden, 1, heads, 1, 1, heads, dim, activation=activation, **_style(activation))
    layers = _whole(row, "layers")
    return replace(
        usual, hidden=hidden, layers=layers, heads=heads, vocab=_whole(row, "vocab"), ffn=_whole(row, "ffn"),
        kv_heads=heads if latent else _whole(row, "kv_heads", heads), head_dim=dim, activation=activation,
        experts=_experts(row, like, layers), max_positions=_whole(row, "seq_len") if usual.positions == "learned" else 0,
        predicted=usual.predicted if like and like.layers == layers else 0, name=row["model"],
    )  # fmt: skip


def _style(activation: str) -> dict[str, object]:
    """GPT-2 and its kin, or Llama and its."""
    if activation in ("gelu", "relu"):
        return {"norm": "layernorm", "bias": True, "tied": True, "positions": "learned"}
    return {}


def _experts(row: Row, like: Transformer | None, layers: int) -> Experts | None:
    if not row["moe_experts"].strip():
        return None
    number, chosen, width = (_whole(row, c) for c in ("moe_experts", "moe_topk", "moe_ffn"))
    usual = like.experts if like and like.experts else Experts(number, chosen, width)
    drops = re.search(r"capacity ([\d.]+)", row["notes"])
    capacity = float(drops[1]) if drops else 1.0 if "token-drop" in row["notes"] else 0.0
    dense = usual.dense_layers if like and like.layers == layers else min(usual.dense_layers, 1 if layers > 1 else 0)
    return replace(usual, experts=number, top_k=chosen, ffn=width, capacity=capacity, dense_layers=dense)


# ---- how it is trained


def framework_of(row: Row, chip: Gpu) -> Framework:
    text = row["framework"].lower()
    for pattern, name in FRAMEWORKS:
        if re.search(pattern, text):
            found = framework(name, chip)
            break
    else:
        found = framework("torchtitan-eager" if "fsdp" in row["fsdp_zero"] else "megatron-core", chip)
    if re.search(r"cuda graph full", row["notes"]):
        found = replace(found, host="graph")
    said = bool(re.search(r"dispatcher (hybridep|deepep)", row["notes"]))
    found = replace(found, fused_dispatch=said, two_step_dispatch=said)
    if _bare(row):
        found = replace(found, async_backward=False)
    if "titan" in text and re.search(r"2024", row.get("source_file", "")):  # its loss was not compiled then
        found = replace(found, fused_loss=False)
    return found


def _bare(row: Row) -> bool:
    """Whether nothing is sent beside compute."""
    return bool(re.search(r"no overlap|overlap off", f"{row['framework']} {row['notes']}".lower()))


def precision_of(text: str) -> str:
    low = text.lower()
    for pattern, name in (
        (r"nvfp4|fp4", "nvfp4"), (r"mxfp8|fp8-mx", "mxfp8"), (r"fp8", "fp8"), (r"fp16", "fp16"), (r"bf16", "bf16"),
        (r"tf32", "tf32"), (r"fp32", "fp32"),
    ):  # fmt: skip
        if re.search(pattern, low):
            return name
    raise PresageError(f"precision {text!r} is not known")


def recompute_of(text: str, software: Framework) -> Recompute:
    low = text.lower().strip()
    if not low or low.startswith("none"):
        return Recompute()
    if low.startswith("full"):
        return Recompute("full")
    every = re.search(r"every (\d+)", low)
    if every:
        return Recompute("full", share=1 / int(every[1]))
    if "op" in re.split(r"\W+", low):
        return Recompute("selective", ("op",))
    names = ("core_attn", "mla_up_proj", "moe_act", "layernorm", "mlp", "moe")
    found = tuple(n for n in names if re.search(rf"\b{n}\b", low))
    if "custom" in low:  # of JAX's policies only those that keep little fit where these runs did
        return Recompute("full")
    _ = software
    return Recompute("selective", found or ("core_attn",))


def parallel_of(row: Row, software: Framework, model: Transformer) -> Parallel:
    tp, pp, cp = (_whole(row, k, 1) for k in ("tp", "pp", "cp"))
    virtual, ep = _whole(row, "vpp", 1), _whole(row, "ep", 1)
    zero, fsdp, shard = sharding_of(row["fsdp_zero"])
    etp = re.search(r"ETP=(\d+)", row["notes"])
    expert_tp = int(etp[1]) if etp else 1 if "bridge" in row["framework"].lower() else tp  # Megatron's default, or recipes'
    return Parallel(
        tp=tp, sequence=tp > 1 and _by_sequence(row, software), pp=pp, virtual=virtual if pp > 1 else 1, cp=cp, ep=ep,
        expert_tp=expert_tp, zero=zero, fsdp=fsdp, shard=shard,
        ends_as_layers=_ends(row, pp * (virtual if pp > 1 else 1), model.predicted),
    )  # fmt: skip


def _by_sequence(row: Row, software: Framework) -> bool:
    """Sequence parallelism: as the row says, or as the framework does."""
    said = re.search(r"(no|without|w/o)?\s*sequence.parallel", row["notes"].lower())
    return software.sequence if said is None else not said[1]


def _ends(row: Row, slots: int, predicted: int) -> bool:
    """Whether embedding and head are dealt out as layers."""
    said = re.search(r"embeddings? (balanced|and loss count)|count as layers|ASYM", row["notes"])
    layers = _whole(row, "layers")
    return slots > 1 and (bool(said) or (layers % slots != 0 and (layers + 2 + predicted) % slots == 0))


def sharding_of(text: str) -> tuple[int, bool, int]:
    """ZeRO's stage, whether FSDP, and the ranks of a group."""
    low = text.lower()
    size = re.search(r"group (\d+)|hsdp(\d+)x", low)
    shard = int(next(g for g in size.groups() if g)) if size else 0
    if "shard_grad_op" in low:
        return 2, True, shard
    if "fsdp" in low or "hsdp" in low:
        return 3, True, shard
    stage = re.search(r"zero-?([123])", low)
    return (int(stage[1]) if stage else 0), False, shard


def overlap_of_run(row: Row, software: Framework, parallel: Parallel) -> Overlap:
    text = f"{row['framework']} {row['notes']}".lower()
    if _bare(row):
        return Overlap(False, False, False, False, False, False)
    usual = overlap_of(software.key)
    tensor = (usual.tensor or "async tp" in text or "asynctp" in text) and "vanilla tp" not in text
    pipeline = usual.pipeline or parallel.virtual > 1
    return replace(usual, tensor=tensor, pipeline=pipeline, experts="a2a overlap" in text)
