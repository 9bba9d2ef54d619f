"""The jobs behind logs of step times: from a row of a table of runs that tells of the same system, or from what the log
itself says of its parallel layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from presage.configs.job import Job
from presage.configs.transformer import Transformer
from presage.errors import PresageError
from presage_validation.run_jobs import COLUMNS, TableRow, job_of_run, known

SOURCE = "mlperf_405b"  # of a table's rows that are of these logs: efficiencies fitted without it are taken
SEQUENCE = {"gpt3": 2048}  # tokens of MLPerf's other language models: 8,192
USUAL_SEQUENCE = 8192
FRAMEWORK = "NeMo (MLPerf)"  # what MLPerf's reference of these models is written in
SHARDED = "zero1(dist-opt)"
ASSUMED = "sequence parallel, TP comm overlap"  # of MLPerf's configs


@dataclass(frozen=True)
class LoggedJob:
    """A job, and where its config is from."""

    job: Job
    source: str  # a table's key of the source, or that of MLPerf's rows
    config: str  # in words


def job_of_log(meta: Mapping[str, Any], table: Sequence[tuple[int, TableRow]]) -> LoggedJob:
    """The job of a system; raises with the reason where it cannot be expressed."""
    for line, row in table:
        if _same(meta, row):
            return LoggedJob(job_of_run(row), row["source_key"], f"line {line} of the table of runs")
    return LoggedJob(job_of_run(row_of_log(meta)), SOURCE, "the log's own layout")


def _same(meta: Mapping[str, Any], row: TableRow) -> bool:
    """Whether a row is of a log's system and benchmark."""
    place = f"{meta.get('system')}/{meta.get('benchmark')}/"
    return place in row.get("source_file", "") and row["global_batch"] == str(meta.get("global_batch"))


def row_of_log(meta: Mapping[str, Any]) -> TableRow:
    """What a log says of its job, as a row of the table of runs."""
    benchmark = str(meta.get("benchmark") or "")
    model, plan = model_of_benchmark(benchmark), meta.get("parallel")
    if not isinstance(plan, Mapping) or "tp" not in plan:
        raise PresageError("the log does not say its parallel layout, and the table of runs has no row of the system")
    if not plan.get("precision"):
        raise PresageError("the log does not say its precision")
    network = " + ".join(str(meta[k]) for k in ("interconnect", "host_network") if meta.get(k))
    row = dict.fromkeys(COLUMNS, "") | _sizes(model)
    row |= {k: str(plan[k]) for k in ("tp", "pp", "vpp", "cp", "ep", "micro_batch") if plan.get(k)}
    row |= {
        "source_key": SOURCE,
        "complete": "yes",
        "framework": FRAMEWORK,
        "seq_len": str(meta.get("seq_len") or SEQUENCE.get(benchmark, USUAL_SEQUENCE)),
        "gpu": str(meta.get("accelerator") or ""),
        "gpus_per_node": str(meta.get("gpus_per_node") or ""),
        "interconnect": network,
        "n_gpus": str(meta.get("n_gpus") or ""),
        "global_batch": str(meta.get("global_batch") or ""),
        "fsdp_zero": SHARDED,
        "precision": str(plan["precision"]),
        "recompute": "none",
        "notes": ASSUMED,
    }
    _check_ranks(row, plan)
    return row


def _check_ranks(row: TableRow, plan: Mapping[str, Any]) -> None:
    ranks = 1
    for name in ("tp", "pp", "cp", "dp"):
        ranks *= int(plan.get(name) or 1)
    if str(ranks) != row["n_gpus"]:
        raise PresageError(f"its layout is of {ranks} GPUs, and the log says {row['n_gpus'] or 'nothing'}")


def model_of_benchmark(name: str) -> Transformer:
    """The transformer that an MLPerf benchmark pre-trains."""
    low = name.lower()
    if "lora" in low:
        raise PresageError("fine-tuning with LoRA is not a job that can be expressed")
    dotted = re.sub(r"llama(\d)(\d)", r"llama\1.\2", low)
    spelled = re.sub(r"gpt_?oss", "gpt-oss", re.sub(r"seek_?v", "seek-v", dotted))
    for one in (low, dotted, spelled, re.sub(r"_pretrain\w*$", "", spelled)):
        found = known(one)
        if found is not None:
            return found
    raise PresageError(f"{name or 'a benchmark without a name'} is not a language model that a job describes")


def _sizes(model: Transformer) -> dict[str, str]:
    e = model.experts
    experts = {"moe_experts": e.experts, "moe_topk": e.top_k, "moe_ffn": e.ffn} if e else {}
    sizes: dict[str, object] = {"hidden": model.hidden, "layers": model.layers, "heads": model.heads, "ffn": model.ffn}
    sizes |= {"vocab": model.vocab, "kv_heads": "MLA" if model.latent else model.kv_heads, **experts}
    return {k: str(v) for k, v in sizes.items()} | {"model": model.name, "mlp_type": model.activation}
