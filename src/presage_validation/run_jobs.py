"""A row of the table of public runs as a Job. What a row does not say is what its framework does by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from presage.configs.frameworks import GRAPHED, Framework, Overlap, framework, overlap_of
from presage.configs.job import Job, Recompute
from presage.configs.models import preset_fields, preset_key, transformer_from_fields
from presage.configs.recipes import Recipe
from presage.configs.transformer import CLAMPED, Experts, Transformer
from presage.costs.layer_host import layer_host
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.hardware.architecture import architecture
from presage.memory import job_memory
from presage.parallel.plan import ParallelPlan
from presage.traces.overheads import UNPROFILED
from presage_validation.public_table import count, platform_of_run

COLUMNS = (
    "source_key", "complete", "framework", "model", "hidden", "layers", "heads", "kv_heads", "ffn", "mlp_type", "vocab",
    "seq_len", "moe_experts", "moe_topk", "moe_ffn", "gpu", "gpus_per_node", "interconnect", "n_gpus", "tp", "pp",
    "vpp", "cp", "ep", "fsdp_zero", "micro_batch", "global_batch", "precision", "recompute", "step_time_s",
    "step_time_s_derived", "notes",
)  # fmt: skip
TableRow = Mapping[str, str]
LAYERS = 10_000  # at most

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
SCALED = ((r"row-?wise", "row"), (r"block-?wise", "block"), (r"tensor-?wise|fp8[-_]cs\b|fp8[-_]cs_|titan", "tensor"))
ACTIVATIONS = {"relu2": "relu2", "relu": "relu", "gelu": "gelu", "swiglu": "swiglu", "geglu": "geglu", "silu": "swiglu"}


def job_of_run(row: TableRow) -> Job:
    """The job a row tells of."""
    if row["complete"].startswith("missing") and "mamba" not in row["mlp_type"]:  # hybrids are known by name
        raise PresageError(f"its configuration is not complete ({row['complete']})")
    platform = platform_of_run(row["gpu"], count(row, "gpus_per_node", 8), row["interconnect"])
    software = framework_of(row, platform.gpu)
    if simulated(row):
        software = _traced(software, platform.gpu)
    model = model_of(row)
    parallel = parallel_of(row, software, model)
    gpus, whole = count(row, "n_gpus"), count(row, "global_batch")
    made = Job(
        model=model,
        platform=platform,
        gpus=gpus,
        sequence=count(row, "seq_len"),
        micro_batch=count(row, "micro_batch", max(1, whole * parallel.tp * parallel.pp * parallel.cp // gpus)),
        global_batch=whole,
        parallel=parallel,
        precision=precision_of(row["precision"]),
        recompute=replace(recompute_of(_recompute_text(row)), offload=_offloaded(row, model)),
        overlap=overlap_of_run(row, software, parallel),
        framework=replace(software, host="graph") if _summed(row) else software,
        optimizer="none" if _summed(row) else "adam",
        recipe=Recipe(scaling_of(row)),
        name=row["model"],
    )
    _possible(made)
    if row["complete"].startswith("missing") and not row["recompute"] and not job_memory(made).fits:
        raise PresageError("its configuration is not complete (missing:recompute, and without any it does not fit)")
    return made


def _possible(job: Job) -> None:
    """Rows need not keep every rule of `check`, for software rounds where it must; but there is something to run."""
    p = job.parallel
    if job.dp < 1:
        raise PresageError(f"gpus = tp x pp x cp x dp: {job.gpus} is less than {p.tp} x {p.pp} x {p.cp}")
    if job.microbatches < 1:
        sizes = f"{job.global_batch} is less than {job.micro_batch} x {job.dp}"
        raise PresageError(f"global_batch = micro_batch x dp x microbatches: {sizes}")
    if p.pp * p.virtual > job.model.layers + 2:  # embedding and head may be a stage each
        raise PresageError(f"pp x vpp <= layers + 2: {p.pp} x {p.virtual} is more than {job.model.layers} + 2")


def simulated(row: TableRow) -> bool:
    """Whether its time is not a measured step but what vTrain's predictor makes of one layer's trace: these rows are
    linear in layers and microbatches to the microsecond, and have that predictor's seconds for a send between stages
    (docs/runs.md)."""
    return row["source_key"] == "vtrain_single"


def _traced(software: Framework, chip: Gpu) -> Framework:
    """The host as vTrain records it: a layer on one rank, under a profiler."""
    alone = layer_host(software.host, architecture(chip.architecture).host_era, fused_attention=False)
    ahead, back = (seconds * 1e6 / UNPROFILED for seconds in (alone.forward, alone.backward))
    return replace(software, forward_us=ahead, backward_us=back)


def _summed(row: TableRow) -> bool:
    """Whether its time is a sum over ops: without an optimizer, and without waiting for the host."""
    return "sum of per-op" in row["notes"] and row["n_gpus"] == "1"


# ---- model


@cache
def known(name: str) -> Transformer | None:
    """A model by its name, where it has one that says which it is."""
    return transformer_from_fields(preset_fields(name)) if preset_key(name) else None


def model_of(row: TableRow) -> Transformer:
    """By the sizes of a row, and by its name; hybrids are what their name says."""
    if "mamba" in row["mlp_type"]:
        return transformer_from_fields(preset_fields(row["model"]))
    like = known(row["model"])  # what a table of sizes does not say: head width, tied weights, shared experts
    hidden, heads = count(row, "hidden"), count(row, "heads")
    latent = row["kv_heads"].strip().upper() == "MLA"
    if heads > hidden:
        raise PresageError(f"hidden = heads x n: {hidden} is less than {heads}")
    if latent and (like is None or like.latent is None):
        raise PresageError(f"latent attention, but the sizes of {row['model']} are not known")
    dim = like.head_dim if like and like.heads == heads else hidden // heads
    activation = ACTIVATIONS.get(row["mlp_type"].split("+")[0], "gelu")
    if like and like.activation == CLAMPED and activation == "swiglu":  # a table's word for both
        activation = CLAMPED
    usual = like or _like_others(hidden, heads, dim, activation)
    layers = count(row, "layers", most=LAYERS)
    return replace(
        usual,
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=count(row, "vocab"),
        ffn=count(row, "ffn"),
        kv_heads=heads if latent else count(row, "kv_heads", heads),
        head_dim=dim,
        activation=activation,
        experts=_experts(row, like, layers),
        max_positions=count(row, "seq_len") if usual.positions == "learned" else 0,
        predicted=usual.predicted if like and like.layers == layers else 0,
        name=row["model"],
    )


def _like_others(hidden: int, heads: int, dim: int, activation: str) -> Transformer:
    """GPT-2 and its kin, or Llama and its."""
    made = Transformer(hidden, 1, heads, 1, 1, heads, dim, activation=activation)
    if activation in ("gelu", "relu"):
        return replace(made, norm="layernorm", bias=True, tied=True, positions="learned")
    return made


def _experts(row: TableRow, like: Transformer | None, layers: int) -> Experts | None:
    if not count(row, "moe_experts", 0):
        return None
    number, chosen, width = (count(row, c) for c in ("moe_experts", "moe_topk", "moe_ffn"))
    usual = like.experts if like and like.experts else Experts(number, chosen, width)
    drops = re.search(r"capacity (\d+(?:\.\d+)?)", row["notes"])
    capacity = float(drops[1]) if drops else 1.0 if "token-drop" in row["notes"] else 0.0
    dense = usual.dense_layers if like and like.layers == layers else min(usual.dense_layers, 1 if layers > 1 else 0)
    return replace(usual, experts=number, top_k=chosen, ffn=width, capacity=capacity, dense_layers=dense)


# ---- how it is trained


def framework_of(row: TableRow, chip: Gpu) -> Framework:
    """The software a row names, as its notes change it; of one that is not known, the nearest kind."""
    text = row["framework"].lower()
    for pattern, name in FRAMEWORKS:
        if re.search(pattern, text):
            found = framework(name, chip)
            break
    else:
        found = framework("torchtitan-eager" if "fsdp" in row["fsdp_zero"] else "megatron-core", chip)
    if re.search(r"cuda graph full", row["notes"]):
        found = replace(found, host="graph")
    found = replace(found, dispatcher=_dispatcher(row), graphs=_graphs(row["notes"]))
    if _bare(row):
        found = replace(found, async_backward=False)
    if "titan" in text and re.search(r"2024", row.get("source_file", "")):  # its loss was not compiled then
        found = replace(found, fused_loss=False)
    return found


def _dispatcher(row: TableRow) -> str:
    """How tokens reach experts: a column of its own, or a note; else Megatron-Core's default."""
    said = re.search(r"dispatcher (hybridep|deepep|allgather|alltoall)", row["notes"])
    name = row.get("ep_dispatcher", "") or (said[1] if said else "alltoall")
    return "uccl-ep" if name == "deepep" and row.get("ep_transport", "").startswith("UCCL") else name


