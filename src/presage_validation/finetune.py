"""Fine-tuning runs: step time and peak memory of full, LoRA and QLoRA runs beside what was measured.

Two kinds of data: a table of runs on one node (fms-acceleration's benchmarks: a row each), and logs of MLPerf's LoRA
benchmark (Llama 2 70B: the median of a system's block means). Nothing is fitted on either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from presage.configs.frameworks import framework
from presage.configs.job import Job, Recompute
from presage.configs.models import preset, preset_key
from presage.configs.transformer import Transformer
from presage.configs.tuning import FULL, Tuning, tuned_matrices
from presage.errors import PresageError
from presage.files.reading import read_json
from presage.memory import job_memory
from presage.parallel.plan import ParallelPlan
from presage.pool.pool import SERIAL, Pool
from presage.prediction.jobs.job_step import job_step
from presage_validation.public_table import count, number, platform_of_run, read_table
from presage_validation.score import AccuracyResult, Row, run_cases

Tell = Callable[[str], None]
COLUMNS = ("model", "method", "fused_kernels", "torch_dtype", "n_gpus", "per_device_batch", "seq_len", "step_time_s")
LORA = "llama2_70b_lora"
SEQUENCE = 8192  # tokens of a sample of that benchmark
QUANTISED = {"nf4": "nf4", "gptq": "gptq"}


def score_finetune(paths: Sequence[str | Path], tell: Tell = lambda _: None, pool: Pool = SERIAL) -> AccuracyResult:
    """Score tables of runs and logs of MLPerf's benchmark."""
    cases: list[tuple[str, Any]] = []
    for path in map(Path, paths):
        cases += _systems(path) if ".json" in path.name else [("row", x) for x in read_table(path, COLUMNS)]
    done, skipped = run_cases(_scored, cases, tell, _format, pool)
    rows = [r for _, found in done for r in found]
    return AccuracyResult("finetune", " ".join(map(str, paths)), tuple(rows), tuple(skipped))


def _format(case: tuple[str, Any]) -> str:
    kind, x = case
    return f"line {x[0]} ({x[1]['model']}, {x[1]['method']})" if kind == "row" else str(kind)


def _scored(case: tuple[str, Any]) -> list[Row]:
    kind, x = case
    return list(_table_rows(*x) if kind == "row" else _system_rows(kind, x))


# ---- a table of runs


def _table_rows(line: int, row: Mapping[str, str]) -> Iterator[Row]:
    if row.get("outcome", "ok") != "ok":
        raise PresageError(f"it did not finish ({row['outcome']})")
    job = finetune_job(row)
    data = "variable lengths" if row["seq_len"] == "variable" else "packed to full length"
    group = finetune_group(row)
    name = f"line {line}: {row['model']} {group}, {job.gpus} GPUs x {job.micro_batch} x {job.sequence}"
    also = (data, "1 GPU" if job.gpus == 1 else f"FSDP, {data}")
    yield Row("step_time", group, name, job_step(job).seconds, float(row["step_time_s"]), also)
    peak = number(row, "mem_torch_peak_bytes")
    if peak:
        memory = job_memory(job)
        yield Row("peak_memory", group, name, max(s.allocated for s in memory.stages), peak, also)


def finetune_group(row: Mapping[str, str]) -> str:
    """How a row is tuned, and with what kernels."""
    return f"{_method(row)}, {'fused' if row['fused_kernels'] == 'yes' else 'eager'}"


def _method(row: Mapping[str, str]) -> str:
    packed = next((name for word, name in QUANTISED.items() if word in row.get("weights_quant", "")), "")
    return "full" if "full" in row["method"] else f"LoRA over {packed}" if packed else "LoRA"


def finetune_job(row: Mapping[str, str]) -> Job:
    """The job a row tells of: Hugging Face's trainer, FSDP over the GPUs of a node."""
    name = row["model"].removesuffix("-GPTQ").replace("TheBloke/", "").replace("NousResearch/", "")
    name = name.removesuffix("-Instruct-v0.1").removesuffix("-v0.1").split("/")[-1]
    if preset_key(name) is None:
        raise PresageError(f"no preset of {row['model']}")
    model = preset(name)
    if model.experts and "full" in row["method"]:
        raise PresageError("experts of ScatterMoE, or of an eager loop, are not modelled")
    fused, method = row["fused_kernels"] == "yes", _method(row)
    gpus, precision = count(row, "n_gpus"), "fp16" if row["torch_dtype"] == "float16" else "bf16"
    platform = platform_of_run("A100-80GB", 8, "NVLink")
    software = framework("hf-fused" if fused or row.get("liger_loss") == "yes" else "hf-trainer", platform.gpu)
    software = replace(software, logit_bytes=_logit_bytes(row, model))
    if method == "LoRA":  # fms-acceleration fuses adapters of quantised weights alone
        software = replace(software, fused_adapters=False)
    whole = method == "full" and bool(row.get("amp")) and gpus > 1  # accelerate makes weights fp32 under autocast
    sequence = count(row, "seq_len") if row["seq_len"] != "variable" else round(float(row["tokens_per_sample"]))
    each, more = count(row, "per_device_batch"), count(row, "grad_accum", 1)
    plan = ParallelPlan(fsdp=True, zero=3) if gpus > 1 else ParallelPlan()
    return Job(
        model=replace(model, window=0), platform=platform, gpus=gpus, sequence=max(1, sequence), micro_batch=each,
        global_batch=each * gpus * more, parallel=plan, precision=precision, recompute=Recompute("full"),
        framework=software, overlap=software.overlap, optimizer="adam" if whole else "adam-16bit",
        tuning=_tuning(row, method, fused), name=row["model"],
    )  # fmt: skip


