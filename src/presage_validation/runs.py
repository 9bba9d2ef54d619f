"""Public training runs: the step time and peak memory of each row's job beside what was measured.

`step_time` is presage as it ships, whose few global efficiencies were fitted on the development rows of such a table;
`step_time_left_out` is with efficiencies fitted without any row of that row's source. Sources that the fit never saw
have one figure in both. `step_time_unfitted` is what the laws alone say. Recommendation runs have a metric of their
own: another kind of job (see docs/sharding.md), with no part in the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from presage.configs.job import Job
from presage.memory import job_memory
from presage.pool.pool import SERIAL, Pool
from presage.prediction.jobs.efficiency import LAWS, efficiency_without, shipped_efficiency
from presage.prediction.jobs.job_step import job_step
from presage_validation.dlrm import dlrm_row
from presage_validation.public_table import number, read_table, run_seconds
from presage_validation.run_jobs import COLUMNS, job_of_run, simulated
from presage_validation.score import AccuracyResult, Row, cut_evenly, run_cases

Tell = Callable[[str], None]
GIB = 1024.0**3
SAME = ("source_key", "model", "gpu", "n_gpus", "tp", "pp", "vpp", "ep", "micro_batch", "global_batch", "a2a_overlap")
PIECE = 16  # rows in one piece of work
SCALES = ((8, "1-8 GPUs"), (64, "9-64 GPUs"), (512, "65-512 GPUs"), (2048, "513-2048 GPUs"))


def score_runs(
    paths: str | Path | Sequence[str | Path], tell: Tell = lambda _: None, pool: Pool = SERIAL
) -> AccuracyResult:
    """Score the rows of a table of public runs, or of several."""
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    table = [numbered for path in given for numbered in read_table(Path(path), COLUMNS)]
    done, skipped = run_cases(_scored, (), tell, _format_row, pool, cut_evenly(table, PIECE))
    rows = [r for _, (rows, _) in done for r in rows]
    refused = sum(not fits for _, (_, fits) in done)
    rates = {"runs called out of memory": refused / max(1, sum(r.metric == "step_time" for r in rows))}
    signs = comparison_signs(table, rows)
    if signs:
        rates[f"dispatcher comparisons of the right sign ({len(signs)})"] = sum(signs) / len(signs)
    return AccuracyResult("runs", " ".join(map(str, given)), tuple(rows), tuple(skipped), rates)


def comparison_signs(table: Sequence[tuple[int, Mapping[str, str]]], rows: Sequence[Row]) -> list[bool]:
    """For each pair of runs that differ in their dispatcher alone, whether the faster one is predicted to be."""
    said = {(row["source_key"], f"line {line}"): row for line, row in table if row.get("ep_dispatcher")}
    alike: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        row = said.get((r.group, r.name.partition(":")[0])) if r.metric == "step_time_left_out" else None
        if row is not None:
            alike.setdefault(tuple(row.get(c, "") for c in SAME), []).append(r)
    pairs = [(a, b) for some in alike.values() for i, a in enumerate(some) for b in some[i + 1 :]]
    return [(a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs]


def _format_row(numbered: tuple[int, Mapping[str, str]]) -> str:
    line, row = numbered
    return f"line {line} ({row['source_key']} {row['model']})"


def _scored(numbered: tuple[int, Mapping[str, str]]) -> tuple[list[Row], bool]:
    """Its rows, and whether it fits in memory."""
    line, row = numbered
    source, seconds = row["source_key"], run_seconds(row)
    if row["complete"] == "dlrm":
        name = f"line {line}: {row['model']} on {row['n_gpus']} {row['gpu']}, batch {row['global_batch']}"
        metric, predicted = dlrm_row(row)
        of_kind = metric.replace("step_time", "step_time_recommendation")
        return [Row(of_kind, source, name, predicted, seconds)], True
    job = job_of_run(row)
    name, also = _name(line, row, job), _groups(row, job)
    rows = [
        Row(metric, source, name, job_step(job, e).seconds, seconds, also)
        for metric, e in (
            ("step_time", shipped_efficiency()),
            ("step_time_left_out", efficiency_without(source)),
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
    kind = "hybrid" if job.model.mamba else "MoE" if job.model.experts else "dense"
    return f"GPU {row['gpu']}", scale, kind, "simulated" if simulated(row) else "measured"
