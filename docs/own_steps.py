"""Training steps of Llama-like models that we measured on one H200, predicted as jobs. No factor was fitted on
them, but their traces showed which passes of eager code were missing: first measured, those that wait for the GPU were
7.6% off.

`tools/measure_steps.py` measured them: Hugging Face's eager code, bf16, PyTorch's fused AdamW with all state in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from presage.configs.frameworks import framework
from presage.configs.job import Job, Recompute
from presage.configs.transformer import Transformer
from presage.files.reading import read_json
from presage.hardware import platform
from presage.memory import job_memory
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.job_step import job_step
from presage_validation.score import AccuracyResult, Row

__all__ = ["own_job", "score_own_steps"]

GIB = 1024.0**3
PLATFORM = "dgx-h200"


def own_job(row: Mapping[str, Any], vocab: int) -> Job:
    where = platform(PLATFORM)
    model = Transformer(
        row["hidden"], row["layers"], row["heads"], vocab, row["ffn"], row["kv_heads"], row["hidden"] // row["heads"]
    )
    eager = framework(
        "torchtitan-eager", where.gpu, gradient_bytes=2, fused_norms=False, fused_loss=False, attention="flash3"
    )  # cuDNN's, as its trace shows
    return Job(
        model, where, 1, row["sequence"], row["micro_batch"], row["micro_batch"], ParallelPlan(),
        recompute=Recompute(row["recompute"]), framework=eager, optimizer="adam-16bit",
    )  # fmt: skip


def score_own_steps(path: str | Path) -> AccuracyResult:
    found = read_json(path)
    rows: list[Row] = []
    for row in found["rows"]:
        job = own_job(row, found["about"]["vocab"])
        name = (
            f"{row['hidden']} x {row['layers']}, {row['micro_batch']} x {row['sequence']}, recompute {row['recompute']}"
        )
        took = job_step(job)
        group = "host-bound" if took.parts["host"] > 0.3 * took.seconds else "GPU-bound"
        rows.append(Row("step_time", group, name, took.seconds, row["step_ms"] * 1e-3))
        rows.append(Row("peak_memory", group, name, job_memory(job).peak, row["reserved_GiB"] * GIB))
    return AccuracyResult("own steps", str(path), tuple(rows))
