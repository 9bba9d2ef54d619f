"""A job as the text of a job file, with all that it says written out, so that it reads back as the same job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from presage.configs.frameworks import Framework, framework, frameworks
from presage.configs.job import Job
from presage.configs.models import model_fields
from presage.configs.recipes import recipe_fields
from presage.configs.tuning import tuning_fields

MB = 1e6
SWITCHES = (
    "attention", "compiled", "fused_norms", "dropout", "fused_loss", "gradient_bytes", "reduce_bytes", "gather_bytes",
    "host", "dispatcher", "fused_adapters", "graphs", "flat_gathers", "broadcasts", "sequence", "async_backward",
    "fused_accumulation", "attention_masks", "grouped_experts", "foreach", "logit_bytes", "extra_bytes", "update_bytes",
    "forward_us", "backward_us",
)  # fmt: skip


def job_toml(job: Job, cluster: Mapping[str, Any], comment: str = "") -> str:
    """`cluster`: the table that says what the job runs on, as its own file has it."""
    table = {
        "name": job.name,
        "model": model_fields(job.model),
        "training": _training(job),
        "parallel": _parallel(job),
        "overlap": asdict(job.overlap),
        "framework": _framework(job.framework, job),
        "cluster": dict(cluster) or {"platform": job.platform.key},
    }
    first = [f"# {line}" for line in comment.splitlines()]
    return "\n".join([*first, *_lines(table)]).strip() + "\n"


def table_toml(table: Mapping[str, Any]) -> str:
    """Any table of a job file's sections as its text."""
    return "\n".join(_lines(table)).strip() + "\n"


def changed_keys(before: Job, after: Job) -> list[tuple[str, str]]:
    """Keys of a job file and the values that make one job the other, as `--set` takes them."""
    one, other = (_flat({"training": _training(job), "parallel": _parallel(job)}) for job in (before, after))
    return [(key, _value(value).strip('"')) for key, value in other.items() if one.get(key) != value]


def _flat(table: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        out |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return out


def cluster_beside(cluster: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """The table of a file, for another file: names of files in it are beside the first."""

    def moved(value: Any) -> Any:
        if not isinstance(value, str) or not value.endswith(".toml"):
            return value
        return os.path.relpath(before.parent / value, now.parent)

    return {key: moved(value) for key, value in cluster.items()}


def _training(job: Job) -> dict[str, Any]:
    r = job.recompute
    again = r.mode if r.share == 1 and not r.modules else {"mode": r.mode, "modules": list(r.modules), "share": r.share}
    return {
        "sequence": job.sequence, "micro_batch": job.micro_batch, "global_batch": job.global_batch,
        "precision": job.precision, "optimizer": job.optimizer, "recompute": again, **tuning_fields(job.tuning),
        **recipe_fields(job.recipe), **({"lengths": list(job.lengths)} if job.lengths else {}),
    }  # fmt: skip


def _parallel(job: Job) -> dict[str, Any]:
    """Layers are dealt out by hand where they do not come out even."""
    p = job.parallel
    given = {k: v for k, v in asdict(p).items() if k not in ("layers_as", "ends_as_layers")}
    out = {"gpus": job.gpus, **given} | ({} if job.balanced else {"cp_balance": "none"})
    if p.layers_as or (job.model.layers + 2 * p.ends_as_layers) % p.slot_count:
        out["layers_as"] = list(job.parallel.slot_layers(job.model.layers, job.model.predicted))
    else:
        out["ends_as_layers"] = p.ends_as_layers
    return out


def _framework(f: Framework, job: Job) -> str | dict[str, Any]:
    """Its name, and the switches that are not as usual in it."""
    name = f.key if f.key in frameworks() else "megatron-core"
    usual = framework(name, job.platform.gpu)
    other = {k: getattr(f, k) for k in SWITCHES if getattr(f, k) != getattr(usual, k)}
    if f.bucket_bytes != usual.bucket_bytes:
        other["bucket_MB"] = f.bucket_bytes / MB
    return {"name": name, **other} if other else name


def _lines(table: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Values first, then tables."""
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    yield from (f"{key} = {_value(value)}" for key, value in table.items() if key not in tables)
    for key, inner in tables.items():
        name = f"{section}.{key}" if section else key
        yield from ("", f"[{name}]", *_lines(inner, name))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    return repr(value)
