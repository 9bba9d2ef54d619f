"""MLPerf's recommendation runs (DLRM-DCNv2): the step predicted beside the one measured. Nothing is fitted on the rows.

Measured with HugeCTR: whole steps as CUDA graphs, dense layers in fp16, pooled rows sent in fp16, own fused kernels and
plans. presage has FBGEMM's kernels, PyTorch's ops and its own plan. `step_time` is without host time, as CUDA graphs
have next to none; `with_host` is the same step launched op by op from Python, as TorchRec does; `embeddings` only what
the tables take (a part, so below).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import dlrm_ranks, predict_dlrm
from presage.embeddings.table_files import read_tables
from presage.errors import InputError, PresageError
from presage_validation.public_table import count, platform_name, read_table, run_seconds
from presage_validation.score import AccuracyResult, Row, Skipped

Tell = Callable[[str], None]
SOURCE = "mlperf_dlrm"
COLUMNS = ("source_key", "gpu", "gpus_per_node", "n_gpus", "global_batch", "step_time_s", "step_time_s_derived")
NO_HOST = 1e-3
SEARCH, BRIEF = 20.0, 3.0  # seconds at most


@dataclass(frozen=True)
class _Run:
    line: int
    gpu: str
    platform: str
    ranks: int
    batch: int
    seconds: float

    @property
    def name(self) -> str:
        return f"line {self.line}: {self.ranks} {self.gpu}, batch {self.batch}"


def score_dlrm(path: str | Path, tell: Tell = lambda _: None) -> AccuracyResult:
    """Score the rows of a table of public runs."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    known: dict[tuple[str, int, int], Mapping[str, float]] = {}
    for line, row in _read(Path(path)):
        try:
            run = _run(line, row)
            tell(run.name)
            key = run.platform, run.ranks, run.batch
            if key not in known:
                known[key] = _predicted(run)
        except PresageError as e:
            skipped.append(Skipped(f"line {line}", str(e)))
            continue
        rows += [Row(metric, run.gpu, run.name, value, run.seconds) for metric, value in known[key].items()]
    return AccuracyResult("dlrm", str(path), tuple(rows), tuple(skipped))


def dlrm_seconds(row: Mapping[str, str]) -> float:
    """A row's step without host time."""
    run = _run(0, row)
    return _bare(run.platform, run.ranks, run.batch)


@cache
def _bare(platform: str, ranks: int, batch: int) -> float:
    job = mlperf_job(platform, ranks, batch)
    return predict_dlrm(dlrm_ranks(job, seconds=BRIEF, pace=NO_HOST), draws=1).step.p50


def mlperf_job(platform: str, ranks: int, batch: int) -> DlrmJob:
    """The reference model, in the precision of the submissions."""
    tables, _ = read_tables(Path(str(files("presage").joinpath("data/dlrm/mlperf_dcnv2.json"))))
    return DlrmJob("dlrm-dcnv2", tables, batch, ranks, platform, interaction="dcn", precision="fp16", wire="fp16")


def _predicted(run: _Run) -> dict[str, float]:
    job = mlperf_job(run.platform, run.ranks, run.batch)
    team = dlrm_ranks(job, seconds=SEARCH, pace=NO_HOST)
    bare = predict_dlrm(team, draws=1).step.p50
    whole = dlrm_ranks(job, given=team.plan)
    return {
        "step_time": bare,
        "with_host": predict_dlrm(whole, draws=1).step.p50,
        "embeddings": team.cost.seconds,
    }


def _read(path: Path) -> list[tuple[int, Mapping[str, str]]]:
    """The table's rows of this kind, with their lines."""
    found = [(line, row) for line, row in read_table(path, COLUMNS) if row["source_key"] == SOURCE]
    if not found:
        raise InputError(path, f"has no rows of {SOURCE}", "source_key")
    return found


def _run(line: int, row: Mapping[str, str]) -> _Run:
    node, ranks, batch = (count(row, k) for k in ("gpus_per_node", "n_gpus", "global_batch"))
    return _Run(line, row["gpu"], platform_name(row["gpu"], node), ranks, batch, run_seconds(row))
