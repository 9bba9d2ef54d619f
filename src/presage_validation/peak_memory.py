"""Peak memory from flags and configs alone, beside what allocators counted; and what fits, beside what ran.

Three tables, told apart by their columns: reference values of Megatron-LM's functional tests, fine-tuning runs (those
that did not finish ran out of memory), and public runs that state a peak. Nothing is fitted on them but the margin
below which a job is called fitting, which one half of the cases sets and the other tests.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from presage.errors import InputError, PresageError
from presage.files.reading import lines
from presage.memory import SAFETY, JobMemory, job_memory
from presage.pool.pool import SERIAL, Pool
from presage_validation.finetune import COLUMNS as FINE_TUNED
from presage_validation.finetune import finetune_group, finetune_job
from presage_validation.goldens import GOLDEN_COLUMNS, golden_bytes
from presage_validation.public_table import number, read_table
from presage_validation.run_jobs import COLUMNS as PUBLIC
from presage_validation.run_jobs import job_of_run
from presage_validation.score import AccuracyResult, Row, cut_evenly, run_cases

Tell = Callable[[str], None]
GIB = 1024.0**3
LARGE = 8 * GIB
PIECE = 32  # rows in one piece of work
MARGINS = tuple(i / 20 for i in range(1, 9))  # of the GPU's memory, in steps of 5%, from which one is chosen


class Verdict(NamedTuple):
    """Whether a run fitted, and the most it takes of the GPU's memory as predicted, with blocks that lie idle."""

    case: str
    name: str
    ran: bool
    device: float
    memory: float

    def fits(self, margin: float) -> bool:
        """Whether it is called fitting with so much of the memory left free."""
        return self.device <= (1 - margin) * self.memory


class Scored(NamedTuple):
    """One row of a table: its prediction beside its measurement, and its verdict; a row may have one of these only."""

    row: Row | None
    verdict: Verdict | None


@dataclass(frozen=True)
class Confusion:
    """How many runs were called fitting or not, by whether they ran."""

    true_fits: int
    false_fits: int
    true_oom: int
    false_oom: int


def confusion(verdicts: Sequence[Verdict], margin: float) -> Confusion:
    said = [(v.fits(margin), v.ran) for v in verdicts]
    return Confusion(*(said.count(pair) for pair in ((True, True), (True, False), (False, False), (False, True))))


def half(case: str) -> int:
    """Which half a case is in: all its rows are in one."""
    return sha256(f"margin:{case}".encode()).digest()[0] % 2


def chosen_margin(verdicts: Sequence[Verdict]) -> float:
    """The least margin with which no run that ran out of memory is called fitting."""
    return next((m for m in MARGINS if not confusion(verdicts, m).false_fits), MARGINS[-1])


@dataclass(frozen=True)
class MemoryResult(AccuracyResult):
    """Errors of peaks, and verdicts."""

    verdicts: tuple[Verdict, ...] = ()

    @cached_property
    def halves(self) -> tuple[tuple[float, Confusion], ...]:
        """For each half: the margin that the other half sets, and what it makes of this one."""
        parts = [[v for v in self.verdicts if half(v.case) == i] for i in (0, 1)]
        margins = [chosen_margin(part) for part in parts]
        return tuple((margins[1 - i], confusion(parts[i], margins[1 - i])) for i in (0, 1))

    def to_json(self) -> dict[str, Any]:
        out = super().to_json()
        fits = asdict(confusion(self.verdicts, SAFETY))
        out["metrics"]["fits"] = fits
        halves = [{"margin": m, **asdict(c)} for m, c in self.halves]
        return {**out, "fits": fits, "margin": SAFETY, "halves": halves}