def _graphs(notes: str) -> tuple[str, ...]:
    """The parts of a layer that are CUDA graphs."""
    said = re.search(r"cuda graph (?:transformer_engine|local)/\[([^\]]*)\]", notes)
    return tuple(part for part in GRAPHED if said and f"'{part}'" in said[1])


def _bare(row: TableRow) -> bool:
    """Whether nothing is sent beside compute."""
    said = re.sub(r"(a2a|shared-expert) overlap off", "", f"{row['framework']} {row['notes']}".lower())
    return bool(re.search(r"no overlap|overlap off", said))


def precision_of(text: str) -> str:
    """Precision of the large GEMMs."""
    low = text.lower()
    for pattern, name in (
        (r"nvfp4|fp4", "nvfp4"), (r"mxfp8|fp8-mx", "mxfp8"), (r"fp8", "fp8"), (r"fp16", "fp16"), (r"bf16", "bf16"),
        (r"tf32", "tf32"), (r"fp32", "fp32"),
    ):  # fmt: skip
        if re.search(pattern, low):
            return name
    raise PresageError(f"precision {text!r} is not known")


def scaling_of(row: TableRow) -> str:
    """How numbers become fp8 ones, where that is said: by its precision, by its recipe's name (CS: current scaling),
    or by its framework (torchao scales by the tensor at hand, if not by rows). Else as Transformer Engine's default."""
    if precision_of(row["precision"]) != "fp8":
        return ""
    text = f"{row['framework']} {row['precision']} {row['notes']}".lower()
    return next((name for pattern, name in SCALED if re.search(pattern, text)), "")


