"""MLPerf's recommendation runs (DLRM-DCNv2): the step predicted beside the one measured. Nothing is fitted on the rows.

The runs are HugeCTR's; presage predicts them with the framework's published options, its planner's plan, the platform
that a row describes, and kernels and collectives measured elsewhere. A row's time is its batch over the throughput of
the whole run, evaluations included (tracked_stats of the submissions' logging callback), so the prediction is a
training step and its share of the evaluations. The sizes of data and evaluation are the benchmark's; the evaluation's
batch is that of NVIDIA's configs. GPUs without NVLink are a metric of their own: the table does not tell how their PCIe
is wired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from presage.embeddings.dlrm_job import DlrmJob, Evaluation
from presage.embeddings.dlrm_ranks import dlrm_ranks, evaluation_seconds, predict_dlrm
from presage.embeddings.dlrm_system import dlrm_system
from presage.embeddings.table_files import read_tables
from presage.errors import InputError, PresageError
from presage.hardware import Platform
from presage_validation.public_table import count, platform_of_run, read_table, run_seconds
from presage_validation.score import AccuracyResult, Row, Skipped

Tell = Callable[[str], None]
SOURCE = "mlperf_dlrm"
COLUMNS = (
    "source_key", "source", "gpu", "gpus_per_node", "n_gpus", "global_batch", "interconnect", "step_time_s",
    "step_time_s_derived",
)  # fmt: skip
EVALUATED, TRAINED, PART = 89_137_319, 4_195_197_692, 0.05  # samples, samples of an epoch, of it between evaluations
EVALUATION_BATCH, LARGE, LARGE_BATCH = 1_048_576, 128, 2_097_152  # of NVIDIA's configs, by ranks
NODE_GB, NODES_GB = 0.008, 0.0125  # tables below are data-parallel, by NVIDIA's configs of one node and of several


@dataclass(frozen=True)
class _Run:
    line: int
    gpu: str
    place: Platform
    ranks: int
    batch: int
    framework: str
    seconds: float

    @property
    def name(self) -> str:
        return f"line {self.line}: {self.ranks} {self.gpu}, batch {self.batch}"

    @property
    def metric(self) -> str:
        return "step_time" if self.place.links[0].name == "nvlink" else "step_time_pcie"


def score_dlrm(path: str | Path, tell: Tell = lambda _: None) -> AccuracyResult:
    """Score the rows of a table of public runs."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for line, row in _read(Path(path)):
        try:
            run = _run(line, row)
            tell(run.name)
            seconds = _seconds(run.place, run.ranks, run.batch, run.framework)
        except PresageError as e:
            skipped.append(Skipped(f"line {line}", str(e)))
            continue
        rows.append(Row(run.metric, run.gpu, run.name, seconds, run.seconds))
    return AccuracyResult("dlrm", str(path), tuple(rows), tuple(skipped))


def dlrm_row(row: Mapping[str, str]) -> tuple[str, float]:
    """A row's metric, and its predicted step with its share of evaluation."""
    run = _run(0, row)
    return run.metric, _seconds(run.place, run.ranks, run.batch, run.framework)


@cache
def _seconds(place: Platform, ranks: int, batch: int, framework: str) -> float:
    team = dlrm_ranks(mlperf_job(place, ranks, batch, framework), place=place)
    return predict_dlrm(team, draws=1).step.p50 + evaluation_seconds(team)


def mlperf_job(place: Platform, ranks: int, batch: int, framework: str = "hugectr") -> DlrmJob:
    """The reference model as NVIDIA's submissions run it."""
    tables, _ = read_tables(Path(str(files("presage").joinpath("data/dlrm/mlperf_dcnv2.json"))))
    system = dlrm_system(framework)
    if system.replicate_GB:
        system = replace(system, replicate_GB=NODE_GB if ranks <= place.domain else NODES_GB)
    tested = Evaluation(EVALUATED, LARGE_BATCH if ranks >= LARGE else EVALUATION_BATCH, int(PART * TRAINED))
    return DlrmJob(
        "dlrm-dcnv2", tables, batch, ranks, place.key, interaction="dcn", precision="fp16", plan=system.plan,
        index="int32", wire="fp16", system=system, evaluation=tested,
    )  # fmt: skip


def _read(path: Path) -> list[tuple[int, Mapping[str, str]]]:
    """The table's rows of this kind, with their lines."""
    found = [(line, row) for line, row in read_table(path, COLUMNS) if row["source_key"] == SOURCE]
    if not found:
        raise InputError(path, f"has no rows of {SOURCE}", "source_key")
    return found


def _run(line: int, row: Mapping[str, str]) -> _Run:
    node, ranks, batch = (count(row, k) for k in ("gpus_per_node", "n_gpus", "global_batch"))
    place = platform_of_run(row["gpu"], node, row["interconnect"])
    first = "hugectr-23.04" if "v3.0" in row["source"] else "hugectr"  # v3.0 has no data-parallel tables
    return _Run(line, row["gpu"], place, ranks, batch, first, run_seconds(row))
