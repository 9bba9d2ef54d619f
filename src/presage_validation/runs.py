"""Public training runs: the step time and peak memory of each row's job beside what was measured.

`step_time` is presage as it ships, whose few global efficiencies were fitted on the development rows of such a table;
`step_time_left_out` is with efficiencies fitted without any row of that row's source. Sources that the fit never saw
have one figure in both. `step_time_unfitted` is what the laws alone say. Recommendation runs have a metric of their
own: another kind of job (see docs/sharding.md), with no part in the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from presage.configs.job import Job
from presage.memory import job_memory
from presage.pool.pool import SERIAL, Pool
from presage.prediction.jobs.efficiency import LAWS, left_out, shipped
from presage.prediction.jobs.job_step import job_step
from presage_validation.dlrm import dlrm_seconds
from presage_validation.public_table import number, read_table, run_seconds
from presage_validation.run_jobs import job_of_run
from presage_validation.score import Result, Row, Skipped
from presage_validation.sweep import Failed, swept

__all__ = ["COLUMNS", "score_runs"]

Tell = Callable[[str], None]
COLUMNS = (
    "source_key", "complete", "framework", "model", "hidden", "layers", "heads", "kv_heads", "ffn", "mlp_type", "vocab",
    "seq_len", "moe_experts", "moe_topk", "moe_ffn", "gpu", "gpus_per_node", "interconnect", "n_gpus", "tp", "pp",
    "vpp", "cp", "ep", "fsdp_zero", "micro_batch", "global_batch", "precision", "recompute", "step_time_s",
    "step_time_s_derived", "notes",
)  # fmt: skip
GIB = 1024.0**3
PIECE = 16  # rows in one piece of work
SCALES = ((8, "1-8 GPUs"), (64, "9-64 GPUs"), (512, "65-512 GPUs"), (2048, "513-2048 GPUs"))


def score_runs(path: str | Path, tell: Tell = lambda _: None, pool: Pool = SERIAL) -> Result:
    """Score the rows of a table of public runs."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    refused = 0
    table = read_table(Path(path), COLUMNS)
    for (line, row), found in swept(_scored, table, tell, _told, pool, PIECE):
        if isinstance(found, Failed):
            skipped.append(Skipped(f"line {line} ({row['source_key']})", found.reason))
            continue
        rows += found[0]
        refused += not found[1]
    rates = {"runs called out of memory": refused / max(1, sum(r.metric == "step_time" for r in rows))}
    return Result("runs", str(path), tuple(rows), tuple(skipped), rates)


def _told(numbered: tuple[int, Mapping[str, str]]) -> str:
    line, row = numbered
    return f"line {line}: {row['source_key']} {row['model']}"


def _scored(numbered: tuple[int, Mapping[str, str]]) -> tuple[list[Row], bool]:
    """Its rows, and whether it fits in memory."""
    line, row = numbered
    source, seconds = row["source_key"], run_seconds(row)
    if row["complete"] == "dlrm":
        name = f"line {line}: {row['model']} on {row['n_gpus']} {row['gpu']}, batch {row['global_batch']}"
        return [Row("step_time_recommendation", source, name, dlrm_seconds(row), seconds)], True
    job = job_of_run(row)
    name, also = _name(line, row, job), _groups(row, job)
    rows = [
        Row(metric, source, name, job_step(job, e).seconds, seconds, also)
        for metric, e in (
            ("step_time", shipped()),
            ("step_time_left_out", left_out(source)),
            ("step_time_unfitted", LAWS),
        )
    ]
    memory = job_memory(job)
    return rows + list(_memory(row, name, also, memory.peak)), memory.fits


def _memory(row: Mapping[str, str], name: str, also: tuple[str, ...], peak: float) -> Iterator[Row]:
    measured = number(row, "peak_mem_gib")
    if measured:
        yield Row("peak_memory", row["source_key"], name, peak, measured * GIB, also)


def _name(line: int, row: Mapping[str, str], job: Job) -> str:
    p = job.parallel
    plan = f"tp{p.tp} pp{p.pp}x{p.virtual} cp{p.cp} ep{p.ep} dp{job.dp} mb{job.micro_batch}"
    what = f"{row['model']} on {job.gpus} {row['gpu']}"
    return f"line {line}: {what}, {plan}, batch {job.global_batch}, {row['precision']}"


def _groups(row: Mapping[str, str], job: Job) -> tuple[str, ...]:
    scale = next((name for most, name in SCALES if job.gpus <= most), "over 2048 GPUs")
    return f"GPU {row['gpu']}", scale, "MoE" if job.model.experts else "dense"
