"""TorchTitan's configuration files (TOML), old and new, as the sections of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from presage.configs.models import preset_key
from presage.errors import InputError
from presage.hardware.facts import load_toml
from presage.parallel.schedules import schedule_kind

Table = Mapping[str, Any]
# Settings that are read, in the sections they have been in over the years.
KNOWN = {
    "model": ("name", "flavor", "converters"),
    "training": (
        "batch_size", "local_batch_size", "global_batch_size", "seq_len", "compile", "tensor_parallel_degree",
        "data_parallel_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree", "mixed_precision_param",
        "mixed_precision_reduce", "dtype", "enable_float8_linear", "enable_cpu_offload",
    ),
    "parallelism": (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
        "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
        "expert_tensor_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
        "pipeline_parallel_layers_per_stage", "enable_async_tensor_parallel", "fsdp_reshard_after_forward",
        "context_parallel_load_balance", "context_parallel_rotate_method",
        "pipeline_parallel_expert_parallel_overlap", "expert_parallel_comm_backend",
    ),
    "experimental": (
        "pipeline_parallel_degree", "context_parallel_degree", "pipeline_parallel_schedule",
        "pipeline_parallel_microbatches", "enable_async_tensor_parallel",
    ),
    "activation_checkpoint": ("mode", "selective_ac_option"),
    "optimizer": ("name",),
    "compile": ("enable", "components"),
    "float8": ("enable_float8_linear", "recipe_name", "enable_fsdp_float8_all_gather"),
    "quantize": ("linear",),
}  # fmt: skip
QUIET_KEYS = re.compile(
    r"^(lr|eps|beta.*|weight_decay|implementation|steps|max_norm|dataset.*|warmup.*|seed|.*_path|norm_type)$"
)
QUIET = ("job", "profiling", "metrics", "checkpoint", "lr_scheduler", "comm", "validation", "fault_tolerance", "debug")
TITAN_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "flexibleinterleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble", "zbvzerobubble": "zb-v", "dualpipev": "dualpipev",
}  # fmt: skip
BACKENDS = {"standard": "", "deepep": "deepep", "hybridep": "hybridep"}  # of exchanges with experts
HOME = "pytorch/torchtitan"


def read_titan(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sections of a job file, and what was not read."""
    path = Path(path)
    return titan_sections(load_toml(path), path)


def titan_sections(table: Table, path: str | Path = HOME) -> tuple[dict[str, Any], tuple[str, ...]]:
    get = _Getter(table, path)
    training: dict[str, Any] = {"sequence": get.whole("seq_len", "training", default=2048)}
    parallel = _parallel(get)
    batch = get.whole("local_batch_size", "training") or get.whole("batch_size", "training") or 1
    training |= _batches(get, parallel, batch) | {"precision": _precision(get), "recompute": _recompute(get)}
    training |= _recipe(get, training["precision"])
    if optimizer := get("name", "optimizer"):
        training["optimizer"] = str(optimizer).lower()
    sections = {
        "model": _model(get),
        "training": training,
        "parallel": parallel,
        "framework": _framework(get),
        "overlap": {"tensor": bool(get("enable_async_tensor_parallel", "parallelism", "experimental"))},
    }
    return sections, _ignored(table)


class _Getter:
    """Settings by key, from the first section that has it."""

    def __init__(self, table: Table, path: str | Path) -> None:
        self.table, self.path = table, path

    def __call__(self, key: str, *sections: str) -> Any:
        for section in sections:
            settings = self.table.get(section)
            if isinstance(settings, Mapping) and key in settings:
                return settings[key]
        return None

    def whole(self, key: str, *sections: str, default: int = 0) -> int:
        value = self(key, *sections)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(self.path, f"is {value!r}: it should be a whole number", f"{sections[0]}.{key}")
        return value

    def degree(self, key: str) -> int:
        return self.whole(key, "parallelism", "training", "experimental", default=1)


def _model(get: _Getter) -> dict[str, Any]:
    family, flavor = get("name", "model"), get("flavor", "model")
    if family is None or flavor is None:
        return {}
    name = preset_key(f"{family} {flavor}")
    if name is None:
        what = f"{family!r} of flavor {flavor!r} is not known: give the job's own [model]"
        raise InputError(get.path, what, "model.flavor")
    return {"preset": name}


def _parallel(get: _Getter) -> dict[str, Any]:
    tp, pp, cp = (get.degree(f"{kind}_parallel_degree") for kind in ("tensor", "pipeline", "context"))
    copies, shard = get.degree("data_parallel_replicate_degree"), get.degree("data_parallel_shard_degree")
    if get("data_parallel_degree", "training") is not None:
        shard = get.degree("data_parallel_degree")
    elif get("data_parallel_shard_degree", "parallelism", "training") is None:
        shard = -1  # all that are left over
    out: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": get.degree("expert_parallel_degree")}
    out["expert_tp"] = get.degree("expert_tensor_parallel_degree")
    out["sequence_parallel"] = tp > 1
    if get("context_parallel_load_balance", "parallelism") is False:
        out["cp_balance"] = "none"
    if shard > 0:
        out["dp"] = copies * shard
    if shard * cp != 1:
        keeps = get("fsdp_reshard_after_forward", "parallelism") or "default"
        out |= {"fsdp": True, "zero": 2 if keeps == "never" or (keeps == "default" and pp > 1) else 3}
        if copies > 1:
            out["replicate"] = copies
    if pp > 1:
        out |= _stages(get)
    return out | _dispatcher(get)