def _logit_bytes(row: Mapping[str, str], model: Transformer) -> float:
    """Bytes of the loss by logit: in fp32, shifted by a token, and its logarithms; a fused kernel has two of these.
    From transformers 4.46 on the loss makes the first, and the 16 bits it is made from stay. Liger's loss goes by
    chunks of as many tokens as make logits as large as hidden states, and has their gradient."""
    if row.get("liger_loss") == "yes":
        return 8.0 * model.hidden / model.vocab
    fused = row["fused_kernels"] == "yes" and "bigcode" not in row["model"]  # whose loss it does not replace
    version = re.search(r"transformers 4\.(\d+)", row.get("software", ""))
    return (8.0 if fused else 12.0) + (2.0 if not version or int(version[1]) >= 46 else 0.0)


def _tuning(row: Mapping[str, str], method: str, fused: bool) -> Tuning:
    if method == "full":
        return FULL
    targets = tuned_matrices(t for t in row["lora_targets"].split() if t != "c_attn")
    base = next((name for name in QUANTISED.values() if name in method), "16bit")
    # PEFT keeps adapters in fp32; with autocast, or in fused kernels, they multiply in 16 bits
    bits = 16 if (fused and base != "16bit") or row.get("amp") else 32
    # PEFT's own preparation of quantised models; FSDP's mixed precision casts the stream back
    wide = row.get("framework_config", "") == "baseline-peft-bnb" and count(row, "n_gpus") == 1
    return Tuning("lora", round(float(row["lora_r"])), targets, base, bits, residual_bits=32 if wide else 16)


# ---- MLPerf's LoRA benchmark


def _systems(path: Path) -> list[tuple[str, Any]]:
    """Runs of the benchmark by system."""
    found: dict[str, list[dict[str, Any]]] = {}
    logs = read_json(path)
    for run in logs if isinstance(logs, list) else logs["runs"]:
        if run["benchmark"] == LORA:
            found.setdefault(f"{run['submitter']} {run['system']}", []).append(run)
    if not found:
        raise PresageError(f"{path}: has no runs of {LORA}")
    return list(found.items())


def _system_rows(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    job = lora_job(runs[0])
    blocks = [seconds for run in runs for _, seconds in run["blocks"]]
    if not blocks:
        raise PresageError("no step times were logged")
    chip = "GB200" if "GB200" in runs[0]["accelerator"] else "B200" if "B200" in runs[0]["accelerator"] else "others"
    told = f"{name}: {job.gpus} GPUs, cp {job.parallel.cp}"
    yield Row(
        "step_time", f"MLPerf LoRA, {chip}", told, job_step(job).seconds, median(blocks), (f"cp {job.parallel.cp}",)
    )


def lora_job(run: Mapping[str, Any]) -> Job:
    """Llama 2 70B with adapters of rank 16 on attention, fp8, as NeMo's recipe has it."""
    p = run["parallel"]
    if not p:
        raise PresageError("its parallel configuration is not known")
    chip = run["accelerator"].partition("(")[2].rstrip(")") or run["accelerator"]
    gpus, per_node = int(run["n_gpus"]), int(run["gpus_per_node"])
    domain = per_node if "GB" not in chip else 72
    where = platform_of_run(chip.split("-")[0], domain, "NVL72" if domain == 72 else "NVLink")
    software = framework("nemo", where.gpu)
    tuning = Tuning("lora", 16, ("qkv", "o"), "fp8", dropout=True)
    plan = ParallelPlan(
        tp=p["tp"], pp=p["pp"], virtual=p.get("vpp") or 1, cp=p["cp"], sequence_parallel=p["tp"] > 1, zero=1
    )
    return Job(
        model=preset("llama2-70b"), platform=where, gpus=gpus, sequence=SEQUENCE, micro_batch=p["micro_batch"],
        global_batch=int(run["global_batch"]), parallel=plan, precision=p["precision"], framework=software,
        overlap=software.overlap, tuning=tuning, name=LORA,
    )  # fmt: skip