def _offloaded(row: TableRow, model: Transformer) -> float:
    """The share of layers whose activations wait in the host's memory."""
    said = re.search(r"cpu_offload (\d+) layers", row["notes"])
    return min(1.0, int(said[1]) / model.layers) if said else 0.0


def _recompute_text(row: TableRow) -> str:
    """What a row says of recomputation; where its page and its recipe disagree, the recipe. vTrain's predictor has none
    on the last stage, and its rows have layers of one length on all."""
    return "none" if simulated(row) else row.get("recompute_from_recipe") or row["recompute"]


def recompute_of(text: str) -> Recompute:
    """What a row says of it; nothing said is none."""
    low = text.lower().strip()
    if not low or low.startswith("none"):
        return Recompute()
    if low.startswith("full"):
        return Recompute("full")
    every = re.search(r"every (\d+)", low)
    if every:
        return Recompute("full", share=1 / max(1, int(every[1])))
    if "op" in re.split(r"\W+", low):
        return Recompute("selective", ("op",))
    names = ("core_attn", "mla_up_proj", "moe_act", "layernorm", "mlp", "moe")
    found = tuple(n for n in names if re.search(rf"\b{n}\b", low))
    if "custom" in low:  # of JAX's policies only those that keep little fit where these runs did
        return Recompute("full")
    return Recompute("selective", found or ("core_attn",))


def parallel_of(row: TableRow, software: Framework, model: Transformer) -> ParallelPlan:
    """Degrees, and what is sharded."""
    tp, pp, cp, ep = (count(row, k, 1) for k in ("tp", "pp", "cp", "ep"))
    virtual = count(row, "vpp", 1) if pp > 1 else 1
    zero, fsdp, shard = sharding_of(row["fsdp_zero"])
    return ParallelPlan(
        tp=tp,
        sequence_parallel=tp > 1 and _by_sequence(row, software),
        pp=pp,
        virtual=virtual,
        cp=cp,
        ep=ep,
        expert_tp=_expert_tp(row, tp),
        zero=zero,
        fsdp=fsdp,
        shard=shard,
        ends_as_layers=_ends(row, pp * virtual, model.predicted),
    )


def _expert_tp(row: TableRow, tp: int) -> int:
    """Ranks that an expert is cut over: as its notes say, or as many as other layers (Megatron's default), or 1 (the
    recipes of Megatron-Bridge)."""
    said = re.search(r"ETP=(\d+)", row["notes"])
    return max(1, int(said[1])) if said else 1 if "bridge" in row["framework"].lower() else tp


def _by_sequence(row: TableRow, software: Framework) -> bool:
    """Sequence parallelism: as the row says, or as the framework does."""
    said = re.search(r"(no|without|w/o)?\s*sequence.parallel", row["notes"].lower())
    return software.sequence if said is None else not said[1]


def _ends(row: TableRow, slots: int, predicted: int) -> bool:
    """Whether embedding and head are dealt out as layers."""
    said = re.search(r"embeddings? (balanced|and loss count)|count as layers|ASYM", row["notes"])
    layers = count(row, "layers", 1 if "mamba" in row["mlp_type"] else None, LAYERS)
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


def overlap_of_run(row: TableRow, software: Framework, parallel: ParallelPlan) -> Overlap:
    """What runs beside compute: as the framework does, or as the row says."""
    text = f"{row['framework']} {row['notes']}".lower()
    if _bare(row):
        return Overlap(False, False, False, False, False, False)
    usual = overlap_of(software.key)
    tensor = (usual.tensor or "async tp" in text or "asynctp" in text) and "vanilla tp" not in text
    pipeline = usual.pipeline or parallel.virtual > 1
    return replace(usual, tensor=tensor, pipeline=pipeline, experts=_exchanges_overlap(row, text))


def _exchanges_overlap(row: TableRow, text: str) -> bool:
    said = row.get("a2a_overlap", "")
    return said == "on" if said else "a2a overlap" in text