def score_memory(paths: Sequence[str | Path], tell: Tell = lambda _: None, pool: Pool = SERIAL) -> MemoryResult:
    """Score every row of the tables that states a peak or whether it ran."""
    cases = [(kind, line, row) for path in paths for kind, (line, row) in _table(Path(path))]
    done, skipped = run_cases(_scored, (), tell, _format, pool, cut_evenly(cases, PIECE))
    rows = tuple(s.row for _, s in done if s.row)
    verdicts = tuple(s.verdict for _, s in done if s.verdict)
    where = " ".join(map(str, paths))
    return MemoryResult("memory", where, rows, tuple(skipped), {}, None, "peak_memory", verdicts)


Case = tuple[str, int, Mapping[str, str]]


def _table(path: Path) -> list[tuple[str, tuple[int, Mapping[str, str]]]]:
    """The rows of a table with its kind."""
    head = next(csv.reader(lines(path)), [])
    kinds = {"golden": GOLDEN_COLUMNS, "fine-tuning": FINE_TUNED, "run": PUBLIC}
    for kind, columns in kinds.items():
        if set(columns) <= set(head):
            return [(kind, numbered) for numbered in read_table(path, columns)]
    raise InputError(path, "is none of the tables it takes: goldens, fine-tuning runs or public runs, by their columns")


def _format(case: Case) -> str:
    kind, line, row = case
    told = {"golden": ("suite", "case", "gpu"), "fine-tuning": ("model", "framework_config", "n_gpus")}
    return f"line {line} ({' '.join(row.get(c, '') for c in told.get(kind, ('source_key', 'model')))})"


def _scored(case: Case) -> Scored:
    kind, _, row = case
    return {"golden": _golden, "fine-tuning": _fine_tuned, "run": _public}[kind](_format(case), row)


def _also(measured: float, *groups: str) -> tuple[str, ...]:
    return (*groups, "above 8 GiB") if measured > LARGE else groups


def _verdict(case: str, name: str, ran: bool, found: JobMemory) -> Verdict:
    return Verdict(case, name, ran, max(s.device for s in found.stages), found.memory)


# ---- the tables


def _golden(name: str, row: Mapping[str, str]) -> Scored:
    if row.get("duplicate_of"):
        raise PresageError("its values are those of another row")
    measured = (
        number(row, "mem_max_allocated_bytes") if row["mem_max_allocated_bytes"].strip() not in ("0", "0.0") else 0
    )
    if not measured:
        raise PresageError("it has no peak")
    peak, job, found = golden_bytes(row)
    metric = "peak_memory_gpus_found" if found else "peak_memory"
    also = _also(measured, f"GPU {row['gpu']}", "Megatron-Core", *(["experts"] if job.model.experts else []))
    verdict = None if found else _verdict(row.get("split_group") or row["case"], name, True, job_memory(job))
    return Scored(Row(metric, f"suite {row['suite']}", name, peak, measured, also), verdict)


def _fine_tuned(name: str, row: Mapping[str, str]) -> Scored:
    job = finetune_job(row)
    found = job_memory(job)
    verdict = _verdict(row.get("case", name), name, row.get("outcome", "ok") == "ok", found)
    measured = number(row, "mem_torch_peak_bytes")
    if not measured:
        return Scored(None, verdict)
    variable = row["seq_len"] == "variable"
    metric = "peak_memory_mean_length" if variable else "peak_memory"
    also = _also(measured, "GPU A100-80GB", "Hugging Face Trainer", "1 GPU" if job.gpus == 1 else "FSDP")
    peak = max(s.allocated for s in found.stages)
    return Scored(Row(metric, f"fine-tuning {finetune_group(row)}", name, peak, measured, also), verdict)


def _public(name: str, row: Mapping[str, str]) -> Scored:
    measured = number(row, "peak_mem_gib") if row.get("peak_mem_gib", "").strip() else None
    if not measured:
        raise PresageError("it states no peak memory")
    job = job_of_run(row)
    found = job_memory(job)
    also = _also(measured * GIB, f"GPU {row['gpu']}", job.framework.name)
    row_ = Row("peak_memory", f"runs {row['source_key']}", name, found.peak, measured * GIB, also)
    return Scored(row_, _verdict(f"{row['source_key']} {row['model']}", name, True, found))