def _stages(get: _Getter) -> dict[str, Any]:
    kind = str(get("pipeline_parallel_schedule", "parallelism", "experimental") or "1F1B")
    schedule = TITAN_SCHEDULES.get(kind.lower())
    if schedule is None:
        what = f"is {kind!r}: choose from 1F1B, Interleaved1F1B, GPipe, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"
        raise InputError(get.path, what, "parallelism.pipeline_parallel_schedule")
    chunks = 1 if schedule_kind(schedule).chunks in ("one", "any") else 2  # TorchTitan's two stages a rank unless told
    if schedule_kind(schedule).pairs and get("pipeline_parallel_expert_parallel_overlap", "parallelism") is False:
        what = f"is false: {kind} is modelled with forwards beside backwards; use ZBVZeroBubble"
        raise InputError(get.path, what, "parallelism.pipeline_parallel_expert_parallel_overlap")
    return {"schedule": schedule, "virtual": chunks, "ends_as_layers": True}


def _dispatcher(get: _Getter) -> dict[str, Any]:
    """How tokens reach experts, where it is not by all-to-alls."""
    name = str(get("expert_parallel_comm_backend", "parallelism") or "standard")
    if name not in BACKENDS:
        what = f"is {name!r}: choose from {', '.join(BACKENDS)}"
        raise InputError(get.path, what, "parallelism.expert_parallel_comm_backend")
    return {"dispatcher": BACKENDS[name]} if BACKENDS[name] else {}


def _batches(get: _Getter, parallel: Table, batch: int) -> dict[str, Any]:
    """A replica's batch is one microbatch, or several of a pipeline."""
    each = batch
    if parallel["pp"] > 1:
        old = get("pipeline_parallel_degree", "experimental") is not None  # as many microbatches as stages
        count = get.whole("pipeline_parallel_microbatches", "experimental", default=parallel["pp"] if old else 0)
        each = batch // count if count else get.whole("pipeline_parallel_microbatch_size", "parallelism", default=1)
    out: dict[str, Any] = {"micro_batch": max(1, each)}
    whole = get.whole("global_batch_size", "training", default=-1)
    if whole > 0:
        out["global_batch"] = whole
    elif each != batch:
        out["microbatches"] = max(1, batch // max(1, each))
    return out


def _precision(get: _Getter) -> str:
    eights = get("enable_float8_linear", "float8", "training") or any(
        "float8" in str(c) or "mx" in str(c) for c in get("converters", "model") or ()
    )
    if eights:
        return "mxfp8" if any("mx" in str(c) for c in get("converters", "model") or ()) else "fp8"
    named = str(get("mixed_precision_param", "training") or "bfloat16")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(named, named)


def _recipe(get: _Getter, precision: str) -> dict[str, Any]:
    """Scaling of fp8, and what lies on the host. TorchTitan scales by tensor unless told."""
    out: dict[str, Any] = {}
    linear = get("linear", "quantize")
    inner = linear.get("float8", {}) if isinstance(linear, Mapping) else {}
    if precision == "fp8":
        out["scaling"] = str(get("recipe_name", "float8") or inner.get("recipe_name") or "tensorwise")
    if get("enable_cpu_offload", "training"):
        what = "offloads parameters and gradients too, which is not modelled: use the job's host_optimizer"
        raise InputError(get.path, what, "training.enable_cpu_offload")
    return out


def _recompute(get: _Getter) -> str:
    mode = str(get("mode", "activation_checkpoint") or "selective").lower()
    option = str(get("selective_ac_option", "activation_checkpoint") or "2")
    if mode != "selective":
        return mode if mode in ("none", "full") else "selective:op"
    return "selective:op" if not option.isdigit() else "full" if option == "1" else f"every-{option}"


def _framework(get: _Getter) -> dict[str, Any]:
    compiled = bool(get("enable", "compile") or get("compile", "training"))
    parts = get("components", "compile") or ["model", "loss"]
    out: dict[str, Any] = {"name": "torchtitan" if compiled and "model" in parts else "torchtitan-eager"}
    if compiled and "loss" in parts:
        out["fused_loss"] = True
    if str(get("mixed_precision_reduce", "training")) == "bfloat16":
        out["reduce_bytes"] = 2
    return out


def _ignored(table: Table) -> tuple[str, ...]:
    names = [
        f"{section}.{key}"
        for section, settings in table.items()
        if section not in QUIET and isinstance(settings, Mapping)
        for key in settings
        if key not in KNOWN.get(section, ()) and not QUIET_KEYS.match(key)
    ]
    return (f"not read: {', '.join(names)}",) if names else ()
